"""Waiting with a limit: a cancellation is one, also in the moment in which what is waited for ends."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import farandole
from farandole.platform.process import beside, up_to, within
from tests.support.every import every


@pytest.mark.parametrize("ticks", range(6))
def test_who_is_cancelled_as_the_wait_ends_is_cancelled(ticks: int) -> None:
    async def play() -> None:
        event = asyncio.Event()

        async def tend() -> None:
            while True:
                await up_to(60.0, event)
                event.clear()

        tending = asyncio.create_task(tend())
        for _ in range(5):
            await asyncio.sleep(0)
        event.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        tending.cancel()
        await asyncio.wait({tending}, timeout=5.0)
        assert tending.cancelled()

    asyncio.run(play())


def test_what_takes_too_long_is_cancelled_and_over() -> None:
    over: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0)
            over.append("over")

    async def play() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, long())
        assert over == ["over"]
        assert await within(5.0, asyncio.sleep(0, "it")) == "it"
        with pytest.raises(ZeroDivisionError):
            await within(5.0, fails())
        await up_to(0.01, asyncio.Event())

    async def fails() -> None:
        raise ZeroDivisionError

    asyncio.run(play())


@every(sorted(Path(farandole.__file__).parent.rglob("*.py")))
def test_nobody_waits_in_the_other_way(path: Path) -> None:
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    found = [node for node in attributes if ast.unparse(node) == "asyncio.wait_for"]
    assert not found, "a cancellation may be lost: farandole.platform.process has what keeps it"


@pytest.mark.parametrize("fails", [False, True])
def test_what_runs_beside_is_over_with_it(fails: bool) -> None:
    over: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            over.append("other")

    async def what() -> str:
        await asyncio.sleep(0)
        if fails:
            raise ZeroDivisionError
        return "it"

    async def play() -> None:
        if fails:
            with pytest.raises(ZeroDivisionError):
                await beside(what(), other())
        else:
            assert await beside(what(), other()) == "it"
        assert over == ["other"]

    asyncio.run(play())
