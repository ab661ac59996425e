"""docs/account.md shows each class of time as the command shows it, in its order."""

from __future__ import annotations

import re
from pathlib import Path

from farandole.protocol.values import CLASSES, MEANING

PAGE = (Path(__file__).parents[2] / "docs" / "account.md").read_text()


def test_the_page_shows_the_classes_with_the_words_of_the_command() -> None:
    shown = re.findall(r"^(\w+) +[\d.]+ +[\d.]+  (.*)$", PAGE, re.MULTILINE)
    assert shown == [(name, MEANING[name]) for name in CLASSES]
