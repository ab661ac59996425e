"""Workers of one host exchange through memory that they share: where that can't be they exchange over the network, to
the same bits; and nothing of it is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
LIMITED = ("sh", "-c", 'ulimit -f 16000; exec "$@"', "sh")  # blocks of 512 bytes or 1 KB
WIDE = ("--width", "8192")  # gradients of 420 KB: sums are used where they lie
SLOW = "2"  # s a step of one worker: a run lasts until it is told to be quick, on a busy machine too
WORD = "can't share memory"
pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets, memfds")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    alone(folder / "run", JOB, str(folder / "out"), *WIDE)
    return (folder / "out").read_text()


def segments(pid: int) -> int:
    """That a process has mapped, its own and others'; each counts once, however often parts of it are shown."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return len({line[4] for line in lines if line[5:6] == ["/memfd:farandole"]})


def test_workers_come_and_go_and_die_and_nothing_is_left(tmp_path: Path, expected: str) -> None:
    pace = tmp_path / "pace"
    pace.write_text(SLOW)
    with Elastic(
        tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), *WIDE, workers=2, options=[]
    ) as run:
        run.until_members(2)
        run.until_step(1)
        pids = {event["worker"]: event["pid"] for event in run.events("ready")}
        mapped = {worker: segments(pid) for worker, pid in pids.items()}
        assert all(count >= 2 for count in mapped.values()), mapped
        run.signal("w1", signal.SIGKILL)
        run.until_members(2, without=("w1",))
        run.until_step(run.step + 2)
        run.signal("w2", signal.SIGSTOP)
        run.until_members(2, without=("w1", "w2"))
        run.command("scale", "3")
        run.until_members(3)
        run.until_step(run.step + 2)
        latest = {event["worker"]: event["pid"] for event in run.events("ready")}
        assert max(segments(latest[worker]) for worker in run.members) <= 6, "those who have gone keep theirs"
        pace.unlink()
        run.finish()
        assert not any(WORD in log.read_text() for log in (tmp_path / "run" / "logs").glob("w*.log"))
    assert (tmp_path / "out").read_text() == expected
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in {**pids, **latest}.values()))


@pytest.mark.long
def test_a_joiner_and_then_a_sender_die_while_a_large_state_is_handed_over(tmp_path: Path) -> None:
    large = ("--frozen", "300")
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), *large)
    pace = tmp_path / "pace"
    pace.write_text(SLOW)
    with Elastic(
        tmp_path / "run", JOB, str(tmp_path / "out"), "--pace", str(pace), *large, workers=2, options=[]
    ) as run:
        run.until_members(2)
        run.until_step(0)
        run.command("scale", "3")
        run.until_members(3)
        run.signal("w3", signal.SIGKILL)
        run.until_members(3, without=("w3",))
        run.signal("w2", signal.SIGKILL)
        run.until_members(3, without=("w2", "w3"))
        run.until_step(run.step + 1)
        pace.unlink()
        run.finish()
        assert {event["worker"] for event in run.events("lost")} == {"w2", "w3"}
    assert (tmp_path / "out").read_text() == (tmp_path / "expected").read_text()


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "workers of one host can't share memory (a limit of file sizes, containers, two users)",
    seen="`workers of this host can't share memory`, once in a worker's log, with the reason",
    outcome="they exchange over the network, with the same bits",
)
def test_where_files_may_not_be_large_it_says_so_and_goes_over_the_network(tmp_path: Path, expected: str) -> None:
    pace = tmp_path / "pace"
    pace.write_text(SLOW)
    arguments = [str(tmp_path / "out"), "--pace", str(pace), *WIDE]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=[], on=LIMITED) as run:
        run.until_members(2)
        pace.unlink()
        run.finish()
    assert all(log.read_text().count(WORD) == 1 for log in (tmp_path / "run" / "logs").glob("w*.log"))
    assert (tmp_path / "out").read_text() == expected


@pytest.mark.long
def test_who_shares_none_joins_those_who_do(tmp_path: Path, expected: str) -> None:
    pace = tmp_path / "pace"
    pace.write_text(SLOW)
    arguments = [str(tmp_path / "out"), "--pace", str(pace), *WIDE]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=[]) as run:
        run.until_members(2)
        command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(JOB), *arguments]
        with subprocess.Popen(command, env={**ENVIRON, "FARANDOLE_SHARED_MEMORY": "0"}) as external_worker:
            run.until_members(3)
            run.until_step(run.step + 2)
            run.signal("w2", signal.SIGKILL)
            run.until_members(3, without=("w2",))
            run.until_step(run.step + 2)
            pace.unlink()
            run.finish()
            assert external_worker.wait(200) == 0
    assert (tmp_path / "out").read_text() == expected
