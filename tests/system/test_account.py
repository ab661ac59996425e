"""The account of real processes that come, leave, are killed and are too few: all of each one's time, in its classes.

What a worker's time is, is looked at from outside: from when the system began its process until the run says that it is
gone. The two must agree to `WITHIN_S`: a heartbeat, and the tick in which it is seen.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from farandole.protocol.coordinator.account import Account, account
from farandole.protocol.values import CLASSES
from tests.support.forked import ENVIRON
from tests.support.forked import run as call
from tests.support.harness import FARANDOLE, Elastic, alone

pytestmark = [pytest.mark.processes]
SMALL = Path(__file__).parents[1] / "jobs" / "small.py"
WITHIN_S = 2.0


def account_of(folder: Path) -> Account:
    with (folder / "metrics.jsonl").open("rb") as file:
        return account(folder.name, file)


def began(pid: int) -> float:
    """Unix time at which the system began a process."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def told(run: Elastic, *arguments: str) -> str:
    done = call([*FARANDOLE, "account", "--run", str(run.folder), *arguments], env=ENVIRON, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(run: Elastic) -> dict[str, Any]:
    done = call([*FARANDOLE, "status", "--json", "--run", str(run.folder)], env=ENVIRON, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_workers_that_come_leave_die_and_are_too_few(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.05")
    prices = tmp_path / "prices.toml"
    prices.write_text("date = 2026-11-01\n[pools]\nlocal = 3600\n")
    options = ["--min", "2", "--prices", str(prices)]
    births: dict[str, float] = {}
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "1000")
    with Elastic(tmp_path / "run", SMALL, *job, workers=2, options=options) as run:

        def members(count: int, *without: str) -> None:
            run.until_members(count, without=without)
            births.update({e["worker"]: births.get(e["worker"]) or began(e["pid"])
                           for e in run.events("ready") if e["worker"] in run.members})  # fmt: skip

        members(2)
        run.until_step(5)
        killed = run.members[1]
        run.signal(killed, signal.SIGKILL)
        members(2, killed)  # one alone is below the minimum, until another has come
        run.command("scale", "3")
        members(3)
        run.until(lambda: all(each["shards"] for each in status(run)["workers"]), "all have said what they do")
        run.until(lambda: bool(run.events("time spent")), "a line while the run is on")
        live = json.loads(told(run, "--json"))
        assert not live["over"]
        assert live["total_s"] > 0
        leaving_worker = run.members[0]
        run.command("scale", "2")
        run.command("release", leaving_worker)
        run.until(lambda: any(e["worker"] == leaving_worker for e in run.events("left")), "it has left")
        run.until_step(run.step + 10)
        run.command("stop")
        run.finish()

        found = account_of(run.folder)
        ends = {e["worker"]: e["time"] for name in ("lost", "left") for e in run.events(name)}
        over = run.events("over")[0]["time"]
        report = run.report()
    assert found.over
    assert not found.silent
    spent = {each.worker: each for each in found.workers}
    assert set(births) <= set(spent)
    for worker, birth in births.items():
        each = spent[worker]
        assert sum(each.seconds.values()) == pytest.approx(each.total_s)
        assert abs(each.total_s - (ends.get(worker, over) - birth)) < WITHIN_S, f"{each}\n{report}"
        assert {"start", "compute", "exchange"} <= set(each.seconds), report
        assert ("lost" in each.seconds) == (worker == killed), f"{each}\n{report}"
    assert found.seconds is not None
    assert found.total_s is not None
    assert sum(found.seconds.values()) == pytest.approx(found.total_s)
    assert found.seconds["few"] > 0, "one alone waited for another"
    assert found.seconds["pause"] > 0
    assert found.goodput is not None
    assert 0 < found.goodput < 1

    shown = json.loads(told(run, "--json"))
    assert shown["seconds"] == {name: found.seconds[name] for name in CLASSES}
    assert shown["cost"]["date"] == "2026-11-01"
    assert shown["dollars"] == pytest.approx(shown["cost"]["hosts"][0]["hours"] * 3600)
    assert "2026-11-01" in told(run)


def test_a_world_of_one_has_an_account(tmp_path: Path) -> None:
    """Also one that stands for a history."""
    history, job = tmp_path / "history", (str(SMALL), str(tmp_path / "out"), "--epochs", "2")
    history.write_text("0 2\n3 1\n")
    alone(tmp_path / "run", SMALL, *job[1:])
    place = ("--history", str(history), "--folder", str(tmp_path / "rehearsed"))
    done = call([*FARANDOLE, "rehearse", *job, *place], env=ENVIRON, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("run", "rehearsed"):
        found = account_of(tmp_path / name)
        [each] = found.workers
        assert each.ended
        assert {"start", "compute", "data"} <= set(each.seconds)
        assert found.dollars is None
