"""What a text says, whatever its wording: the values that it names."""

from __future__ import annotations

import re


def mentions(text: str, *values: object) -> bool:
    """Whether one line of `text` has each value as a whole: "7" is not in "step 17", nor "a" in "bias"."""
    return any(all(_whole(line, str(value)) for value in values) for line in text.splitlines())


def _whole(line: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", line) is not None
