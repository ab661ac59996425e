"""Asks the cloud whose machine this is for notices, for as long as it is let; which cloud, it finds out by asking.

Nothing waits for it. A machine that is no cloud's is asked three times, within seconds, for its services may come up
later than this process; then nothing more is done, and nothing said. Where the cloud was named, or found, it is asked
for ever: a service that does not answer is asked again later and later, up to `LONGEST_S`, and that is said once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from farandole.membership.hosts import Notified
from farandole.pool.notices.azure import Azure
from farandole.pool.notices.base import Metadata, Reader, Unanswered
from farandole.pool.notices.clouds import AZURE, EC2, GOOGLE, NONE
from farandole.pool.notices.ec2 import Ec2
from farandole.pool.notices.google import Google

_log = logging.getLogger(__name__)

READERS: dict[str, Callable[[Metadata], Reader]] = {EC2: Ec2, GOOGLE: Google, AZURE: Azure}
TRIES, FIRST_S = 3, 1.0  # of finding out; the pause after the first one
TOLD_AFTER, LONGEST_S = 3, 60.0  # failures in a row; the longest pause

Tell = Callable[[Notified | None], None]
Pause = Callable[[float], Coroutine[Any, Any, None]]


def in_background(cloud: str, address: str, tell: Tell) -> None:
    """`watch` in a thread of its own, in which `tell` is called."""
    if cloud != NONE:
        threading.Thread(target=lambda: asyncio.run(watch(cloud, address, tell)), name="notices", daemon=True).start()


async def watch(cloud: str, address: str, tell: Tell, pause: Pause = asyncio.sleep) -> None:
    """Call `tell` whenever something else is known of this machine's end; None: what was known was taken back.

    `cloud`: "" for the one whose machine this is, if it is one's. `address`: of its metadata service, "" for its own.
    """
    if cloud == NONE:
        return
    async with aiohttp.ClientSession() as session:
        metadata = Metadata(session, address)
        reader = READERS[cloud](metadata) if cloud else await _found(metadata, pause)
        if reader is not None:
            _log.info("notices: asking %s's metadata service", reader.name)
            await _follow(reader, tell, pause)


async def _found(metadata: Metadata, pause: Pause) -> Reader | None:
    for time in range(TRIES):
        if time:
            await pause(FIRST_S * 2.0 ** (time - 1))
        readers = [make(metadata) for make in READERS.values()]
        for reader, here in zip(readers, await asyncio.gather(*map(_is_here, readers)), strict=True):
            if here:
                return reader
    return None


async def _is_here(reader: Reader) -> bool:
    try:
        return await reader.here()
    except Unanswered:
        return False


async def _follow(reader: Reader, tell: Tell, pause: Pause) -> None:
    known: Notified | None = None
    failures = 0
    while True:
        try:
            notified = await reader.read()
        except Unanswered as error:
            failures += 1
            if failures == TOLD_AFTER:
                _log.warning("no notice of %s would be heard now: %s; asking again", reader.name, error)
            await pause(min(FIRST_S * 2.0 ** (failures - 1), LONGEST_S))
            continue
        if failures >= TOLD_AFTER:
            _log.warning("%s's metadata service answers again", reader.name)
        failures = 0
        if notified != known:
            known = notified
            tell(notified)
        await pause(reader.pause_s)
