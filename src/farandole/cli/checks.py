"""What is looked at of a command line before anything is started."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from farandole.errors import UsageError
from farandole.platform.plain import LONGEST_NAME, is_name, is_text


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
