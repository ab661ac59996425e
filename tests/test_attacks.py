"""The page about those who mean harm names every attack of `make attack`, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from attack.table import ATTACKS

PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def test_the_page_names_every_attack_and_no_other() -> None:
    named = set(re.findall(r"attack `([^`]+)`", PAGE.read_text()))
    assert named == {attack.name for attack in ATTACKS}
