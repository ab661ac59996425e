"""A host held back by a quota, for real: it gets fewer shards than its peer, is named, and no bit changes."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.ledger import count
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone
from tests.support.quota import WHY_NOT, Quota, place, to_be_had

pytestmark = [
    pytest.mark.world,
    pytest.mark.processes,
    pytest.mark.skipif(place() is None, reason=WHY_NOT),
    pytest.mark.timeout(400),
]

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
STEPS, SHARDS, MICRO = 200, 15, 2
SAMPLES, BATCH = STEPS * SHARDS * MICRO, SHARDS * MICRO
SIZES = ("--epochs", "1", "--samples", str(SAMPLES), "--batch", str(BATCH), "--micro", str(MICRO))
LOAD = 40  # matrices: some 20 ms a micro-batch on an idle core
FEWER = range(1, 7)  # of 15 shards: 5 is half of the peer's 10; on a busy machine the quota is less than half


def computed(run: Elastic, step: int) -> Counter[str]:
    """How many of a step's shards each worker has computed, by what each wrote down itself."""
    shards: Counter[str] = Counter()
    for path in (run.folder / "ledger").glob("*.jsonl"):
        *lines, _torn = path.read_text().split("\n")
        records = [json.loads(line) for line in lines]
        shards[path.stem] = sum(1 for r in records if "shard" in r and r["step"] == step)
    return shards


def test_who_is_held_back_by_a_quota_gets_fewer_shards_and_the_bits_are_the_same(tmp_path: Path) -> None:
    alone(tmp_path / "one", JOB, str(tmp_path / "alone.txt"), *SIZES)
    load, out = tmp_path / "load", tmp_path / "out.txt"
    load.write_text(str(LOAD))
    arguments, options = [str(out), "--load", str(load), *SIZES], ["--ledger", "--min", "2"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=options, deadline_s=360) as run:
        run.until_members(2)
        run.until_step(1)
        fast, slow = run.members
        pid = next(event["pid"] for event in run.events("ready") if event["worker"] == slow)
        assert sorted(computed(run, 1).values()) == [SHARDS // 2, SHARDS - SHARDS // 2]
        with Quota(pid, to_be_had() / 2):  # half of what its peer gets, however busy the machine is
            run.until(lambda: bool(run.events("shares")) and computed(run, run.step)[slow] in FEWER, "fewer shards")
            assert run.step < STEPS - 1
            dealt = computed(run, run.step)
            assert dealt[fast] == SHARDS - dealt[slow]
            said = subprocess.run(
                [*FARANDOLE, "status", "--run", str(run.folder)],
                env=ENVIRON, capture_output=True, text=True, timeout=200, check=True,
            ).stdout  # fmt: skip
            assert f"{slow} on " in said.split("straggler", 1)[1].split("\n", 1)[0], said
        load.unlink()
        run.finish()
        assert f"{slow} at 0." in run.events("shares")[0]["reason"]
        assert {event["view"] for event in run.events("shares")} <= {event["view"] for event in run.events("view")}
        assert count(run.folder / "ledger") == Counter((0, sample) for sample in range(SAMPLES))
    assert out.read_text() == (tmp_path / "alone.txt").read_text()
