"""Machines that hear of their own end: their workers leave before it, and the run's bits and samples stay.

The machines are told by metadata services that follow the clouds' documentation (`support/metadata_services.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.data.ledger import count
from tests.jobs.evaluating import SAMPLES, STEPS
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone, gone, read_lines
from tests.support.lines import naming
from tests.support.metadata_services import Ec2Service, GoogleService, Service, interruption
from tests.support.network import AVAILABLE, WHY_NOT, Machines, ip
from tests.support.small_job import EVERY_SAMPLE_ONCE, Job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
    pytest.mark.timeout(300),
]

EVALUATING = Path(__file__).parents[1] / "jobs" / "evaluating.py"
EC2_S = 120.0
SHORT_S = 12.0


def say(service: Service, within_s: float = EC2_S) -> None:
    if isinstance(service, GoogleService):
        service.set(preempted="TRUE")
    else:
        service.set(action=interruption(within_s))


@contextmanager
def external_worker(run: Elastic, service: Service, script: Path, *arguments: str) -> Generator[Any, None, None]:
    """A machine that has joined by itself, and asks `service`; killed at the end if it is there still."""
    ticket = shutil.copy(run.folder / "ticket", run.folder.with_name("ticket"))
    command = [*FARANDOLE, "join", str(ticket), str(script), *arguments]
    environ = {**ENVIRON, "FARANDOLE_METADATA": service.address}
    with run.folder.with_name("guest.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def step_at(run: Elastic, time: float) -> int:
    """The one in hand then."""
    return 1 + max(line["step"] for line in run.lines() if "event" not in line and line["time"] < time)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(folder)
    job.quick()
    alone(folder / "one", job.script, *job.arguments)
    return job.out.read_text()


@pytest.mark.long
@pytest.mark.parametrize("service_of", [Ec2Service, pytest.param(GoogleService, marks=pytest.mark.long)])
def test_an_external_worker_that_hears_of_its_end_leaves_within_two_steps(
    service_of: type[Service], tmp_path: Path, undisturbed: str
) -> None:
    job = Job(tmp_path)
    with service_of() as service, job.run(1, "--ledger") as run:
        run.until_step(1)
        job.pace.write_text(
            "600"
        )  # a step lasts until the external worker is there, which may have to read all of torch from a disk
        with external_worker(run, service, job.script, *job.arguments) as process:
            run.until(lambda: len(run.events("ready")) == 2, "a guest that asks in")
            job.pace.write_text("1")
            run.until_members(2)
            run.until_step(run.step + 2)
            say(service)
            assert process.wait(90) == 0
            run.until_members(1)
            [notice] = run.events("notice")
            assert ("EC2" in notice["reason"]) != ("Google" in notice["reason"])
            [began] = [view["step"] for view in run.events("view") if view["cause"].startswith("guest-1 leaves")]
            assert began <= step_at(run, notice["time"]) + 2
            [joined] = [view["step"] for view in run.events("view") if view["cause"].startswith("guest-1 joins")]
        job.quick()
        run.finish()
        assert run.events("lost") == []
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE
    assert job.out.read_text() == undisturbed
    shown = (tmp_path / "guest.log").read_text()
    assert naming(shown, "farandole: ", notice["reason"])
    assert naming(shown, "farandole: ", "guest-1", f"step {joined}")


@contextmanager
def two_pools(
    folder: Path, service: Service, script: Path, *arguments: str, options: Sequence[str], workers: int = 1
) -> Generator[Elastic, None, None]:
    """A run that has a host, whose agent asks `service`, and where that is not to be had this machine."""
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=1\n")
    on = ["env", f"FARANDOLE_METADATA={service.address}"]
    options = ["--pool", f"ssh,hosts={hosts}", *options]
    with Elastic(folder / "run", script, *arguments, workers=workers, options=options, on=on, deadline_s=200.0) as run:
        yield run


def on_the_host(run: Elastic) -> tuple[str, int]:
    """The worker there, and its process."""
    run.until(lambda: "localhost" in [event["host"] for event in run.events("ready")], "the host's worker")
    return next((event["worker"], event["pid"]) for event in run.events("ready") if event["host"] == "localhost")


@pytest.mark.long
def test_the_agent_of_a_host_tells_its_pool_and_a_replacement_comes_first(tmp_path: Path, undisturbed: str) -> None:
    """Advice: the host trains on. Notice: its worker leaves, and is replaced by another pool's before."""
    job = Job(tmp_path)
    job.pace.write_text("1")
    options = ["--ledger", "--pool", "local,size=1"]
    with Ec2Service() as service, two_pools(tmp_path, service, job.script, *job.arguments, options=options) as run:
        first, _ = on_the_host(run)
        run.until_step(1)
        service.set(rebalance='{"noticeTime": "2026-01-01T00:00:00Z"}')
        run.until(lambda: bool(run.events("advice")), "advice")
        run.until_step(run.step + 3)
        assert run.members == (first,), "it trains on"
        assert run.events("notice") == []
        say(service)
        run.until(lambda: first in [event["worker"] for event in run.events("left")], "it has left")
        assert first not in run.members
        [notice] = run.events("notice")
        assert re.search(r"\blocalhost\b.*\b1\d*(\.\d+)? s\b", notice["reason"])
        joined, left = run.events("view")[1:]
        assert joined["cause"].endswith(" joins"), "it held the state alone: first somebody else has it"
        assert left["cause"].startswith(f"{first} leaves")
        job.quick()
        run.finish()
        assert run.events("lost") == []
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE
    assert job.out.read_text() == undisturbed


def test_the_last_that_holds_the_state_saves_before_its_machine_goes_and_no_step_is_lost(
    tmp_path: Path, undisturbed: str
) -> None:
    """Nobody else is there; whoever comes goes on from what it has saved."""
    job = Job(tmp_path)
    job.pace.write_text("1")
    options = ["--checkpoint-every", "never", "--ledger"]
    with (
        Ec2Service() as going,
        Ec2Service() as staying,
        two_pools(tmp_path, going, job.script, *job.arguments, options=options) as run,
    ):
        _, process = on_the_host(run)
        run.until_step(2)
        say(going, SHORT_S)
        began = time.time()
        assert gone(lambda: is_there(process), SHORT_S)
        assert time.time() < began + SHORT_S, "before the deadline"
        run.until(lambda: bool(run.events("state lost")), "the coordinator waits for nobody")
        last = run.step
        job.quick()
        with external_worker(run, staying, job.script, *job.arguments):
            run.finish()
        [resumed] = run.events("resumed")
        assert resumed["step"] == last + 1, "each step that had ended was saved"
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE
    assert job.out.read_text() == undisturbed


@pytest.mark.long
def test_an_evaluation_that_would_outlast_the_deadline_is_left_as_by_a_crash(tmp_path: Path) -> None:
    out, single = tmp_path / "out", tmp_path / "single"
    out.mkdir()
    single.mkdir()
    (out / "hold-0").touch()
    options = ["--min", "2", "--pool", "local,size=1"]
    with (
        Ec2Service() as service,
        Ec2Service() as staying,
        two_pools(tmp_path, service, EVALUATING, str(out), options=options, workers=2) as run,
    ):
        leaving_worker, process = on_the_host(run)
        run.until(lambda: (out / f"held-0-{process}").exists(), "it is in the middle of the evaluation")
        say(service, SHORT_S)
        began = time.time()
        run.until(lambda: bool(run.events("notice")), "the notice")
        assert is_there(process), "a leaver stays through an evaluation"
        assert gone(lambda: is_there(process), SHORT_S)
        assert time.time() < began + SHORT_S, "before the deadline"
        run.until(lambda: bool(run.events("lost")), "it is gone")
        assert [event["worker"] for event in run.events("lost")] == [leaving_worker]
        assert run.events("left") == []
        (out / "hold-0").unlink()
        with external_worker(run, staying, EVALUATING, str(out)):  # two are the least
            run.finish()
        told = evaluations(run.folder)
    alone(tmp_path / "alone", EVALUATING, str(single))
    assert told == evaluations(tmp_path / "alone")
    assert [{line[str(sample)] for sample in range(SAMPLES)} for line in told] == [{1 / SAMPLES}] * STEPS


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder) if line.get("event") == "log"]


ASKS = """
import threading
from farandole.pool import preemption

there = threading.Event()

def tell(notified):
    print(notified.reason, flush=True)
    there.set()

preemption.in_background("", "", tell)
assert there.wait(200)
"""

SERVES = """
import sys
from tests.support.metadata_services import Ec2Service

with Ec2Service("169.254.169.254", 80) as service:
    service.set(action=sys.argv[1])
    print("serves", flush=True)
    sys.stdin.read()
"""


@pytest.mark.world
@pytest.mark.skipif(not AVAILABLE, reason=WHY_NOT)
def test_an_instance_is_known_by_its_own_address() -> None:
    """169.254.169.254, in a machine of its own; nothing is told of where that is."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environ.pop("FARANDOLE_METADATA", None)
    with Machines() as machines:
        ip("-n", machines.names[0], "addr", "add", "169.254.169.254/32", "dev", "lo")
        serves = [*machines.on(0), sys.executable, "-c", SERVES, interruption(EC2_S)]
        asks = [*machines.on(0), sys.executable, "-c", ASKS]
        with subprocess.Popen(serves, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as serving:
            assert serving.stdout is not None
            assert serving.stdout.readline() == b"serves\n"
            asked = subprocess.run(asks, env=environ, capture_output=True, text=True, timeout=90, check=False)
            serving.communicate()
    assert naming(asked.stdout, "EC2", "terminate"), asked.stderr
    assert asked.returncode == 0
