"""A run whose hosts are actors of a real Ray cluster on this machine (`tests/support/ray_cluster.py`)."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.control.ticket import load
from tests.pool.ray.conftest import NODES
from tests.support.cluster_run import JOB, Rig, states
from tests.support.forked import ENVIRON
from tests.support.harness import FARANDOLE
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import until

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, NODES)


def node_of(cluster: RayCluster, host: str) -> int:
    """The node on which the host's actor runs."""
    [id] = [row["Address"]["NodeID"] for row in cluster.actors("ALIVE") if row["Name"] == host]
    return cluster.nodes()[id]


def ids(cluster: RayCluster) -> set[str]:
    return {row["ActorID"] for row in cluster.actors()}


def test_two_hosts_train_to_the_bits_of_one_process_and_nothing_is_left(
    cluster: RayCluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(f"ray,size={NODES}") as run:
        run.until_members(NODES)
        assert len(cluster.actors("ALIVE")) == NODES
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert cluster.actors() == []
    assert cluster.processes() == []


def test_the_ticket_is_in_no_listing_or_log_and_a_stopped_run_leaves_no_actor(cluster: RayCluster, rig: Rig) -> None:
    """With two actors that run, and one that waits for a node."""
    with rig.run(f"ray,size={NODES + 1}", workers=NODES + 1) as run:
        run.until_members(NODES)
        run.until(lambda: bool(states(run, "queued")), "one that waits")
        secret = load(str(run.folder / "ticket")).secret.encode()
        namespaces = {row["Name"]: row for row in cluster.actors()}
        assert len(namespaces) == NODES + 1
        shown = [cluster.stored()]
        shown += [path.read_bytes() for path in cluster.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        shown += [path.read_bytes() for path in run.folder.glob("logs/*.ray")]
        shown += list(_read("cmdline")) + list(_read("environ"))
        assert any(b"HostActor" in text for text in shown[:1])
        assert not [text for text in shown if secret in text]
        run.command("stop")
        run.finish()
    assert cluster.actors() == []
    assert cluster.processes() == []


def _read(file: str) -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (path / file).read_bytes()


def test_workers_leave_a_node_that_is_drained_before_its_deadline_and_use_the_next_one(
    cluster: RayCluster, rig: Rig, expected: bytes
) -> None:
    """Lending: a drain takes one of two nodes, somebody else uses it, and another one comes."""
    with rig.run(f"ray,size={NODES}") as run:
        run.until_members(NODES)
        node, deadline_s, drained = node_of(cluster, run.events("ready")[0]["host"]), 100.0, time.time()
        assert cluster.drain(node, deadline_s)
        run.until(lambda: bool(run.events("notice")), "the notice")
        [notice] = run.events("notice")
        run.until_members(NODES - 1, without=(notice["worker"],))
        left = run.events("view")[-1]
        run.until(lambda: cluster.is_free(node), "the node's CPU")
        free = time.time()
        assert free - drained < deadline_s
        cluster.remove(node)
        cluster.add()
        added = time.time()
        run.until_members(NODES)
        joined = run.events("view")[-1]
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
        steps = [line for line in run.lines() if "event" not in line and line["time"] > notice["time"]]
        last = [line["step"] for line in steps if line["step"] < left["step"]]
        assert len(last) <= 2, "it left within two steps"
        print(
            f"drain to notice {notice['time'] - drained:.1f} s, to the last step {left['time'] - drained:.1f} s, "
            f"{len(last)} steps after the notice, to the free node {free - drained:.1f} s; "
            f"new node to its first step {joined['time'] - added:.1f} s"
        )
    assert rig.out.read_bytes() == expected
    assert cluster.actors() == []


def test_a_raylet_that_is_killed_takes_all_its_processes_with_it_and_training_goes_on(
    cluster: RayCluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(f"ray,size={NODES}") as run:
        run.until_members(NODES)
        lost = run.events("ready")[0]
        node = node_of(cluster, lost["host"])
        assert lost["pid"] in cluster.processes()
        began = time.time()
        cluster.kill(node)
        run.until(lambda: lost["pid"] not in cluster.processes(), "its worker's end")
        print(f"the worker ended {time.time() - began:.1f} s after its raylet")
        run.until_members(NODES - 1, without=(lost["worker"],))
        cluster.remove(node)
        cluster.add()
        run.until_members(NODES)
        rig.hurry()
        run.finish()
    assert rig.out.read_bytes() == expected
    assert cluster.actors() == []
    assert cluster.processes() == []


def test_a_run_that_was_killed_goes_on_with_its_actors_at_another_address(
    cluster: RayCluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(f"ray,size={NODES}") as first:
        first.until_members(NODES)
        actors = ids(cluster)
        first.process.kill()
        first.process.wait()
        with rig.run(f"ray,size={NODES}", "--listen", "127.0.0.2") as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            assert ids(cluster) == actors
            rig.hurry()
            second.finish()
            assert not second.events("lost") + second.events("resumed"), second.report()
    assert rig.out.read_bytes() == expected
    assert cluster.actors() == []
    assert cluster.processes() == []


def test_after_a_crash_of_the_run_actors_end_by_themselves_and_one_that_waited_at_its_start(
    cluster: RayCluster, rig: Rig
) -> None:
    options = ("--orphan-limit", "15")
    with rig.run(f"ray,size={NODES + 1}", *options, workers=NODES + 1, epochs=("--epochs", "4000")) as run:
        run.until_members(NODES)
        run.until(lambda: len(cluster.actors()) == NODES + 1, "one that waits")
        run.process.kill()
        run.process.wait()
        until(lambda: cluster.actors() == [], "their ends", 180)
    assert cluster.processes() == []


def test_what_can_t_be_had_waits_and_another_pool_fills_in(cluster: RayCluster, rig: Rig) -> None:
    pools = ("ray,size=1,label=kind:fast", "--pool", "local,size=1")
    with rig.run(*pools, workers=1, epochs=("--epochs", "4000")) as run:
        run.until_members(1)
        run.until(lambda: bool(states(run, "queued")), "the reason")
        assert "kind=fast" in next(event["reason"] for event in run.events("host") if event["state"] == "queued")
        run.command("stop")
        run.finish()
    assert cluster.actors() == []


def test_an_agent_that_can_t_start_is_an_event_with_its_exit_code(cluster: RayCluster, rig: Rig) -> None:
    pools = ("ray,size=1,python=/bin/false", "--pool", "local,size=1")
    with rig.run(*pools, workers=1, epochs=("--epochs", "4000")) as run:
        run.until_members(1)
        run.until(lambda: bool(states(run, "failed")), "the reason")
        assert "code 1" in next(event["reason"] for event in run.events("host") if event["state"] == "failed")
        run.command("stop")
        run.finish()
    assert cluster.actors() == []


def refused(tmp_path: Path, options: str) -> str:
    command = [*FARANDOLE, "run", "--folder", str(tmp_path / "run"), "--pool", f"ray,size=2{options}", str(JOB)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (",address=127.0.0.1:1", ":1: "),
        (",address=ray://127.0.0.1:10001", "ray://127.0.0.1:10001"),
        (",address=somewhere", "somewhere"),
        (",num_cpus=0", "num_cpus"),
        (",resources=TPU", "resources"),
        (",colour=red", "colour"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_what_is_wrong_is_an_error_before_anything_is_made(tmp_path: Path, options: str, words: str) -> None:
    assert words in refused(tmp_path, options)


def test_a_cluster_of_another_version_of_ray_is_an_error_with_both_versions(
    cluster: RayCluster, tmp_path: Path
) -> None:
    own = cluster.exchange_version("2.9.0")
    try:
        error = refused(tmp_path, "")
        assert own in error
        assert "2.9.0" in error
    finally:
        cluster.exchange_version(own)
