"""Bounds of numbers from users: on a command line, in the environment, in a file, in a script. Each number is checked
where it is read, so that an invalid number fails before anything is started. NaN is never within bounds.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from farandole.errors import UsageError

MAX_COUNT = 2**53  # SQLite and JSON hold no larger whole numbers exactly
MAX_SECONDS = 1e9  # thirty years: timeouts are added to a clock and passed to the system
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024  # for each worker
MAX_WORKERS = 10_000


def whole(text: str, value: Any, least: int = 0, most: int = MAX_COUNT, why: str = "") -> int:
    """Return `value` as a Python int; integers of NumPy and torch are accepted. `text`: the text before the colon of an
    error, with {} for the value, as "--threads {}". `why`: the meaning of the number, or what to use.

    Raises:
        UsageError: it is not a whole number, or out of bounds; the message names both.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{text.replace('{}', f'{value!r:.100}')}: a whole number is needed{_because(why)}") from None
    if not least <= number <= most:
        raise UsageError(f"{text.replace('{}', _shown(number))}: use {least} to {most}{_because(why)}")
    return number


def real(text: str, value: Any, least: float = 0.0, most: float = MAX_SECONDS, why: str = "") -> float:
    """Return `value` as a Python float; see `whole`.

    Raises:
        UsageError: it is not a number, or out of bounds; the message names both.
    """
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not least <= number <= most:
        raise UsageError(f"{text.replace('{}', f'{value!r:.100}')}: use {least:g} to {most:g}{_because(why)}")
    return number


def _because(why: str) -> str:
    return f" ({why})" if why else ""


def _shown(number: int) -> str:
    """Return the number as text. Python refuses to write the digits of a very long one."""
    return str(number) if number.bit_length() <= 256 else f"(a number of {number.bit_length()} bits)"
