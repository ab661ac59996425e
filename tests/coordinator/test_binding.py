"""The address that a coordinator listens on: what is taken, or would be looked for in vain, is an error at once."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from farandole.coordinator.listener import bind
from farandole.errors import UsageError
from tests.support.stage import stage


@pytest.mark.failure(
    "Command line",
    "the port of `--listen HOST:PORT` is in use",
    seen="one line at once names it",
    outcome="exit code 2; nothing is started",
)
def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as scene:
            host, port = scene.ticket.address.partition("://")[2].split(":")
            with pytest.raises(UsageError, match=f"--listen {host}:{port}: {os.strerror(errno.EADDRINUSE)}"):
                bind(host, int(port))

    asyncio.run(scenario())


def test_a_name_that_means_loopback_here_is_refused() -> None:
    """Debian's /etc/hosts gives a machine's own name to 127.0.1.1: others would look for it in vain."""
    with pytest.raises(UsageError, match=r"--listen 127\.1\b.*\b127\.0\.0\.1\b"):
        bind("127.1", 0)
