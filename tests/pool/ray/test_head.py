"""Runs on Ray clusters of their own: one loses its head, one grows by Ray's autoscaler, one runs the run as a job."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from farandole.control.ticket import load
from tests.support.forked import ENVIRON
from tests.support.harness import FARANDOLE, Elastic, alone, read_lines
from tests.support.ray_cluster import OF_JOBS, ray_cluster, redis
from tests.support.slurm import until

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]

JOB = Path(__file__).parents[2] / "jobs" / "small.py"
EPOCHS = ("--epochs", "60")
RAY = (sys.executable, "-m", "ray.scripts.scripts")


def test_without_its_head_training_goes_on_to_the_same_bits_and_no_process_is_left(tmp_path: Path) -> None:
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"), *EPOCHS)
    out, pace = tmp_path / "out", tmp_path / "pace"
    pace.write_text("0.2")
    with ray_cluster(tmp_path / "home", nodes=2) as cluster:
        job, options = (str(out), "--pace", str(pace), *EPOCHS), ["--pool", "ray,size=2"]
        with Elastic(tmp_path / "run", JOB, *job, workers=2, deadline_s=240, options=options) as run:
            run.until_members(2)
            cluster.kill_head()
            run.until(lambda: any(event["host"] == "" for event in run.events("host")), "the error")
            pace.unlink()
            run.finish()
            [error] = {event["reason"] for event in run.events("host") if event["host"] == ""}
            assert cluster.address in error
            assert not run.events("lost"), run.report()
        assert out.read_bytes() == (tmp_path / "expected").read_bytes()
        until(lambda: not cluster.processes(), "the end of all processes")


def test_a_head_that_comes_back_is_used_again(tmp_path: Path) -> None:
    """Its actors are in a Redis meanwhile."""
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"), *EPOCHS)
    out, pace = tmp_path / "out", tmp_path / "pace"
    pace.write_text("0.2")
    with redis(tmp_path / "redis"), ray_cluster(tmp_path / "home", nodes=2) as cluster:
        job, options = (str(out), "--pace", str(pace), *EPOCHS), ["--pool", "ray,size=2"]
        with Elastic(tmp_path / "run", JOB, *job, workers=1, deadline_s=240, options=options) as run:
            run.until_members(1)
            [first] = cluster.actors()
            cluster.kill_head()
            run.until(lambda: any(event["host"] == "" for event in run.events("host")), "the error")
            run.command("scale", "2")
            cluster.restart_head()
            run.until_members(2)
            assert first["ActorID"] in [row["ActorID"] for row in cluster.actors()]
            pace.unlink()
            run.finish()
            assert not run.events("lost"), run.report()
        assert out.read_bytes() == (tmp_path / "expected").read_bytes()
        assert cluster.actors() == []


def test_ray_s_autoscaler_adds_nodes_for_the_actors_of_a_run(tmp_path: Path) -> None:
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"), *EPOCHS)
    out, pace = tmp_path / "out", tmp_path / "pace"
    pace.write_text("0.2")
    with ray_cluster(tmp_path / "home", most=2) as cluster:
        assert cluster.live() == 0
        job, options = (str(out), "--pace", str(pace), *EPOCHS), ["--pool", "ray,size=2"]
        with Elastic(tmp_path / "run", JOB, *job, workers=2, deadline_s=240, options=options) as run:
            run.until_members(2)
            assert cluster.live() == 2
            pace.unlink()
            run.finish()
            assert not run.events("lost"), run.report()
        assert out.read_bytes() == (tmp_path / "expected").read_bytes()
        assert cluster.actors() == [], "no demand is left"


@pytest.mark.skipif(not all(map(find_spec, OF_JOBS)), reason="Ray's job server needs the packages of ray[default]")
def test_a_run_that_is_a_job_of_ray_trains_and_ray_s_lists_don_t_show_its_ticket(tmp_path: Path) -> None:
    folder, out, pace = tmp_path / "run", tmp_path / "out", tmp_path / "pace"
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"), *EPOCHS)
    pace.write_text("0.2")
    with ray_cluster(tmp_path / "home", nodes=2, dashboard=True) as cluster:
        address = ("--address", cluster.dashboard)
        words = [*FARANDOLE, "run", "--folder", str(folder), "--pool", "ray,size=2", str(JOB), str(out)]
        words += ["--pace", str(pace), *EPOCHS]
        with (tmp_path / "output").open("wb") as output:
            job = subprocess.Popen(
                [*RAY, "job", "submit", *address, "--", *words], env=ENVIRON, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output,
            )  # fmt: skip
        try:
            until(lambda: len(_members(folder)) == 2, "both workers", 200)
            secret = load(str(folder / "ticket")).secret
            shown = [_list(each, *address) for each in ("actors", "tasks", "objects", "jobs", "workers")]
            assert "HostActor" in shown[0]
            assert "serve" in shown[1]
            assert not [text for text in shown if secret in text]
            pace.unlink()
            assert job.wait(100) == 0, (tmp_path / "output").read_text()
        finally:
            job.kill()
            job.wait()
        assert out.read_bytes() == (tmp_path / "expected").read_bytes()
        assert not [row for row in cluster.actors() if row["Name"] in _hosts(folder)]


def _members(folder: Path) -> tuple[str, ...]:
    views = [line["members"] for line in read_lines(folder) if line.get("event") == "view"]
    return tuple(views[-1]) if views else ()


def _hosts(folder: Path) -> set[str]:
    return {line["host"] for line in read_lines(folder) if line.get("event") == "host"}


def _list(what: str, *address: str) -> str:
    command = [*RAY, "list", what, "--detail", "--limit", "1000", *address]
    return subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True, timeout=60).stdout
