"""A child that was forked, as who forked it sees it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farandole.platform import cpu
from farandole.platform.process import SUPPORTED, Forked, end_spare, has_spare, keep_spare, take_spare

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="forking is for Linux")


@pytest.fixture
def child() -> Iterator[tuple[Forked, Callable[[], None]]]:
    """One that ends with code 3 when it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        yield Forked(process.pid), pipe.close
    process.returncode = 3  # `Forked` has reaped it


def test_seconds_are_seconds(child: tuple[Forked, Callable[[], None]]) -> None:
    forked, end = child
    asked: list[float] = []

    class Poll:
        def register(self, *_: int) -> None: ...

        def poll(self, milliseconds: float) -> list[int]:
            asked.append(milliseconds)
            return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("select.poll", Poll)
        with pytest.raises(subprocess.TimeoutExpired):
            forked.wait(30.0)
    end()
    assert asked == [30_000.0]
    assert forked.wait(30.0) == 3


def test_who_waits_for_one_that_goes_on_is_told_so_and_may_wait_again(
    child: tuple[Forked, Callable[[], None]],
) -> None:
    forked, end = child
    assert forked.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.01)
    end()
    assert forked.wait(30.0) == 3
    assert forked.poll() == forked.wait() == 3


class Server:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"OMP_NUM_THREADS": "2", "HOME": "/"}, True),
        ({"OMP_NUM_THREADS": "2", **cpu.environment_of("same")}, True),
        ({"OMP_NUM_THREADS": "2", **cpu.environment_of("portable")}, False),
        ({}, False),
    ],
)
def test_a_spare_server_serves_once_who_would_load_the_same(wanted: dict[str, str], fits: bool) -> None:
    server: Any = Server()
    keep_spare(server, {"OMP_NUM_THREADS": "2"})
    assert has_spare()
    assert take_spare(wanted) is (server if fits else None)
    assert server.closed is not fits
    assert take_spare(wanted) is None
    assert not has_spare()


def test_a_spare_server_that_nobody_takes_is_ended() -> None:
    server: Any = Server()
    keep_spare(server, {})
    end_spare()
    assert server.closed
    assert not has_spare()
    end_spare()
