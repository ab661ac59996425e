"""Real processes whose host can't get them the data: it costs them their place, and no bit and no sample."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from farandole.data.ledger import count
from farandole.protocol.coordinator.state import EXIT_DATA_UNAVAILABLE
from tests.jobs.loading import EPOCHS, SAMPLES
from tests.support.disks import fill, small_disk
from tests.support.file_server import FileServer
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone
from tests.support.image_files import make_folder
from tests.support.lines import naming
from tests.support.shards import prepared
from tests.support.shared import once

pytestmark = [pytest.mark.processes]
JOB = Path(__file__).parents[1] / "jobs" / "loading.py"
EVERY_SAMPLE_ONCE = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
REASON = os.strerror(errno.ENOSPC)


@pytest.fixture(scope="session")
def fed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an undisturbed world of one comes to."""

    def train(folder: Path) -> str:
        alone(folder, JOB, str(folder))
        return (folder / "weights").read_text()

    return once(tmp_path_factory, "unfed", train)


class Job:
    """A run of the job. Its steps are slow until `quick`."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        (self.out / "pace").write_text("0.4")

    def run(self, workers: int, *options: str, arguments: tuple[str, ...] = ()) -> Elastic:
        folder = self.out.parent / "run"
        options = ("--ledger", *options)
        return Elastic(folder, JOB, str(self.out), *arguments, workers=workers, options=[*options], deadline_s=200.0)

    def short(self, **where: str) -> None:
        """From now on these workers get no data there."""
        (self.out / "new").write_text(json.dumps({worker.replace("all", "*"): at for worker, at in where.items()}))
        (self.out / "new").rename(self.out / "short")

    def quick(self) -> None:
        (self.out / "pace").unlink()

    def finish(self, run: Elastic, fed: str) -> None:
        """It ends well, as if nothing had been."""
        run.finish()
        assert (self.out / "weights").read_text() == fed
        assert count(run.folder / "ledger") == EVERY_SAMPLE_ONCE


@pytest.mark.parametrize(("worker", "where"), [("w1", "train"), ("w2", "train"), ("w2", "evaluate"), ("w1", "once")])
def test_a_worker_whose_disk_is_full_is_replaced(worker: str, where: str, tmp_path: Path, fed: str) -> None:
    job = Job(tmp_path)
    with job.run(2) as run:
        run.until_step(1)
        worker = run.members[0] if where == "once" else worker
        job.short(**{worker: where})
        run.until(lambda: bool(run.events("unfed")), "one that can't be fed")
        run.until_members(2, without=(worker,))
        job.quick()
        job.finish(run, fed)
        [told] = run.events("unfed")
        assert told["worker"] == worker
        assert REASON in told["reason"]
        assert "\n" not in told["reason"], "without the loader process's traceback"
        assert [lost["worker"] for lost in run.events("lost")] == [worker]
        assert [event["state"] for event in run.events("host")] == ["left alone"]
        assert not run.events("failed"), run.report()
        assert naming(run.output.read_text(), worker, told["host"], REASON)
        log = (run.folder / "logs" / f"{worker}.log").read_text()
        assert naming(log, "farandole: error: ", "shard 7", f"{job.out}/cache", REASON)


@pytest.mark.long
def test_the_first_of_a_run_hands_its_state_on_and_goes(tmp_path: Path, fed: str) -> None:
    """Its disk is full from the start. Whoever is the first: of the others nobody holds the state without it."""
    job = Job(tmp_path)
    job.short(w1="train")
    with job.run(2, "--min", "2") as run:
        run.until(lambda: bool(run.events("unfed")), "one that can't be fed")
        run.until_members(2, without=("w1",))
        job.quick()
        job.finish(run, fed)
        assert not run.events("state lost")


@pytest.mark.long
def test_joiners_that_can_not_be_fed_cost_nobody_their_place(tmp_path: Path, fed: str) -> None:
    """The third one of them can: it is tried again, after 1 s, then after 2 s."""
    job = Job(tmp_path)
    job.short(w2="train", w3="open")
    with job.run(1) as run:
        run.until_step(1)
        run.command("scale", "2")
        run.until_members(2, without=("w2", "w3"))
        job.quick()
        job.finish(run, fed)
        assert [event["worker"] for event in run.events("unfed")] == ["w2", "w3"]
        assert [event["reason"].partition(":")[0] for event in run.events("host")] == ["for 1 s", "for 2 s"]
        assert not run.events("no replacements")


@pytest.mark.long
def test_where_all_are_struck_the_state_is_saved_and_it_goes_on_from_there(tmp_path: Path, fed: str) -> None:
    job = Job(tmp_path)
    with job.run(2) as run:
        run.until_step(1)
        job.short(all="train")
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        output = run.output.read_text()
        assert naming(output.splitlines()[-1], "farandole: error: ", REASON)
        [saved] = run.events("saved")
        assert Path(saved["path"]).exists()
        assert not run.events("state lost")
    (job.out / "short").unlink()
    job.quick()
    with job.run(2) as run:
        job.finish(run, fed)
        assert [event["path"] for event in run.events("resumed")] == [saved["path"]]


@pytest.mark.failure("Data and loader processes", "a shard of the data is missing, damaged or not reachable")
def test_where_nobody_can_open_the_data_the_run_ends_and_says_why(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.short(all="open")
    with job.run(2) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 1, run.report()
        assert naming(run.output.read_text().splitlines()[-1], "farandole: error: ", REASON)


@pytest.mark.long
def test_an_external_worker_ends_with_a_code_of_its_own_the_reason_and_a_remedy(tmp_path: Path, fed: str) -> None:
    job = Job(tmp_path)
    with job.run(1) as run:
        run.until_step(1)
        ticket = shutil.copy(run.folder / "ticket", tmp_path / "ticket")
        job.short(guest="train")
        (job.out / "pace").write_text(
            "6"
        )  # so that the run lasts until the external worker has come, whatever else computes
        done = subprocess.run(
            [*FARANDOLE, "join", str(ticket), str(JOB), str(job.out)], env={**ENVIRON, "FARANDOLE_WORKER": "guest"},
            capture_output=True, text=True, timeout=150, check=False,
        )  # fmt: skip
        assert done.returncode == EXIT_DATA_UNAVAILABLE, done.stdout + done.stderr
        assert REASON in done.stderr
        assert naming(done.stderr, "farandole: error: ", "shard 7", REASON)
        external_workers = [event["worker"] for event in run.events("ready") if event["worker"].startswith("guest")]
        assert len(external_workers) == 1, "it would find the same disk"
        job.quick()
        job.finish(run, fed)


@pytest.mark.world
def test_a_joiner_whose_cache_is_on_a_full_disk(tmp_path: Path) -> None:
    source, shards = make_folder(tmp_path / "source", each=SAMPLES // 3), tmp_path / "shards"
    assert prepared(source, str(shards))
    with FileServer(shards) as server, small_disk(tmp_path / "disk", "256k") as disk:
        sharded = ("--shards", server.url, "--loaders", "0")
        (tmp_path / "alone").mkdir()
        alone(tmp_path / "alone", JOB, str(tmp_path / "alone"), *sharded)
        job = Job(tmp_path)
        (job.out / "cache-w2").symlink_to(disk)
        fill(disk)
        with job.run(1, arguments=sharded) as run:
            run.until_step(1)
            run.command("scale", "2")
            run.until_members(2, without=("w2",))
            job.quick()
            job.finish(run, (tmp_path / "alone" / "weights").read_text())
            [told] = run.events("unfed")
            assert told["worker"] == "w2"
            assert REASON in told["reason"]
