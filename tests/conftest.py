"""What several modules need: a run of one within the tests' own process; the chaos job undisturbed, trained once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import farandole
from chaos.trial import undisturbed
from chaos.verdict import Reference
from farandole import run as runs

SEED = 5


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "chaos"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def reference(place: Path) -> Reference:
    return undisturbed(place)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[farandole.Run]:
    for name in ("TICKET", "WORKER", "POOL", "FOLDER", "LEDGER", "THREADS"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setattr(runs, "_current", None)
    threads = torch.get_num_threads()
    yield farandole.join()
    torch.set_num_threads(threads)
