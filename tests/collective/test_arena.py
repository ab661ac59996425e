"""Memory that other processes can map: what is taken and given back, what can't be had, and what is not believed."""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import sys
from collections.abc import Iterator

import pytest
import torch

from farandole.collective import arena as arenas
from farandole.collective.arena import PAGE, SEGMENT_BYTES, Arena, Mapped, Segment, Unusable, mapped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create(2)")


@pytest.fixture
def no_large_files() -> Iterator[None]:
    """No file of this process may be larger than a page."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_nobody_holds_is_used_again_and_nothing_that_somebody_holds() -> None:
    arena, order = Arena(), random.Random(0)
    held: list[tuple[torch.Tensor, int]] = []
    for number in range(400):
        size = order.choice([1, PAGE, 3 * PAGE + 1, 5 << 20])
        tensor = arena.empty(size, torch.uint8)
        tensor[::PAGE] = tensor[-1] = number % 251  # blocks are whole pages: where two have one, both write here
        held.append((tensor, number % 251))
        if len(held) > 12:
            held.pop(order.randrange(len(held)))
        assert all(bool((tensor[::PAGE] == value).all()) and tensor[-1] == value for tensor, value in held)
        assert all(tensor.data_ptr() % 64 == 0 for tensor, _ in held)
    assert len(arena.segments) <= 3  # of 64 MB, for less than 60 MB at a time


def test_a_view_of_it_keeps_it() -> None:
    arena = Arena()
    part = arena.empty(1 << 20, torch.float32).fill_(3)[5:9]
    gc.collect()
    arena.empty(1 << 20, torch.float32).fill_(4)
    assert part.tolist() == [3.0] * 4
    found = arena.find(part)
    assert found is not None
    assert found[1] % 4 == 0


def test_memory_of_others_is_not_found_and_nothing_takes_nothing() -> None:
    arena = Arena()
    assert arena.find(torch.zeros(1 << 20)) is None
    assert arena.empty(0, torch.float32).shape == (0,)


def test_of_the_segments_that_nobody_uses_one_is_kept() -> None:
    arena = Arena()
    large = [arena.empty(SEGMENT_BYTES, torch.uint8) for _ in range(3)]
    assert len(arena.segments) == 3
    files = len(os.listdir("/proc/self/fd"))
    large.clear()
    gc.collect()
    arena.empty(1, torch.uint8)
    assert len(arena.segments) == 1
    assert len(os.listdir("/proc/self/fd")) < files


@pytest.mark.usefixtures("no_large_files")
def test_where_files_may_not_be_that_large_memory_is_ordinary_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = Arena()
    assert not arena.works
    tensor = arena.empty(1 << 20, torch.float32)
    assert tensor.shape == (1 << 20,)
    assert arena.find(tensor) is None
    [message] = caplog.messages
    assert f"[Errno {errno.EFBIG}]" in message


def test_who_maps_it_reads_what_its_owner_writes_and_writes_for_itself_alone() -> None:
    segment = Segment(0, PAGE)
    place = segment.take(PAGE)
    assert place == (0, PAGE)
    own = torch.frombuffer(segment.map, dtype=torch.float32)
    theirs = mapped(os.dup(segment.file)).tensor(64, 8, torch.float32)
    own[16] = 3
    assert theirs.tolist() == [3, 0]
    theirs[1] = 4
    assert own[17] == 0


def test_the_same_segment_is_mapped_once() -> None:
    segment = Segment(0, PAGE)
    files = len(os.listdir("/proc/self/fd"))
    both = mapped(os.dup(segment.file)), mapped(os.dup(segment.file))
    assert both[0] is both[1]
    assert len(os.listdir("/proc/self/fd")) == files + 2  # open, and the map's own


def test_what_its_owner_could_take_away_is_not_mapped() -> None:
    file = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, PAGE)
    with pytest.raises(Unusable):
        Mapped(file)
    with pytest.raises(Unusable):
        Mapped(os.open("/dev/null", os.O_RDONLY))


@pytest.mark.parametrize(("offset", "size"), [(-8, 8), (0, 2 * PAGE), (PAGE, 8), (4, 8), (0, 4)])
def test_what_is_not_within_it_is_not_read(offset: int, size: int) -> None:
    segment = Segment(0, PAGE)
    with pytest.raises(Unusable) as caught:
        mapped(os.dup(segment.file)).tensor(offset, size, torch.float64)
    assert all(str(value) in str(caught.value) for value in (size, torch.float64, offset, PAGE))


def test_a_system_without_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(arenas.os, "memfd_create")
    assert not Arena().works
