"""Reads TOML files of users. An error names the file, the line, and a key that is given twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import msgspec

from farandole.errors import UsageError
from farandole.platform.files import open_regular

_LINE = re.compile(r"at line (\d+)")
_KEY = re.compile(r"""\s*\[*\s*([\w.-]+|"[^"]*"|'[^']*')\s*(?:=|\])""")


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """Return the content of the file. `where` begins the error.

    Raises:
        UsageError: the file can't be read, is not a regular file, or is not valid TOML.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: invalid TOML: byte {error.start} is not UTF-8") from None
    try:
        content = msgspec.toml.decode(text)
        _check_integers(content)
    except msgspec.DecodeError as error:
        raise UsageError(_reason(where, text, str(error))) from None
    except RecursionError:
        raise UsageError(f"{where}: invalid TOML: its arrays or tables are nested too deeply") from None
    except ValueError as error:  # Python's limit for the digits of a number, or ours
        raise UsageError(f"{where}: invalid TOML: {error}") from None
    return content


def _check_integers(value: Any) -> None:
    """Raise `ValueError` if an integer has more than the 64 bits of TOML. Python can't show one with many digits."""
    if isinstance(value, dict | list):
        for each in cast("list[Any]", list(value.values()) if isinstance(value, dict) else value):
            _check_integers(each)
    elif isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("an integer has more than 64 bits")


def _reason(where: str, text: str, error: str) -> str:
    """Return what is wrong. The parser does not name a key that is given twice: it is the last one before the error."""
    if "overwrite" not in error and "twice" not in error:
        return f"{where}: invalid TOML: {error}"
    lines = text.splitlines()
    at = _LINE.search(error)
    number = int(at[1]) if at else len(lines)
    while number > 1 and not _KEY.match(lines[number - 1]):
        number -= 1
    key = _KEY.match(lines[number - 1])
    return f"{where}, line {number}: {key[1] if key else error} is given twice; keep one of them"
