"""A reconciler through days in which hosts come and go: what is wanted is there whenever there are hosts for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from farandole.pool.base import Host
from farandole.pool.reconciler import QUIET_S
from tests.support.kept import Play

RECORDED = Path(__file__).parents[3] / "shared" / "traces" / "skypilot" / "us-west-2a_v100_1.json"
HOSTS = 16
SOON_S = 2 * QUIET_S  # after a change


def drawn(seed: int) -> list[int]:
    """How many hosts there are, each five minutes of two weeks."""
    rng, now, found = random.Random(seed), HOSTS // 2, list[int]()
    for _ in range(14 * 24 * 12):
        now = min(max(now + rng.choice((-3, -1, 0, 0, 0, 0, 1, 2)), 0), HOSTS)
        found.append(now)
    return found


def replay(counts: Sequence[int], gap_s: float, wanted: int, seed: int) -> Play:
    """Hosts are lost, and come, at random; whatever is wanted and can be had is there soon, and is so to the next."""
    rng, play = random.Random(seed), Play(Host(name="none", slots=1))
    play.pool.hosts.clear()
    play.roster(0.0, wanted=wanted)
    for number, count in enumerate(counts):
        now = number * gap_s
        there = [host.name for host in play.pool.hosts]
        for name in rng.sample(there, max(len(there) - count, 0)):
            play.pool.lose(name)
        absent = [f"h{n}" for n in range(HOSTS) if f"h{n}" not in there]
        play.pool.hosts += [Host(name=name, slots=1) for name in rng.sample(absent, max(count - len(there), 0))]
        play.tick(now + SOON_S)
        for at in (now + SOON_S, now + gap_s - 1.0):
            play.at(at)
            assert len(play.reconciler.started) == min(wanted, count), f"at {at:g} s, with {count} hosts"
    return play


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("wanted", [4, HOSTS])
def test_two_weeks_that_were_drawn(wanted: int, seed: int) -> None:
    replay(drawn(seed), 300.0, wanted, seed)


@pytest.mark.skipif(not RECORDED.exists(), reason=f"needs the recorded trace {RECORDED.name}")
@pytest.mark.parametrize("wanted", [4, *(pytest.param(wanted, marks=pytest.mark.long) for wanted in (8, HOSTS))])
def test_two_weeks_that_were_recorded(wanted: int) -> None:
    """Of 16 spot instances with a V100 each, in us-west-2a; 16 days."""
    trace = json.loads(RECORDED.read_text())
    assert len(trace["data"]) * trace["metadata"]["gap_seconds"] > 14 * 24 * 3600
    play = replay(trace["data"], trace["metadata"]["gap_seconds"], wanted, 0)
    assert len(play.pool.started) > 100, "there were many losses"
