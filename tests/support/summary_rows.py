"""The rows of a run's final summary, whose long texts go on in further lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from farandole.observe.summary import NAME


def rows_of(lines: Sequence[str]) -> dict[str, str]:
    """The text of each row by its name; the pauses, whose rows have no name, by 0, 1, ..."""
    rows: dict[str, str] = {}
    for line in lines:
        name, text = line[:NAME].strip(), line[NAME:]
        if name or re.match(r" *[\d.]+ ms  ", text):
            rows[name or str(sum(row.isdigit() for row in rows))] = text
        elif text:
            rows[list(rows)[-1]] += f" {text.strip()}"
    return rows
