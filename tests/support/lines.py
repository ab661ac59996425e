"""Lines of what was printed or logged, by the values that they name."""

from __future__ import annotations


def naming(text: str, *values: object) -> list[str]:
    """The lines of `text` in which all of `values` stand."""
    return [line for line in text.splitlines() if all(str(value) in line for value in values)]
