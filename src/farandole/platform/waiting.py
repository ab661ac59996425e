"""Waiting with a limit, in tasks that others may cancel.

`asyncio.wait_for` takes a cancellation away (until Python 3.12) that comes just when what it waits for has ended: the
task goes on, and who has cancelled it waits for it for ever. What is here does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, what: Awaitable[T]) -> T:
    """What comes of it.

    Raises:
        asyncio.TimeoutError: it took longer; it was cancelled, and is over.
    """
    task = asyncio.ensure_future(what)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # so that it counts as heard


async def up_to(seconds: float, event: asyncio.Event) -> None:
    """Until it is set, at most so long."""
    with contextlib.suppress(asyncio.TimeoutError):
        await within(seconds, event.wait())


async def beside(what: Awaitable[T], other: Awaitable[object]) -> T:
    """What comes of `what`; `other` runs meanwhile, and is over then."""
    task = asyncio.ensure_future(other)
    try:
        return await what
    finally:
        task.cancel()
        await asyncio.wait({task})
