"""What several modules need: the chaos job undisturbed, trained once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.trial import undisturbed
from chaos.verdict import Reference


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "chaos"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def reference(place: Path) -> Reference:
    return undisturbed(place)
