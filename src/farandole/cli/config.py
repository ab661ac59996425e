"""The file of `farandole run --config`: options of the run in TOML, by their names on the command line without `--`.

    script = "train.py"
    arguments = ["--width", "64"]
    workers = 4
    checkpoint-every = "30m"
    stop-on-nan = true                  a switch is true or false

    [[pool]]                            an option that may be repeated is an array of texts, --pool also of tables
    kind = "ssh"
    hosts = "hosts.txt"

The command line wins over the file, and the file over the defaults. A script on the command line replaces `script`,
`arguments` and `module` together. `--no-NAME` turns off a switch that the file turns on. Paths count from the working
folder, as on the command line, and later checks are the same: only types are checked here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperOption

from farandole.cli.options import OnceCommand
from farandole.errors import UsageError
from farandole.platform.output import one_line
from farandole.platform.toml import read_toml

SCRIPT = ("script", "arguments", "module")  # what a script on the command line replaces
SHOWN = 60  # characters of a wrong value
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    list: "an array of texts in quotes",
}


class ConfigCommand(OnceCommand):
    """A command whose options may also be in the file of its option `config`."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for param in self.params:
            if isinstance(param, TyperOption) and param.is_bool_flag and not param.secondary_opts:
                opts = [f"--no-{_name(name)}" for name in param.opts if name.startswith("--")]
                parser.add_option(obj=param, opts=opts, dest=param.name, action="store_const", const=False)
        return parser

    def check_given(self, ctx: typer.Context, given: Mapping[str, Any]) -> None:
        """Read the file, so that its values replace the defaults.

        Raises:
            UsageError: the file is invalid, or no script is given.
        """
        if given.get("help"):
            return
        path, values = given.get("config"), dict[str, Any]()
        where = f"--config {path}"
        if path is not None:
            values = self._values(read_toml(Path(path), where), where)
        if values.get("arguments") and "script" not in values:
            raise UsageError(
                f"{where}: arguments belong to a script: add script = ..., or write both on the command line"
            )
        if given.get("script") is None and "script" not in values:
            raise UsageError(
                f"{where + ': ' if path else ''}the script is missing; give SCRIPT, or `script` in the file of --config"
            )
        if given.get("script") is not None:
            values = {name: value for name, value in values.items() if name not in SCRIPT}
        if ctx.parent is not None and ctx.parent.params.get("verbose"):  # `farandole -v run`
            values.pop("verbose", None)
        ctx.default_map = values

    def _values(self, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of the file's keys, by the names of the command's parameters."""
        keys: dict[str, tuple[str, bool]] = {}  # the parameter, and True unless the key is the other name of a switch
        for param in self.params:
            if param.name != "config":
                names = (*param.opts, *param.secondary_opts) if isinstance(param, TyperOption) else (param.name,)
                for name in names:
                    if name.startswith("--") or not isinstance(param, TyperOption):
                        keys[_name(name)] = (param.name, name not in param.secondary_opts)
        assert self.callback is not None
        hints = get_type_hints(self.callback)
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for key, value in table.items():
            if key not in keys:
                [nearest] = difflib.get_close_matches(key.lower().replace("_", "-"), keys, n=1, cutoff=0.0)
                raise UsageError(
                    f"{where}: `farandole run` has no option {one_line(key)[:SHOWN]!r}; the nearest is {nearest!r}"
                )
            name, is_first = keys[key]
            if name in values:
                raise UsageError(f"{where}: {given[name]} and {key} are the same switch; keep one of them")
            given[name] = key
            _check_type(hints[name], name, value, f"{where}: {key}")
            values[name] = value if is_first else not value
            if name == "pool" and isinstance(value, str):
                values[name] = [value]
        return values


def _check_type(hint: Any, name: str, value: Any, where: str) -> None:
    """Raise `UsageError` if the value has another type than the parameter. Only `pool` takes tables."""
    kind = next((each for each in get_args(hint) if each is not NoneType), hint)
    if get_args(kind):
        single = (str, dict) if name == "pool" else (str,)
        fits = isinstance(value, list) and all(isinstance(each, single) for each in value)
        fits = fits or (name == "pool" and isinstance(value, str))
        words = "a text in quotes, or an array of them, or tables [[pool]]" if name == "pool" else _WORDS[list]
    else:
        kind = kind if kind in _WORDS else str  # a path is a text
        numbers = (int, float) if kind is float else (kind,)
        fits = isinstance(value, numbers) and isinstance(value, bool) == (kind is bool)
        words = _WORDS[kind]
    if not fits:
        raise UsageError(f"{where} = {one_line(repr(value))[:SHOWN]}: give {words}")
    if any("\0" in each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)):
        raise UsageError(f"{where} holds the character NUL, which no option can have; leave it out")


def _name(option: str) -> str:
    return option.removeprefix("--")
