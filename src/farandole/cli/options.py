"""What is looked at of a command line before anything is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from farandole.errors import UsageError
from farandole.platform import output
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS, MAX_WORKERS, real, whole
from farandole.platform.output import LONGEST_NAME, is_name, is_text
from farandole.protocol.cost import Prices
from farandole.settings import verbosity

# --- checks -----------------------------------------------------------------------------------------------------------

WHOLE = {  # others are from 0 on
    "--threads": (1, MAX_THREADS),
    "--seed": (-MAX_SEED, MAX_SEED),
    "--workers": (0, MAX_WORKERS),
    "--min": (0, MAX_WORKERS),
    "--max": (0, MAX_WORKERS),
    "WORKERS": (0, MAX_WORKERS),
    "--steps": (0, 10**6),
    "--rounds": (1, 10**6),
    "--processes": (1, 1024),
}


def bound(app: typer.Typer) -> None:
    """Each number that a verb is given is held to its bounds before the verb begins. Hidden verbs are started by
    farandole, with numbers that have been checked.
    """
    for verb in app.registered_commands:
        if verb.callback is not None and not verb.hidden:
            verb.callback = _checked(verb.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            bound(group.typer_instance)


def _checked(verb: Callable[..., None]) -> Callable[..., None]:
    @wraps(verb)
    def checked(**given: Any) -> None:
        for name, value in given.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                _check(_option(verb, name), value)
        verb(**given)

    return checked


def _option(verb: Callable[..., None], name: str) -> str:
    """How the parameter of that name is given on the command line."""
    metadata = getattr(get_type_hints(verb, include_extras=True)[name], "__metadata__", ())
    words = [
        word
        for each in metadata
        for word in (getattr(each, "default", None), *(getattr(each, "param_decls", None) or ()))
        if isinstance(word, str) and word.startswith("-")  # typer takes the first for a default
    ]
    return max(words, key=len, default=name.upper())


def _check(option: str, value: float) -> None:
    if isinstance(value, int):
        least, most = WHOLE.get(option, (0, MAX_COUNT))
        whole(f"{option} {{}}", value, least, most)
    else:
        real(f"{option} {{}}", value)


def part(text: str) -> float:
    """0.001 or 0.1%. Raises UsageError."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"--audit {text}: a part of all shards, such as 0.001 or 0.1%") from None


def check_words(words: Iterable[str]) -> None:
    """Raises UsageError where a word of the command line is not UTF-8: files and messages of a run can't hold it."""
    for word in words:
        if not is_text(word):
            raise UsageError(f"{word!r} is not UTF-8, in which a run's files are written: use another name")


def check_name(folder: Path | None, script: str) -> None:
    """Raises UsageError where the run, which is called as its folder is, would have a name that not all see alike."""
    name = folder.absolute().name if folder else Path(script).stem
    if not is_name(name):
        where = f"--folder {folder}: " if folder else f"script {script}: --folder is to be given, for "
        raise UsageError(f"{where}a run's name has at most {LONGEST_NAME} characters, all of them to be seen")
    check_words([str((folder or Path()).absolute())])


def check_script(script: str) -> None:
    """Raises UsageError where `script` is not a file that can be read."""
    try:
        with Path(script).open("rb"):
            return
    except OSError as error:
        raise UsageError(f"script {script}: {error.strerror}") from None


# --- verbose ----------------------------------------------------------------------------------------------------------
#
# `-v`, the same for each verb that starts processes: how much of farandole's log is shown, here and in all of them.


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
# A file of prices, as `--prices` names it: TOML or JSON, by its name.
#
#     date = 2026-11-01          the day that they are of
#     [pools]
#     local = 0.40               dollars an hour of each host of the pool
#     [hosts]
#     gpu-box = 1.20             of this one
#
# The same as JSON: {"date": "2026-11-01", "pools": {"local": 0.4}, "hosts": {"gpu-box": 1.2}}.


def read(path: Path) -> Prices:
    """Raises UsageError: it is not there, or not as above; names what is wrong in it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"prices {path}: {error.strerror}") from None
    try:
        found = msgspec.convert(_parsed(path, content), Prices, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"prices {path}: {error}; it holds a date, and tables [pools] and [hosts] of prices") from None
    try:
        date.fromisoformat(found.date)
    except ValueError:
        raise UsageError(
            f"prices {path}: date = {found.date!r}: write the day that the prices are of, as date = 2026-11-01"
        ) from None
    return found


def _parsed(path: Path, content: bytes) -> Any:
    if path.suffix == ".json":
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise UsageError(f"prices {path}: no JSON: {error}") from None
    if path.suffix != ".toml":
        raise UsageError(f"prices {path}: call it .toml or .json, as what it is")
    if sys.version_info < (3, 11):
        raise UsageError(f"prices {path}: reading TOML takes Python 3.11; write the same as JSON, in a file .json")
    import tomllib

    try:
        table = tomllib.loads(content.decode())
    except ValueError as error:
        raise UsageError(f"prices {path}: no TOML: {error}") from None
    day = table.get("date")
    return {**table, "date": day.isoformat()} if type(day) is date else table
