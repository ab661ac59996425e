"""Broken links between hosts, which are network namespaces here: what is mended in time costs nothing, a host that is
cut off costs itself, and the bits and the counts are those of the undisturbed job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import Network, missing
from chaos.partition import HOSTS, KINDS, Break, Partition, breaks
from chaos.trial import digits, judged, network, undisturbed
from chaos.verdict import Reference

pytestmark = [pytest.mark.processes]


def test_seeds_hold_every_break() -> None:
    assert breaks(5) == breaks(5)
    assert {what.kind for seed in range(100) for what in breaks(seed)} == set(KINDS)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with Network(HOSTS) as made:
        yield made
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert made.within(0)[-1] not in left


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("network")


@pytest.fixture(scope="module")
def reference(hosts: Network, place: Path) -> Reference:  # noqa: ARG001  no reference where there are no hosts
    return undisturbed(place)


def on(host: int, kind: str, seconds: float, *, other: int = 0) -> Break:
    return Break(kind=kind, host=host, other=other, seconds=seconds, kbit=1000, after_s=0.3)


def finish(partition: Partition, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    told = judged(0, partition.run, partition.run.finish(), partition.struck, reference)
    assert not told.complaints, capsys.readouterr().out


def test_a_link_that_comes_back_in_time_costs_nothing(
    hosts: Network, place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pulled, slow, or cut between two workers in one direction or both: everyone waits, nobody is lost."""
    with Partition(hosts, place / "mended", digits(place)) as partition:
        assert partition.gather()
        partition.strike(on(1, "link down", 1.0))
        partition.strike(on(0, "link slow", 1.0))
        partition.strike(on(1, "cut between two", 1.0, other=2))
        assert len(partition.struck) == 3
        assert partition.run.watch.events("lost") == []
        finish(partition, reference, capsys)


@pytest.mark.parametrize("kind", ["link down", "cut to the coordinator", "cut from the coordinator"])
def test_a_host_that_is_cut_off_is_lost_and_the_others_go_on(
    kind: str, hosts: Network, place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is evicted, and ends when it is reached again; another guest joins in its place."""
    with Partition(hosts, place / kind.replace(" ", "-"), digits(place)) as partition:
        assert partition.gather()
        run = partition.run
        before = run.watch.step
        partition.strike(on(1, kind, 7.0))
        [lost] = run.watch.events("lost")
        assert (lost["host"], lost["reason"]) == ("h1", "no heartbeat for 5 s")
        assert run.until(lambda: run.watch.step > before + 5, run.seconds + 10), "the others go on"
        assert run.until(lambda: run.guests[0].poll() is not None, run.seconds + 30), "the evicted one ends"
        finish(partition, reference, capsys)


def test_a_chaos_run_over_links(place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    told = network(4, place, reference)
    assert not told.complaints, capsys.readouterr().out
    assert told.faults
