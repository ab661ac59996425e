"""A run whose hosts are jobs of a real Slurm: slurmctld and three slurmd on this machine (`tests/support/slurm.py`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.control.ticket import load
from tests.support.cluster_run import JOB, Rig, states
from tests.support.forked import ENVIRON
from tests.support.harness import FARANDOLE
from tests.support.slurm import CONTROLLER, MUNGE, NODES, Slurm, slurm, until

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, NODES)


def test_an_urgent_job_gets_a_node_within_the_grace_and_training_takes_it_again(
    cluster: Slurm, rig: Rig, expected: bytes
) -> None:
    with rig.run(f"slurm,size={NODES},partition=low,time=60") as run:
        run.until_members(NODES)
        mine = set(cluster.jobs())
        urgent = cluster.submit("sleep 5", "--partition=high", "--nodes=1")
        run.until(lambda: cluster.state(urgent) == "RUNNING", "the urgent job")
        [taken] = [job for job in mine if cluster.node(job) == cluster.node(urgent)]
        run.until(lambda: cluster.state(taken) == "COMPLETED", "it was not killed, and not requeued")
        run.until_members(NODES - 1)
        run.until(lambda: cluster.state(urgent) == "COMPLETED", "its end")
        run.until_members(NODES)
        assert len(set(cluster.jobs()) - mine) == 1, "one other job instead"
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert cluster.jobs() == {}


def test_the_ticket_is_in_no_job_and_a_stopped_run_leaves_none(cluster: Slurm, rig: Rig) -> None:
    """With one job that runs, and others that are queued."""
    other = cluster.submit("sleep 1000", "--partition=high", f"--nodes={NODES - 1}")
    until(lambda: cluster.state(other) == "RUNNING", "somebody else's job")
    with rig.run(f"slurm,size={NODES},partition=low") as run:
        run.until_members(1)
        run.until(lambda: bool(states(run, "queued")), "others that wait")
        secret = load(str(run.folder / "ticket")).secret
        jobs = set(cluster.jobs()) - {other}
        assert len(jobs) == NODES
        shown = [cluster.run("squeue", "--format=%all"), cluster.run("scontrol", "--details", "show", "job")]
        shown += [cluster.run("scontrol", "write", "batch_script", job, "-") for job in jobs]
        shown += [path.read_bytes().decode(errors="replace") for path in _processes("cmdline")]
        shown += [path.read_bytes().decode(errors="replace") for path in _processes("environ")]
        assert any("farandole run" in text for text in shown)
        assert not [text for text in shown if secret in text]
        run.command("stop")
        run.finish()
    assert set(cluster.jobs()) == {other}, "and nothing else was touched"
    cluster.run("scancel", other)
    until(lambda: cluster.jobs() == {}, "its end")


def _processes(file: str) -> Iterator[Path]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            (path / file).read_bytes()
        except OSError:
            continue
        yield path / file


def test_a_job_that_is_cancelled_from_outside_is_replaced(cluster: Slurm, rig: Rig) -> None:
    with rig.run("slurm,size=2,partition=low", workers=2, epochs=("--epochs", "4000")) as run:
        run.until_members(2)
        cancelled = next(iter(cluster.jobs()))
        cluster.run("scancel", cancelled)
        run.until_members(1)
        run.until_members(2)
        assert cancelled not in cluster.jobs()
        run.command("scale", "1")
        run.until(lambda: len(cluster.jobs()) == 1, "the other one's end")
        run.until_members(1)
        run.command("stop")
        run.finish()
        assert not run.events("lost"), run.report()
    assert cluster.jobs() == {}


@pytest.mark.parametrize(("daemon", "words"), [(CONTROLLER, "slurmctld"), (MUNGE, "munge")])
def test_a_daemon_that_is_killed_costs_no_worker_and_is_used_again(
    cluster: Slurm, rig: Rig, expected: bytes, daemon: str, words: str
) -> None:
    with rig.run(f"slurm,size={NODES},partition=low", workers=2) as run:
        run.until_members(2)
        cluster.kill(daemon)
        run.until(lambda: any(event["host"] == "" for event in run.events("host")), "the error")
        run.command("scale", str(NODES))
        reasons = [event["reason"].lower() for event in run.events("host") if event["host"] == ""]
        cluster.begin_controller() if daemon == CONTROLLER else cluster.begin_munge()  # for the next tests too
        told = [reason for reason in reasons if "has not answered" not in reason]  # such a command has told nothing
        assert all(words in reason for reason in told), reasons
        run.until_members(NODES)
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert cluster.jobs() == {}


def test_a_slurmd_that_is_killed_costs_no_worker(cluster: Slurm, rig: Rig, expected: bytes) -> None:
    """Its job step is not its child, and goes on."""
    with rig.run("slurm,size=2,partition=low", workers=2) as run:
        run.until_members(2)
        jobs = set(cluster.jobs())
        node = cluster.node(min(jobs))
        cluster.kill(node)
        run.until_step(run.step + 10)
        cluster.begin_node(node)
        run.until_step(run.step + 10)
        assert set(cluster.jobs()) == jobs
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert cluster.jobs() == {}


def test_a_run_that_was_killed_goes_on_with_its_jobs_at_another_address(
    cluster: Slurm, rig: Rig, expected: bytes
) -> None:
    pool = "slurm,size=2,partition=low"
    with rig.run(pool, workers=2) as first:
        first.until_members(2)
        jobs = set(cluster.jobs())
        first.process.kill()
        first.process.wait()
        with rig.run(pool, "--listen", "127.0.0.2", workers=2) as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            assert set(cluster.jobs()) == jobs
            rig.hurry()
            second.finish()
            assert not second.events("lost") + second.events("resumed"), second.report()
    assert rig.out.read_bytes() == expected
    assert cluster.jobs() == {}


def test_after_a_crash_of_everything_jobs_end_by_themselves_and_queued_ones_at_their_start(
    cluster: Slurm, rig: Rig
) -> None:
    other = cluster.submit("sleep 1000", "--partition=high", f"--nodes={NODES - 1}")
    until(lambda: cluster.state(other) == "RUNNING", "somebody else's job")
    options = ("--orphan-limit", "15")
    with rig.run("slurm,size=2,partition=low", *options, workers=2, epochs=("--epochs", "4000")) as run:
        run.until_members(1)
        run.until(lambda: len(cluster.jobs()) == 3, "one that waits")
        run.process.kill()
        run.process.wait()
        until(lambda: set(cluster.jobs()) == {other}, "their ends", 120)
    cluster.run("scancel", other)
    until(lambda: cluster.jobs() == {}, "its end")


def test_a_job_at_its_time_limit_is_left_and_replaced_before(cluster: Slurm, rig: Rig) -> None:
    with rig.run("slurm,size=1,partition=low,time=2", workers=1, epochs=("--epochs", "4000")) as run:
        run.until_members(1)
        first = min(cluster.jobs(), key=int)  # its successor may be there already
        run.until(lambda: bool(run.events("notice")), "the notice")
        notice = run.events("notice")[0]
        assert "limit" in notice["reason"]
        run.until(lambda: cluster.state(first) == "COMPLETED", "it ends by itself, before the limit")
        run.until_members(1, without=(notice["worker"],))
        run.command("stop")
        run.finish()
        assert not run.events("lost"), run.report()
    assert cluster.jobs() == {}


def test_another_pool_fills_in_while_jobs_are_queued(cluster: Slurm, rig: Rig) -> None:
    other = cluster.submit("sleep 1000", "--partition=high", f"--nodes={NODES}")
    until(lambda: cluster.state(other) == "RUNNING", "somebody else's job")
    pools = ("slurm,size=2,partition=low", "--pool", "local,size=2")
    with rig.run(*pools, workers=2, epochs=("--epochs", "4000")) as run:
        run.until_members(2)
        assert all(worker.startswith("local-") for worker in run.members)
        cluster.run("scancel", other)
        run.until(lambda: len(run.members) == 2 and not any(w.startswith("local-") for w in run.members), "Slurm's")
        run.command("stop")
        run.finish()
        assert not run.events("lost"), run.report()
    assert cluster.jobs() == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("partition=nope", "partition"),
        ("partition=low,gres=gpu:8", "gres"),
        ("partition=low,constraint=fast", "feature"),
        ("partition=low,time=soon", "time"),
        ("partition=low,cpus=64", "cpus"),
        ("partition=low,slots=0", "slots"),
        ("partition=low,colour=red", "colour"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_what_can_t_be_had_is_an_error_before_anything_is_made(tmp_path: Path, options: str, words: str) -> None:
    command = [*FARANDOLE, "run", "--folder", str(tmp_path / "run"), "--pool", f"slurm,size=2,{options}", str(JOB)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stdout
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_without_slurm_s_commands_the_error_names_the_one_that_is_missing(tmp_path: Path) -> None:
    command = [*FARANDOLE, "run", "--folder", str(tmp_path / "run"), "--pool", "slurm,size=2", str(JOB)]
    environ = {**ENVIRON, "PATH": os.defpath}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "sbatch" in done.stderr
