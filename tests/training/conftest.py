"""Runs of one process that go on from what they have saved."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farandole
from farandole import joining
from tests.support.steps import SEED

Join = Callable[[str], farandole.Run]


class Interrupted(Exception):
    """What a script of these tests raises in the middle."""


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Join]:
    """Begins a run in a folder of this name, or goes on with it: a process has begun there, and the one before it has
    ended, whose files the kernel closes and whose lock it releases with them. It does not end with the tests' process.
    """
    for name in ("TICKET", "WORKER", "POOL", "THREADS", "HISTORY", "LEDGER"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "never")
    threads, processes = torch.get_num_threads(), dict[str, Any]()

    def end(context: Any) -> None:
        context._file.close()
        os.close(context._lock)

    def joined(folder: str) -> farandole.Run:
        if folder in processes:
            end(processes.pop(folder))
        monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path / folder))
        monkeypatch.setattr(joining, "_current", None)
        run = farandole.join()
        processes[folder] = run._context
        atexit.unregister(processes[folder]._end)
        return run

    yield joined
    for context in processes.values():
        end(context)
    torch.set_num_threads(threads)
