"""The chaos harness: its schedules are repeatable, its verdict can fail, and short runs through it come out whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from chaos.attack import Attack
from chaos.launched import Launched
from chaos.schedule import KINDS, LONG, OFF, Blow, Schedule, schedule
from chaos.trial import digits, processes
from chaos.verdict import Reference, complaints
from chaos.watch import Watch
from farandole.data.ledger import Ledger, count
from farandole.errors import LedgerError
from farandole.protocol.events import (
    ComputesWrongEvent,
    FinishedEvent,
    LostEvent,
    StartingEvent,
    TimeSpentEvent,
    WorkerTime,
)
from farandole.protocol.metrics import LOG, Line, as_written
from tests.support.fake_worker import gone, until
from tests.support.metric_lines import KINDS as KINDS_OF_EVENTS
from tests.support.metric_lines import an, made, step_line

# --- schedules -------------------------------------------------------------------------------------------------


def test_a_seed_is_a_schedule() -> None:
    assert schedule(5) == schedule(5)
    assert len({schedule(seed).blows for seed in range(100)}) == 100


def test_schedules_hold_every_fault_but_those_that_are_off() -> None:
    blows = [blow for seed in range(500) for blow in schedule(seed).blows]
    assert {blow.kind for blow in blows} == set(KINDS) - OFF
    assert {blow.event for blow in blows} >= {"", "lost", "proposed", "view", "ready", "notice", "log"}
    assert max(sum(blow.kind in LONG for blow in schedule(seed).blows) for seed in range(500)) == 1


# --- the watch ---------------------------------------------------------------------------------------------------


def test_a_joiner_counts_as_holder_when_its_first_step_has_ended(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.look()

    def append(text: str) -> set[str]:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(text)
        watch.look()
        return watch.holders

    def write(**line: object) -> set[str]:
        return append(as_written(made(line)).decode())

    assert write(event="view", members=["a", "b"], step=0) == {"a"}  # everyone takes rank 0's state
    assert write(step=0) == {"a", "b"}
    assert write(event="view", members=["a", "b", "c"], step=2) == {"a", "b"}
    assert write(step=1) == {"a", "b"}
    assert write(event="lost", worker="a") == {"b"}
    assert write(event="view", members=["b"], step=2) == {"b"}  # c, without state, has to ask in again
    assert write(step=2) == {"b"}
    assert write(event="view", members=["b", "c"], step=3) == {"b"}
    assert append(as_written(step_line(3)).decode()[:9]) == {"b"}, "half a line is none"
    assert append(as_written(step_line(3)).decode()[9:]) == {"b", "c"}
    assert write(event="state lost") == set()
    assert write(event="view", members=["d", "e"], step=0) == {"d"}
    assert write(event="resumed", worker="d", step=2) == {"d"}
    assert write(step=2) == {"d", "e"}


def test_a_line_that_a_killed_coordinator_left_torn_is_passed_over(tmp_path: Path) -> None:
    watch, path = Watch(tmp_path), tmp_path / "metrics.jsonl"
    lines = [as_written(step_line(number)) for number in range(4)]
    path.write_bytes(lines[0] + lines[1][:20])
    watch.look()
    path.write_bytes(lines[0] + lines[1] + lines[2][:9])
    watch.look()
    path.write_bytes(lines[0] + lines[1] + lines[3])
    watch.look()
    assert watch.lines == [step_line(0), step_line(1), step_line(3)]


def test_what_blows_wait_for_is_counted_by_its_name(tmp_path: Path) -> None:
    names = {blow.event for seed in range(500) for blow in schedule(seed).blows} - {""}
    assert names <= {LOG, *KINDS_OF_EVENTS}
    watch = Watch(tmp_path)
    lines = [made({"event": name, **({"step": 3} if name == LOG else {})}) for name in names]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(as_written, lines)))
    watch.look()
    assert watch.seen == dict.fromkeys(names, 1)


def test_who_is_dead_already_is_not_chosen(tmp_path: Path) -> None:
    """A joiner that is killed while its view comes into force is still a member when the next blow is due."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", str(tmp_path)]
    everyone = {worker: subprocess.Popen(command) for worker in "abc"}
    lines: list[dict[str, object]] = [{"event": "ready", "worker": w, "pid": p.pid} for w, p in everyone.items()]
    lines += [{"event": "view", "members": ["a", "b"], "step": 0}, {"step": 0}]
    lines += [{"event": "view", "members": ["a", "b", "c"], "step": 1}]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(as_written(made(line)) for line in lines))
    watch = Watch(tmp_path)
    watch.look()
    run = cast(Launched, SimpleNamespace(watch=watch, seconds=1.0))
    attack = Attack(Schedule(seed=0, workers=2, minimum=1, blows=()), run)
    joiner = Blow(kind="kill", event="", delay_s=0, role="joiner", choice=0.0, seconds=0, workers=0)
    try:
        until(lambda: watch.alive(everyone["c"].pid))
        assert attack._target(joiner) == ("c", everyone["c"].pid)
        everyone["c"].kill()
        until(lambda: gone(everyone["c"].pid))  # a zombie: nobody has waited for it yet
        assert attack._target(joiner) == ("a", everyone["a"].pid)
    finally:
        for process in everyone.values():
            process.kill()
            process.wait()


# --- the verdict -------------------------------------------------------------------------------------------------

SAMPLES = Counter({(epoch, sample): 1 for epoch in range(2) for sample in range(4)})
REFERENCE = Reference("abc", SAMPLES)
GOOD_END = [an(FinishedEvent, fingerprint="abc")]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Two epochs of four samples, one step of two shards each, of two workers."""
    a, b = Ledger(tmp_path / "a.jsonl"), Ledger(tmp_path / "b.jsonl")
    for epoch in range(2):
        a.computed(epoch=epoch, step=epoch, shard=0, samples=[0, 1])
        b.computed(epoch=epoch, step=epoch, shard=1, samples=[2, 3])
        for worker in (a, b):
            worker.committed(epoch=epoch, step=epoch, shards={0: "a", 1: "b"})
    return tmp_path


def retell(ledger: Path, worker: str, change: Callable[[str], str]) -> None:
    path = ledger / f"{worker}.jsonl"
    path.write_text(change(path.read_text()))


def test_a_good_run_has_no_complaints(ledger: Path) -> None:
    assert complaints(0, GOOD_END, ledger, {}, REFERENCE) == []


def test_a_sample_too_many_and_one_too_few_are_told(ledger: Path) -> None:
    retell(ledger, "b", lambda text: text.replace("[2,3]", "[2,1]"))
    found = complaints(0, GOOD_END, ledger, {}, REFERENCE)
    missing, surplus = found
    assert all(value in missing for value in ("2 samples", "sample 3 of epoch 0", "sample 3 of epoch 1"))
    assert all(value in surplus for value in ("2 samples", "sample 1 of epoch 0", "sample 1 of epoch 1"))


def test_ledgers_that_contradict_each_other_are_told(ledger: Path) -> None:
    retell(ledger, "b", lambda text: text.replace('"1":"b"', '"1":"a"'))
    [found] = complaints(0, GOOD_END, ledger, {}, REFERENCE)
    with pytest.raises(LedgerError) as caught:
        count(ledger)
    assert str(caught.value) in found


def timed(seconds: float) -> list[Line]:
    """A worker is there for 20 s, and `seconds` are accounted for."""
    told = WorkerTime(host="h", pool="", step=1, seconds={"compute": seconds})
    spent = an(TimeSpentEvent, workers={"a": told}, ended=("a",), time=120.0)
    return [an(StartingEvent, worker="a", time=100.0), an(LostEvent, worker="a", time=120.0), spent]


def test_a_time_that_is_whole_is_no_complaint(ledger: Path) -> None:
    assert complaints(0, [*timed(22.5), *GOOD_END], ledger, {}, REFERENCE) == []


@pytest.mark.parametrize(
    ("code", "lines", "left", "values"),
    [
        (1, GOOD_END, {}, ["1"]),
        (None, GOOD_END, {}, []),
        (0, [], {}, ["0"]),
        (0, [an(FinishedEvent, fingerprint="abd")], {}, ["abd", "abc"]),
        (0, [an(FinishedEvent, fingerprint="abc", equal=False)], {}, ["abc"]),
        (0, GOOD_END, {7: ["python", "job.py"]}, ["7", "python job.py"]),
        (0, [*timed(13.0), *GOOD_END], {}, ["a", "-7.0 s", "{'compute': 13.0}"]),
        (0, [*timed(99.0), *GOOD_END], {}, ["a", "79.0 s", "{'compute': 99.0}"]),
        (0, [*timed(2e6), *GOOD_END], {}, ["1"]),
        (0, [*GOOD_END, an(ComputesWrongEvent, worker="w1", host="h", reason="so")], {}, ["w1", "h", "so"]),
    ],
)
def test_every_broken_promise_is_told(
    ledger: Path, code: int | None, lines: list[Line], left: dict[int, list[str]], values: list[str]
) -> None:
    [complaint] = complaints(code, lines, ledger, left, REFERENCE)
    assert all(value in complaint for value in values)


# --- real runs -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.long  # make chaos has many
def test_a_chaos_run(place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """Seed 6873 kills the coordinator, then edits the script and kills a worker, whose replacement must not read it."""
    told = processes(6873, place, reference)
    assert not told.complaints, capsys.readouterr().out
    assert told.faults == {"kill coordinator": 1, "edit": 1, "kill": 1}


@pytest.mark.long
@pytest.mark.processes
def test_tampering_with_a_real_run_is_told(place: Path, reference: Reference) -> None:
    """Another seed's weights, a sample twice, a sample lost: of what a real run has left."""
    with Launched(place / "tampered", digits(place), ["--workers", "1", "--seed", "1"]) as run:
        code = run.finish()
        left, lines, ledger = run.watch.processes(), run.watch.lines, run.folder / "ledger"
        [fingerprint] = complaints(code, lines, ledger, left, reference)[:1]
        assert run.watch.events(FinishedEvent)[0].fingerprint != reference.fingerprint
        assert all(
            value in fingerprint for value in (run.watch.events(FinishedEvent)[0].fingerprint, reference.fingerprint)
        )
        own = replace(reference, fingerprint=run.watch.events(FinishedEvent)[0].fingerprint)
        assert complaints(code, lines, ledger, left, own) == []
        retell(ledger, "w1", lambda text: re.sub(r'"samples":\[(\d+),(\d+),', r'"samples":[\1,\1,', text, count=1))
        missing, surplus = complaints(code, lines, ledger, left, own)
        assert re.search(r"\b1 samples\b.*\bsample \d+ of epoch \d+", missing)
        assert re.search(r"\b1 samples\b.*\bsample \d+ of epoch \d+", surplus)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.usefixtures("reference")
def test_a_run_that_hangs_tells_where(place: Path) -> None:
    """Its processes write their stacks, and nothing of it stays."""
    endless = ["--epochs", "10000"]
    with Launched(place / "hung", digits(place), ["--workers", "1"], arguments=endless) as run:
        assert run.until(lambda: run.watch.step >= 1, 60.0)
        assert run.finish(0.0) is None
        log = (run.folder / "logs" / "w1.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "job.py" in log
    until(lambda: run.watch.processes() == {})
    assert not os.path.exists(f"/proc/{run.process.pid}")
