"""The local pool on a system where nothing is forked."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from farandole.platform import process
from farandole.pool.local import SLOW, LocalPool


@pytest.mark.parametrize(("supported", "fresh", "lines"), [(False, False, 1), (False, True, 0)])
def test_it_says_so_unless_that_was_asked_for(
    supported: bool, fresh: bool, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SUPPORTED", supported)
    told: list[str] = []

    async def scenario() -> None:
        command = [sys.executable, "-m", "farandole", "join"]
        pool = LocalPool(command, logs=tmp_path, threads=1, environ=os.environ, tell=told.append, fresh=fresh)
        pool.kill_all()

    asyncio.run(scenario())
    assert len(told) == lines
    assert all(SLOW in line for line in told)
