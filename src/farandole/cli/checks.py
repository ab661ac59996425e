"""What is looked at of a command line before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

import typer

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS, MAX_WORKERS, real, whole
from farandole.platform.output import LONGEST_NAME, is_name, is_text

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
