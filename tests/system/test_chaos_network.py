"""Broken links between hosts, which are network namespaces here: what is mended in time costs nothing, a host that is
cut off costs itself, and the bits and the counts are those of the undisturbed job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import Network, missing
from chaos.partition import KINDS, Break, Partition, breaks
from chaos.trial import digits, judged
from chaos.verdict import Reference
from farandole.protocol.events import LostEvent
from farandole.protocol.failure_detector import FLOOR_S

pytestmark = [pytest.mark.processes]


def test_seeds_hold_every_break() -> None:
    assert breaks(5) == breaks(5)
    assert {what.kind for seed in range(100) for what in breaks(seed)} == set(KINDS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with Network(4) as made:
        yield made
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert made.within(0)[-1] not in left


def on(host: int, kind: str, seconds: float, *, other: int = 0) -> Break:
    return Break(kind=kind, host=host, other=other, seconds=seconds, kbit=1000, after_s=0.3)


def finish(partition: Partition, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    told = judged(0, partition.run, partition.run.finish(), partition.struck, reference)
    assert not told.complaints, capsys.readouterr().out


@pytest.mark.world
def test_a_link_that_comes_back_in_time_costs_nothing_and_a_host_that_is_cut_off_costs_itself(
    hosts: Network, place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mended in time: everyone waits, nobody is lost. Then three hosts are cut off, each in a way of its own: they are
    given up, end when they are reached again, and the one that is left goes on."""
    with Partition(hosts, place / "run", digits(place)) as partition:
        run, watch = partition.run, partition.run.watch
        assert partition.gather()
        partition.strike(on(1, "link down", 0.5))  # TCP repeats what was lost after up to twice this time
        partition.strike(on(0, "link slow", 1.0))
        partition.strike(on(1, "cut between two", 1.0, other=2))
        assert len(partition.struck) == 3
        assert watch.events(LostEvent) == []
        partition.strike(
            on(1, "link down", 7.0), on(2, "cut to the coordinator", 7.0), on(3, "cut from the coordinator", 7.0)
        )
        lost = watch.events(LostEvent)
        assert sorted(event.host for event in lost) == ["h1", "h2", "h3"]
        limits = [re.fullmatch(r"no heartbeat for ([0-9.]+) s", event.reason) for event in lost]
        assert all(limit and FLOOR_S <= float(limit[1]) <= 5 for limit in limits), "less than 5 s where that is usual"
        before = watch.step
        assert run.until(lambda: watch.step > before + 5), "the others go on"
        assert run.until(lambda: all(external.poll() is not None for external in run.external_workers)), (
            "who was given up ends when it is reached again"
        )
        told = judged(0, run, run.finish(), partition.struck, reference)
    assert not told.complaints, capsys.readouterr().out


@pytest.mark.world
def test_two_that_are_cut_off_from_each_other_alone_are_parted_before_they_count_as_stalled(
    hosts: Network, place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator reaches both, so no heartbeat is missing; each says that it waits for the other."""
    limit_s = 120  # two that wait for each other are parted after ten steps, which are slow on a busy machine
    with Partition(hosts, place / "pair", digits(place), ["--stall", str(limit_s)]) as partition:
        run, watch = partition.run, partition.run.watch
        assert partition.gather()
        begun = watch.step  # before the last one joined; without a step, a worker names no peer before the stall limit
        assert run.until(lambda: watch.step > begun + 1)
        hosts.cut(1, 2)
        assert run.until(lambda: watch.seen["lost"] > 0, limit_s)
        hosts.mend(1, 2)
        [lost] = watch.events(LostEvent)
        assert lost.host in ("h1", "h2")
        assert not lost.reason.startswith("stalled"), lost.reason
        assert len(set(re.findall(r"\bguest-\d+\b", lost.reason))) == 2, "both are named"
        told = judged(0, run, run.finish(), partition.struck, reference)
    assert not told.complaints, capsys.readouterr().out
