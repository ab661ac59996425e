"""No checkpoint is lost to a run, and none of its work: real runs with workers that do not reach its store, that can't
write, and with stores that are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.fake_worker import until
from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.lines import naming
from tests.support.small_job import Job, until_checkpoints

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
]
ANOTHER_MACHINE = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@contextlib.contextmanager
def external_worker(job: Job, run: Elastic) -> Generator[subprocess.Popen[bytes]]:
    """A worker by hand for which the run's folder is another disk: an empty one of its own mount namespace."""
    until(lambda: (job.folder / "ticket").exists())
    ticket = job.folder.with_name("ticket")
    ticket.write_bytes((job.folder / "ticket").read_bytes())
    join = [*FARANDOLE, "join", "--die-with", str(os.getpid()), str(ticket), str(job.script), *job.arguments]
    mount = f"mount -t tmpfs -o size=50m tmpfs {shlex.quote(str(job.folder))}"
    with run.output.open("ab") as output:
        process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *join],
            env={**ENVIRON, "FARANDOLE_HOST": "afar"}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.failure(
    "Checkpoints",
    "the path of the run's folder (or of `--checkpoints`) is another disk on the machine of an external worker",
    seen="its event `ready` says that it can't write checkpoints, and why",
    outcome="it trains; another worker writes the checkpoints, also if the external worker has rank 0",
)
@pytest.mark.failure(
    "Checkpoints",
    "an external worker that can't reach the place of the checkpoints is ready first when a run resumes",
    seen="an event says at once that it waits for the admission check against the run's first own worker",
    outcome="it waits; the first worker that reaches the place starts at the checkpoint",
)
@pytest.mark.world
@pytest.mark.skipif(not ANOTHER_MACHINE, reason="another disk at the same path takes root and mount namespaces")
def test_an_external_worker_on_another_machine_leads_and_neither_loses_a_checkpoint_nor_begins_again(
    undisturbed: str, tmp_path: Path
) -> None:
    """It comes to rank 0 by the other one's release; then it is the first that is ready when the run goes on."""
    job = Job(tmp_path)
    job.pace.write_text("1.5")
    with job.run(1, "--checkpoint-every", "3steps") as run, external_worker(job, run):
        run.until_members(2)
        [afar] = [e for e in run.events("ready") if e["host"] == "afar"]
        assert str(job.folder) in afar["unreached"]
        run.command("release", "w1")
        run.until_members(2, without=("w1",))
        leader, other = run.members
        assert (leader, other) == (afar["worker"], "w2")
        job.pace.write_text("0.3")
        before = len(run.events("checkpoint"))
        until_checkpoints(run, before + 2)
        run.command("stop")
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 0, run.report()
        written = run.events("checkpoint")[before + 1 :]
        [saved] = run.events("saved")
        assert {e["worker"] for e in (*written, saved)} == {"w2"}
        assert all(Path(e["path"]).exists() for e in (*written[-2:], saved))
    go = tmp_path / "go"
    wait = f"until [ -e {shlex.quote(str(go))} ]; do sleep 0.05; done"
    (job.folder / "ticket").unlink()
    with job.run(1, "--prepare", wait) as run, external_worker(job, run):
        run.until(lambda: bool(run.events("waits")), "that the guest waits")
        assert not run.events("view")
        go.touch()
        run.until_members(2)
        job.quick()
        run.finish()
        [resumed] = run.events("resumed")
        assert resumed["path"] == saved["path"]
        assert run.events("view")[0]["members"][0] == resumed["worker"] != afar["worker"]
        assert run.events("finished")[0]["equal"]
    assert job.out.read_text() == undisturbed


@pytest.mark.long
@pytest.mark.failure(
    "Checkpoints",
    "the disk with the checkpoints is missing (not mounted, moved, deleted) when a run is started again",
    seen="an error at once, with the path of the newest checkpoint, what is there now, and the remedy",
    outcome="exit code 1; nothing is started; to start earlier, use another `--folder`",
)
@pytest.mark.failure(
    "Checkpoints",
    "the worker that writes checkpoints can't (no file descriptors, its own disk is full, a limit of file sizes)",
    seen="`NO CHECKPOINT of step N: REASON` at once, and the worker that writes instead",
    outcome="another worker tries at once; if none can, they take turns when a checkpoint is due",
)
def test_who_fails_to_save_is_followed_by_another_and_a_store_that_is_gone_is_no_new_beginning(
    undisturbed: str, tmp_path: Path
) -> None:
    """The first may write small files only; then the disk is gone: under the live run, and for the next one."""
    job = Job(tmp_path)
    store, away = job.folder / "checkpoints", tmp_path / "away"
    with job.run(2, "--min", "2", "--checkpoint-every", "5steps") as run:
        until_checkpoints(run, 1)
        first = run.events("checkpoint")[0]["worker"]
        pids = {e["worker"]: e["pid"] for e in run.events("ready")}
        resource.prlimit(pids[first], resource.RLIMIT_FSIZE, (8000, 8000))
        run.until(lambda: bool(run.events("checkpoint failed")), "that it can't")
        [failed] = run.events("checkpoint failed")
        assert os.strerror(errno.EFBIG) in failed["reason"]
        until_checkpoints(run, 2)
        follows = run.events("checkpoint")[1]
        assert follows["worker"] != first
        assert failed["step"] <= follows["step"] < failed["step"] + 5, "at once"
        run.until_step(follows["step"] + 1)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        store.rename(away)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        newest = run.events("checkpoint")[-1]
        assert newest["path"] in run.output.read_text()
        assert not run.events("resumed")
    done = subprocess.run(
        [*FARANDOLE, "run", "--folder", str(job.folder), str(job.script)],
        env=ENVIRON, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert naming(done.stderr, newest["path"], f"step {newest['step']}", "--folder")
    away.rename(store)
    whole = sorted(store.glob("step-*.json"))[-1].with_suffix(".pt")  # one later than the newest, if told of by nobody
    assert str(whole) >= newest["path"]
    job.quick()
    with job.run(1) as run:
        run.finish()
        assert run.events("resumed")[0]["path"] == str(whole)
    assert job.out.read_text() == undisturbed


@pytest.mark.failure(
    "Checkpoints",
    "the checkpoints of a live run disappear, and all its workers die",
    seen="an error when the next workers are ready, with the path of the newest checkpoint and the remedy",
    outcome="exit code 1; the run does not start from step 0",
)
def test_a_checkpoint_that_vanishes_under_a_live_run_is_no_new_beginning(tmp_path: Path) -> None:
    """The store is there, its mark too: who is to begin finds less than the run has, and says so."""
    job = Job(tmp_path)
    with job.run(1, "--checkpoint-every", "5steps") as run:
        until_checkpoints(run, 1)
        [pid] = [e["pid"] for e in run.events("ready")]
        os.kill(pid, signal.SIGSTOP)
        for path in (job.folder / "checkpoints").glob("step-*"):
            path.unlink()
        os.kill(pid, signal.SIGKILL)
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        [short] = run.events("short")
        assert "step 5" in short["reason"]
        assert not run.events("resumed")
        assert naming(run.output.read_text(), "farandole: error: ", "step 5")
