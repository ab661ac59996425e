"""Which worker reaches the run's store, and that what a run has written is there before it goes on."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.checkpoint.owner import MARK, claim, mark_inside, new_identity, this_run
from farandole.checkpoint.reach import listed, see, unreached
from farandole.checkpoint.store import step_of
from farandole.errors import CheckpointsGone, UsageError
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Newest
from farandole.protocol.metrics import as_written
from tests.support.disks import fill, small_disk
from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.metric_lines import made

FORTY = Newest(step=40, path="/run/checkpoints/step-00000040-0123abcd.pt")


# --- the mark --------------------------------------------------------------------------------------------------------


def leave_mark(url: str) -> str:
    """The identity of a run that has taken the place."""
    identity = new_identity()
    claim(url, this_run(identity, Path(url).parent / "run", inside=False), alive=lambda *_: False)
    return identity


def test_who_finds_the_mark_and_can_write_beside_it_reaches_the_store(tmp_path: Path) -> None:
    store = str(tmp_path / "checkpoints")
    mark = leave_mark(store)
    assert unreached(store, mark) == ""
    assert [path.name for path in Path(store).iterdir()] == [MARK], "nothing is left of the try"


@pytest.mark.failure(
    "Checkpoints",
    "the path of the run's folder (or of `--checkpoints`) is another disk on the machine of an external worker",
)
def test_the_same_path_on_another_machine_is_not_the_store(tmp_path: Path) -> None:
    mark = leave_mark(str(tmp_path / "here"))
    elsewhere = tmp_path / "there"
    assert str(elsewhere) in unreached(str(elsewhere), mark)
    assert not elsewhere.exists(), "and is not made"
    leave_mark(str(elsewhere))
    assert str(elsewhere) in unreached(str(elsewhere), mark)


def test_a_store_that_can_be_read_only_is_not_reached(tmp_path: Path) -> None:
    mark = leave_mark(str(tmp_path / "checkpoints"))
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in unreached(str(tmp_path / "file"), "")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
        leave_mark(str(tmp_path / "file"))
    assert mark


@pytest.mark.failure(
    "Files, disks and output",
    "the disk is full when a run starts or resumes",
    seen="one sentence at once",
    outcome="nothing is started; the settings of an existing run stay",
)
@pytest.mark.world
@pytest.mark.processes
def test_a_disk_that_is_full_at_the_start_is_one_sentence_and_harms_no_settings(tmp_path: Path) -> None:
    """In a new folder, and in that of a run that goes on."""
    (tmp_path / "train.py").touch()
    with small_disk(tmp_path / "disk", "1m") as disk:
        full = fill(disk)
        new = refused(disk / "new", tmp_path / "train.py")
        assert new.startswith("farandole: error: ")
        assert f"{disk}/new/checkpoints" in new
        assert "[Errno 28]" in new
        assert new.count("\n") == 1
        full.unlink()
        mark_inside(str(disk / "new" / "checkpoints"), this_run(new_identity(), disk / "new", inside=True))
        settings = disk / "new" / "settings.json"
        settings.write_bytes(msgspec.json.encode(RunSettings(run="new")))
        (disk / "new" / "metrics.jsonl").touch()
        before = settings.read_bytes()
        fill(disk)
        again = refused(disk / "new", tmp_path / "train.py")
        assert again.startswith("farandole: error: ")
        assert f"{disk}/new/code" in again
        assert os.strerror(errno.ENOSPC) in again
        assert again.count("\n") == 1
        assert settings.read_bytes() == before


def refused(folder: Path, script: Path) -> str:
    """What `farandole run` says on standard error."""
    command = [*FARANDOLE, "run", "--workers", "1", "--folder", str(folder), str(script)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    return done.stderr


def test_a_remote_store_is_asked_by_a_process_of_its_own() -> None:
    """Here: one that exists in that process alone, and so has no mark."""
    assert "memory://run" in unreached("memory://run", "m")
    assert unreached("memory://run", "") == ""


# --- what was written ------------------------------------------------------------------------------------------------


def metrics(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(as_written(made(line)) for line in lines) + b'{"event":"check')
    return path


def at(step: int) -> str:
    return f"/run/checkpoints/step-{step:08d}-0123abcd.pt"


def test_the_list_of_what_was_written(tmp_path: Path) -> None:
    assert listed(tmp_path / "metrics.jsonl") == Newest()
    told = [
        {"event": "checkpoint", "step": 10, "path": at(10)},
        {"step": 11, "loss": 0.5},
        {"event": "saved", "worker": "w1", "path": at(40), "whole": True},
        {"event": "saved", "path": "/run/checkpoints/after-step-00000050-0123abcd.pt", "whole": False},
        {"event": "saved elsewhere", "path": at(60), "whole": True},
        {"event": "checkpoint", "step": 30, "path": at(30)},  # of one who was slow
    ]
    assert listed(metrics(tmp_path, *told)) == FORTY
    passed_over = {"event": "resumed", "step": 10, "path": at(10), "differences": []}
    assert listed(metrics(tmp_path, *told, passed_over)) == Newest(step=10, path=at(10))


def test_the_step_in_a_name() -> None:
    assert (step_of(at(40)), step_of("s3://b/p/step-00000007-0123abcd.pt"), step_of(""), step_of("x.pt")) == (
        40, 7, None, None,
    )  # fmt: skip


@pytest.mark.failure(
    "Checkpoints", "the disk with the checkpoints is missing (not mounted, moved, deleted) when a run is started again"
)
def test_what_the_run_has_is_there_whole_or_damaged_or_it_is_said(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    see([str(own)], Newest())
    with pytest.raises(CheckpointsGone, match=rf"{FORTY.path}\b.*\bstep 40\b.*{own}\b.*--resume.*--folder"):
        see([str(own)], FORTY)
    own.mkdir()
    (own / "step-00000030-0123abcd.json").touch()
    with pytest.raises(CheckpointsGone, match=rf"\bstep 40\b.*\bstep 30\b.*{own}\b.*{other}\b"):
        see([str(own), str(other)], FORTY)
    with pytest.raises(CheckpointsGone):
        see([str(own), str(other / "gone.pt")], FORTY)
    (own / "after-step-00000040-0123abcd.json").touch()
    with pytest.raises(CheckpointsGone):
        see([str(own)], FORTY)
    (own / "step-00000040-0123abcd.pt").touch()  # its manifest was lost: the worker will tell
    see([str(own)], FORTY)
    (own / "step-00000030-0123abcd.json").unlink()
    with pytest.raises(CheckpointsGone):  # nothing that could be gone on from
        see([str(own)], FORTY)
