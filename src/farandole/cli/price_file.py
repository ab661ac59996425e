"""A file of prices, as `--prices` names it: TOML or JSON, by its name.

    date = 2026-11-01          the day that they are of
    [pools]
    local = 0.40               dollars an hour of each host of the pool
    [hosts]
    gpu-box = 1.20             of this one

The same as JSON: {"date": "2026-11-01", "pools": {"local": 0.4}, "hosts": {"gpu-box": 1.2}}.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from farandole.errors import UsageError
from farandole.membership.prices import Prices


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
