"""docs/account.md describes each class of time, in the table's order, and shows what the command shows."""

from __future__ import annotations

import re
from pathlib import Path

from farandole.protocol.values import CLASSES, MEANING

PAGE = (Path(__file__).parents[2] / "docs" / "account.md").read_text()


def test_the_page_has_each_class() -> None:
    described = re.findall(r"^\| `(\w+)` \| \S", PAGE, re.MULTILINE)
    assert tuple(described) == CLASSES


def test_what_it_shows_are_the_words_of_the_table() -> None:
    shown = re.findall(r"^(\w+) +[\d.]+ +[\d.]+  (.*)$", PAGE, re.MULTILINE)
    assert dict(shown) == MEANING
