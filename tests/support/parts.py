"""A part of the tests, for a run that has no time for all of them."""

from __future__ import annotations

import zlib

import pytest


def in_part(test: str, part: str) -> bool:
    """Returns whether the test with this id is in the part `K/N`: that with number K, from 0 on, of N parts."""
    number, slash, parts = part.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise pytest.UsageError(f"--part {part}: give K/N with K from 0 to N-1, such as 0/12")
    return zlib.crc32(test.encode()) % int(parts) == int(number)
