"""A run whose hosts are pods of a cluster that this process plays (`tests/support/kubernetes.py`)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.control.ticket import load
from tests.support.cluster_run import JOB, Rig
from tests.support.harness import Elastic
from tests.support.kubernetes import IMAGE, NAMESPACE, Cluster, kubernetes, names, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]

ENDING = JOB.with_name("ending.py")
NODES = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path, NODES) as found:
        yield found


def pool(*keys: str, size: int = NODES) -> str:
    """The pool, with these keys too."""
    return ",".join(("kubernetes", f"namespace={NAMESPACE}", f"image={IMAGE}", f"size={size}", *keys))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, NODES)


def hosts(run: Elastic, state: str) -> list[dict[str, Any]]:
    return [event for event in run.events("host") if event["state"] == state]


def host_workers(run: Elastic, pod: str) -> list[str]:
    """The workers that the pod has had."""
    return [event["worker"] for event in run.events("ready") if pod.endswith(event["host"])]


def left(cluster: Cluster) -> list[str]:
    """What is left of runs."""
    return [*names(cluster.pods()), *cluster.secrets(), *map(str, cluster.processes())]


def test_two_pods_train_to_the_same_bits_and_nothing_is_left(cluster: Cluster, rig: Rig, expected: bytes) -> None:
    rig.hurry()
    with rig.run(pool()) as run:
        run.finish()
        assert len([event for event in run.events("host") if event["state"] == "joined"]) == NODES
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.long
def test_a_preempted_and_an_evicted_pod_leave_within_the_grace_and_others_come_instead(
    cluster: Cluster, rig: Rig, expected: bytes
) -> None:
    """The urgent pod gets its node, and training takes it again; a drained node is replaced by another."""
    with rig.run(pool("grace=100")) as run:
        run.until_members(NODES)
        first = names(cluster.pods())
        cluster.create("urgent", "sleep", "1000", priority="urgent")
        run.until(lambda: cluster.phase("urgent") == "Running", "the urgent pod")
        assert {event["worker"] for event in run.events("notice")} == {run.events("left")[0]["worker"]}
        run.until_members(NODES - 1)
        run.until(lambda: len(names(cluster.pods())) == NODES, "a pod that waits")
        run.until(lambda: any("Unschedulable" in event["reason"] for event in hosts(run, "queued")), "its reason")
        cluster.delete("urgent", grace_s=0)
        run.until_members(NODES)
        run.until(lambda: bool(hosts(run, "gone")), "the end of its pod")
        gone = [event["reason"] for event in hosts(run, "gone")]
        assert len(gone) == 1
        assert "PreemptionByScheduler" in gone[0]
        [old] = first & names(cluster.pods())
        cluster.evict(old)
        run.until(lambda: len(hosts(run, "gone")) == 2, "the end of the evicted one")
        run.until_members(NODES)
        assert "EvictionByEvictionAPI" in hosts(run, "gone")[1]["reason"]
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.world
def test_a_pod_that_is_killed_and_one_that_disappears_are_replaced(cluster: Cluster, rig: Rig, expected: bytes) -> None:
    with rig.run(pool()) as run:
        members = run.until_members(NODES)
        one, two = sorted(names(cluster.pods()))
        cluster.lose(one, "OOMKilled")
        members = run.until_members(NODES, without=tuple(host_workers(run, one)))
        run.until(lambda: any("OOMKilled" in event["reason"] for event in hosts(run, "gone")), "its reason")
        cluster.forget(two)
        run.until_members(NODES, without=tuple(host_workers(run, two)))
        assert not {one, two} & names(cluster.pods()), "the objects of pods that are over are deleted"
        rig.hurry()
        run.finish()
        assert len(run.events("lost")) == 2, members
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.world
def test_an_api_server_that_is_away_costs_no_worker_and_is_used_again(
    cluster: Cluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(pool(), workers=1) as run:
        run.until_members(1)
        cluster.go_away()
        run.until(lambda: any(event["host"] == "" for event in run.events("host")), "the error")
        run.command("scale", str(NODES))
        cluster.fail(500, "POST", "pods", done=True)
        cluster.fail(429, "GET", "pods", after_s=0.1)
        cluster.come_back()
        run.until_members(NODES)
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_with_its_pods_at_another_address(
    cluster: Cluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(pool()) as first:
        first.until_members(NODES)
        pods = names(cluster.pods())
        first.process.kill()
        first.process.wait()
        with rig.run(pool(), "--listen", "127.0.0.2") as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            assert names(cluster.pods()) == pods
            rig.hurry()
            second.finish()
            assert not second.events("lost") + second.events("resumed"), second.report()
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.long
def test_the_ticket_is_in_the_secret_alone_and_an_interrupted_run_leaves_nothing(cluster: Cluster, rig: Rig) -> None:
    """With one pod that runs, and others that wait for a node."""
    cluster.nodes.popitem()
    with rig.run(pool()) as run:
        run.until_members(1)
        run.until(lambda: bool(hosts(run, "queued")), "one that waits")
        secret = load(str(run.folder / "ticket")).secret
        [stored] = cluster.secrets().values()
        hidden = (secret, stored["data"]["ticket"])
        assert secret.encode() in base64.b64decode(stored["data"]["ticket"])
        shown = [json.dumps(each) for each in cluster.history if each["kind"] != "Secret"]
        shown += [json.dumps(cluster.requests), *(cluster.log(name) for name in cluster.pods())]
        shown += [_read(path) for path in (run.output, *run.folder.glob("*.log"), run.folder / "metrics.jsonl")]
        shown += [_read(path) for pid in cluster.processes() for path in _process(pid)]
        assert any("farandole agent" in text.replace("\0", " ") for text in shown)
        assert not [text for text in shown if any(word in text for word in hidden)]
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: run.process.poll() is not None, "the end")
    assert left(cluster) == []


def _process(pid: int) -> list[Path]:
    return [Path(f"/proc/{pid}/cmdline"), Path(f"/proc/{pid}/environ")]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.long
def test_a_run_that_fails_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    job = (str(tmp_path / "out"), "--fail-at", "3")
    pool = f"kubernetes,namespace={NAMESPACE},image={IMAGE},size=1"
    with Elastic(tmp_path / "run", ENDING, *job, workers=1, options=["--pool", pool]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1
    assert left(cluster) == []


@pytest.mark.world
def test_after_a_crash_of_everything_pods_end_by_themselves_and_the_secret_s_deletion_removes_all(
    cluster: Cluster, rig: Rig
) -> None:
    with rig.run(pool(), "--orphan-limit", "15", epochs=("--epochs", "4000")) as run:
        run.until_members(1)
        run.process.kill()
        run.process.wait()
        until(lambda: not cluster.processes(), "the end of all processes", 120)
    for name in cluster.secrets():
        cluster.delete(name, "secrets")
    until(lambda: not left(cluster), "the garbage collector")


@pytest.mark.world
def test_two_runs_in_one_namespace_use_and_remove_their_own_pods_only(
    cluster: Cluster, tmp_path: Path, expected: bytes
) -> None:
    """One of them is killed and continued while the other one ends."""
    (tmp_path / "other").mkdir()
    one, other = Rig(tmp_path, 1), Rig(tmp_path / "other", 1)
    with one.run(pool(size=1)) as killed:
        killed.until_members(1)
        [its] = names(cluster.pods())
        with other.run(pool(size=1)) as run:
            run.until_members(1)
            killed.process.kill()
            killed.process.wait()
            other.hurry()
            run.finish()
        assert other.out.read_bytes() == expected
        assert names(cluster.pods()) == {its}
        assert cluster.phase(its) == "Running"
        with one.run(pool(size=1)) as second:
            second.until(lambda: bool(second.events("view")), "its worker")
            one.hurry()
            second.finish()
            assert not second.events("lost"), second.report()
        assert len({event["host"] for event in hosts(second, "joined")} | {killed.events("ready")[0]["host"]}) == 1
    assert one.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.world
def test_pods_of_a_queue_wait_until_kueue_admits_them(cluster: Cluster, rig: Rig, expected: bytes) -> None:
    with rig.run(pool("queue=shared")) as run:
        run.until(lambda: len(names(cluster.pods())) == NODES and bool(hosts(run, "queued")), "the pods")
        assert "SchedulingGated" in hosts(run, "queued")[0]["reason"]
        assert not run.events("starting")
        cluster.admitted.add("shared")
        run.until_members(NODES)
        rig.hurry()
        run.finish()
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="process namespaces take root and unshare")
@pytest.mark.world
def test_an_agent_with_the_process_id_1_is_evicted_and_killed_like_any_other(
    cluster: Cluster, rig: Rig, expected: bytes
) -> None:
    cluster.isolates = True
    with rig.run(pool()) as run:
        run.until_members(NODES)
        one, two = sorted(names(cluster.pods()))
        cluster.evict(one)
        run.until(lambda: len(hosts(run, "gone")) == 1, "its end")
        assert not run.events("lost"), "it has left"
        run.until_members(NODES)
        cluster.lose(two)
        run.until(lambda: len(run.events("lost")) == 1, "the loss")
        run.until_members(NODES)
        rig.hurry()
        run.finish()
    assert rig.out.read_bytes() == expected
    assert left(cluster) == []
