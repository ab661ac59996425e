"""Waiting with a limit, in tasks that others may cancel.

`asyncio.wait_for` takes a cancellation away (until Python 3.12) that comes just when what it waits for has ended: the
task goes on, and who has cancelled it waits for it for ever. What is here does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

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


def aside(call: Callable[[], T]) -> asyncio.Future[T]:
    """What comes of `call`, made in a thread of its own, which keeps no process from ending: a file on a disk that does
    not answer is waited for there. Who no longer wants it cancels the future; the thread goes on for as long as it
    takes.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, failure: BaseException | None) -> None:
        if future.done():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(cast("T", value))

    def work() -> None:
        value, failure = None, None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  it is raised where it is waited for
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, value, failure)

    threading.Thread(target=work, name="aside", daemon=True).start()
    return future
