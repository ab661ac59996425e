"""Checks of the command line before anything is started: bounds of numbers, names, scripts, price files."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand, TyperOption

from farandole.code.pack import Origin
from farandole.errors import UsageError
from farandole.platform import output
from farandole.platform.bounds import MAX_COUNT, MAX_WORKERS, real, whole
from farandole.platform.output import LONGEST_NAME, is_name, is_text
from farandole.platform.toml import read_toml
from farandole.protocol.cost import Prices
from farandole.run_options import RUN_OPTIONS
from farandole.settings import verbosity

# --- options of a run -------------------------------------------------------------------------------------------------


def option(name: str) -> Any:
    """Returns what typer makes an option of: the option of `run_options.py` with that name, which is the parameter's.

    Its value is None if it is not given and a resumed run keeps the former value.
    """
    declared = RUN_OPTIONS[name]
    return typer.Option(
        None if declared.is_kept else declared.default,
        declared.flag,
        help=declared.help,
        metavar=declared.metavar or "|".join(declared.choices) or None,
        show_default=declared.shown_default or (str(declared.default) if declared.is_kept else True),
        hidden=declared.hidden,
        rich_help_panel=declared.group,
    )


_BY_FLAG = {declared.flag: declared for declared in RUN_OPTIONS.values()}

# --- checks -----------------------------------------------------------------------------------------------------------

WHOLE = {  # bounds of the integer options that `run_options.py` does not declare; those not listed start at 0
    "WORKERS": (0, MAX_WORKERS),
    "--steps": (0, 10**6),
    "--rounds": (1, 10**6),
    "--processes": (1, 1024),
}


PASS_ON = {"allow_interspersed_args": False}  # arguments after the script belong to the script


class OnceCommand(TyperCommand):
    """A command that refuses an option that is given twice. The parser alone would take the last one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # that is the completion of a shell
            given, extra, order = self.make_parser(ctx).parse_args(args=[*args])
            if extra and any("--run" in param.opts for param in self.params) and Path(extra[0]).is_dir():
                raise UsageError(f"{extra[0]}: give the run's folder with --run {extra[0]}")
            for param, times in Counter(order).items():
                if times > 1 and isinstance(param, TyperOption) and not (param.multiple or param.count):
                    names = " or ".join(name for name in (*param.opts, *param.secondary_opts) if name[:2] == "--")
                    raise UsageError(f"{names} is given {times} times; give it once")
            self.check_given(ctx, given)
        return super().parse_args(ctx, args)

    def check_given(self, ctx: typer.Context, given: Mapping[str, Any]) -> None:
        """A command may look at what the command line gives, by the names of its parameters."""


def bound(app: typer.Typer) -> None:
    """Makes each command check its numeric options before it begins, and refuse an option that is given twice.

    Hidden commands are left out: farandole starts them, with numbers that were checked already.
    """
    for verb in app.registered_commands:
        if verb.callback is not None and not verb.hidden:
            verb.callback = _checked(verb.callback)
            if verb.cls is None or not issubclass(verb.cls, OnceCommand):
                verb.cls = OnceCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            bound(group.typer_instance)


def _checked(verb: Callable[..., None]) -> Callable[..., None]:
    @wraps(verb)
    def checked(**values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                _check(_option(verb, name), value)
        verb(**values)

    return checked


def _option(verb: Callable[..., None], name: str) -> str:
    """Returns the option or argument on the command line for the parameter `name`."""
    metadata = getattr(get_type_hints(verb, include_extras=True)[name], "__metadata__", ())
    words = [
        word
        for each in (*metadata, inspect.signature(verb).parameters[name].default)
        for word in (getattr(each, "default", None), *(getattr(each, "param_decls", None) or ()))
        if isinstance(word, str) and word.startswith("-")  # typer stores the first option as the default
    ]
    return max(words, key=len, default=name.upper())


def _check(option: str, value: float) -> None:
    if option in _BY_FLAG:
        _BY_FLAG[option].check(value)
    elif isinstance(value, int):
        least, most = WHOLE.get(option, (0, MAX_COUNT))
        whole(f"{option} {{}}", value, least, most)
    else:
        real(f"{option} {{}}", value)


def part(text: str) -> float:
    """Returns the value of a fraction such as 0.001 or 0.1%. Raises UsageError."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--audit {text}: give a part of all micro-batches, such as 0.001 or 0.1%") from None


def check_words(words: Iterable[str]) -> None:
    """Raises UsageError if a word of the command line is not UTF-8: files and messages of a run can't hold it."""
    for word in words:
        if not is_text(word):
            raise UsageError(f"{word!r} is not UTF-8, the encoding of a run's files; use another name")


def check_name(folder: Path | None, script: str) -> None:
    """Raises UsageError if the run's name, which is its folder's, is too long or has characters that can't be seen."""
    name = folder.absolute().name if folder else Origin.from_script(script).run_name
    if not is_name(name):
        where = f"--folder {folder}: " if folder else f"script {script}: name a --folder; "
        raise UsageError(f"{where}a run's name has at most {LONGEST_NAME} characters, all of them visible")
    check_words([str((folder or Path()).absolute())])


def check_script(script: str) -> None:
    """Raises UsageError if `script` is neither a readable file nor a module, or is no Python program."""
    try:
        with Path(Origin.from_script(script).script).open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise UsageError(f"script {script}: {error.strerror}; give the path of a file, or a module's name") from None
    if b"\0" in first or (first.startswith(b"#!") and b"python" not in first):
        raise UsageError(
            f"script {script}: it is no Python program; let it call `farandole run` where it calls `python`"
        )


def show_script_help(script: str, arguments: Sequence[str] | None) -> None:
    """If the script's arguments ask for its help, runs the script alone to show it, and raises Exit or SystemExit."""
    words = list(arguments or ())
    if words == ["-h"] or "--help" in itertools.takewhile(lambda word: word != "--", words):
        from farandole.script import show_help

        show_help(script, words)
        raise typer.Exit


# --- verbose ----------------------------------------------------------------------------------------------------------
#
# `-v`, the same for each command that starts processes: the verbosity of farandole's log, here and in all of them.


def _verbose(times: int) -> int:
    if times:
        os.environ["FARANDOLE_VERBOSE"] = str(times)
        output.show(verbosity())
    return times


Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, callback=_verbose, show_default=False,
        help="More logging; -vv logs every message.",
    ),
]  # fmt: skip


# --- price file -------------------------------------------------------------------------------------------------------
#
# The file of `--prices`: TOML or JSON, by its suffix.
#
#     date = 2026-11-01          the day of these prices
#     [pools]
#     local = 0.40               dollars an hour of each host of the pool
#     [hosts]
#     gpu-box = 1.20             dollars an hour of this host
#
# The same in JSON: {"date": "2026-11-01", "pools": {"local": 0.4}, "hosts": {"gpu-box": 1.2}}.


def read(path: Path) -> Prices:
    """Returns the prices in the file. Raises UsageError, with the reason, if it can't be read or is invalid."""
    try:
        prices = msgspec.convert(_parsed(path), Prices, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"prices {path}: {error}; the file holds a date, and tables [pools] and [hosts] of prices"
        ) from None
    try:
        date.fromisoformat(prices.date)
    except ValueError:
        raise UsageError(
            f"prices {path}: date = {prices.date!r}: write the day of the prices, as date = 2026-11-01"
        ) from None
    return prices


def _parsed(path: Path) -> Any:
    if path.suffix == ".json":
        try:
            return msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise UsageError(f"prices {path}: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise UsageError(f"prices {path}: invalid JSON: {error}") from None
    if path.suffix != ".toml":
        raise UsageError(f"prices {path}: its name must end in .toml or .json")
    table = read_toml(path, f"prices {path}")
    day = table.get("date")
    return {**table, "date": day.isoformat()} if type(day) is date else table


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(option: str, text: str) -> int:
    """Returns the seconds of a duration such as "90s", "30m", "12h" or "7d".

    Raises:
        UsageError: the text has another form; it names the option.
    """
    form = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if form is None or not int(form[1]):
        raise UsageError(
            f"{option} {text}: give a whole number above 0, of at most six digits, and a unit, as 90s, 30m, 12h or 7d"
        )
    return int(form[1]) * UNITS[form[2]]


def check_file(option: str, path: Path | None) -> None:
    """Raises UsageError if the folder of a file to write does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no such folder")


def write_file(option: str, path: Path, content: bytes) -> None:
    """Raises UsageError: the file can't be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from None


def check_plot(plot: Path | None) -> None:
    """Raises UsageError if a chart can't be drawn to the file `plot`."""
    if plot is None:
        return
    if plot.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot {plot}: its name must end in .svg or .png")
    check_file("--plot", plot)
    if plot.suffix == ".png":
        from farandole.observe.report import find_browser

        find_browser(f"--plot {plot}", "use a name that ends in .svg")


def write_plot(plot: Path, picture: str) -> None:
    """Writes an SVG to the file `plot`, as it is or as a PNG."""
    if plot.suffix == ".svg":
        write_file("--plot", plot, picture.encode())
        return
    from farandole.observe.report import find_browser, take_picture

    option = f"--plot {plot}"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chart.svg"
        page.write_text(picture)
        take_picture(find_browser(option, "use a name that ends in .svg"), option, page, plot.absolute())
