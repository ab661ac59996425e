"""What is in a run's folder is its user's alone: modes from the first byte, no link followed, nothing of others used.

The attacks are real ones: links and pipes that are planted at every name that a run uses. Those of other users are in
`test_folders_of_others.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Generator
from pathlib import Path

import pytest

from farandole.checkpoint.owner import claim, new_identity, this_run
from farandole.cli.folders import check_folder, close, make_folder
from farandole.control.run_folder import EXPORTS_LOG, FILES, FOLDERS, TENSORBOARD, WANDB
from farandole.control.ticket import exposed
from farandole.coordinator.journal import Journal
from farandole.errors import NotPrivate, UsageError
from farandole.platform import files
from tests.support.harness import open_to_others
from tests.support.run_files import WRITERS, ticket, umask, write_alone, write_checkpoint, write_journal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.make(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(params=[0o000, 0o022, 0o077])
def any_umask(request: pytest.FixtureRequest) -> Generator[None]:
    with umask(request.param):
        yield


@pytest.mark.usefixtures("any_umask")
def test_every_file_and_folder_is_private_whatever_the_umask(folder: Path) -> None:
    for write in {*WRITERS.values(), write_alone}:
        write(folder)
    journal = Journal(folder)  # while it is open there are two more files
    try:
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert set(FOLDERS) - {TENSORBOARD, WANDB} <= found  # which a run has that was asked for them
        assert set(FILES) - {"journal.sqlite-journal", EXPORTS_LOG} <= found
        assert open_to_others(folder) == []
    finally:
        journal.close()


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_at_any_name_leaves_its_target_as_it_was(name: str, folder: Path, tmp_path: Path) -> None:
    """Who made it, and whether it is named in an error or replaced, is another question."""
    target = tmp_path / "precious"
    target.write_text("torn line, without an end")
    WRITERS[name](folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    with contextlib.suppress(NotPrivate, UsageError, FileExistsError):
        WRITERS[name](folder)
    assert target.read_text() == "torn line, without an end"
    assert target.stat().st_mode & 0o077, "it was not touched"


@pytest.mark.failure(
    "Files, disks and output",
    "a symbolic link, a pipe or a hard link is in the place of a file of the run",
    seen="one line at once names it",
    outcome=(
        "exit code 2; its target is not changed; your own link to a folder (checkpoints on another disk) is followed"
    ),
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "journal.sqlite", "journal.sqlite-wal", "lock", "coordinator.log"])
@pytest.mark.parametrize("plant", ["link", "hard link", "pipe", "folder"])
def test_what_is_no_file_of_ours_is_refused_by_name(name: str, plant: str, folder: Path, tmp_path: Path) -> None:
    path, target = folder / name, tmp_path / "precious"
    target.write_text("mine")
    {"link": lambda: path.symlink_to(target), "hard link": lambda: os.link(target, path),
     "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[plant]()  # fmt: skip
    for use in (WRITERS[name], check_folder):
        with pytest.raises(NotPrivate) as refused:
            use(folder)
        assert str(path) in str(refused.value)
    assert target.read_text() == "mine"


def test_a_world_of_one_follows_no_link_either(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("torn line")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(NotPrivate, match=r"/metrics\.jsonl\b"):
        write_alone(folder)


@pytest.mark.timeout(20)
def test_what_is_refused_has_not_been_touched_and_nobody_waits_for_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o644)
    os.link(tmp_path / "precious", folder / "linked")
    with pytest.raises(NotPrivate, match=r"/linked\b.*\b2\b"):
        files.write(folder / "linked", b"")
    assert (tmp_path / "precious").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "precious").stat().st_mode) == 0o644
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotPrivate, match=r"/pipe\b"):
        files.read(folder / "pipe")


def test_a_file_that_is_opened_is_closed_to_others(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("line\n")
    (folder / "metrics.jsonl").chmod(0o664)
    files.append(folder / "metrics.jsonl").close()
    assert open_to_others(folder) == []


def test_a_new_folder_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with umask(0o022):
        made = make_folder(None, "train.py")
    assert made.parent == tmp_path / "runs"
    assert open_to_others(made) == []


@pytest.mark.failure(
    "Files, disks and output",
    "other users can read the folder that `--folder` names",
    seen=(
        "`note: other users could read runs/x; its mode is now 0700`, at the start; not if the folder holds other files"
    ),
    outcome="the run continues",
)
def test_what_others_could_read_they_can_no_more(folder: Path) -> None:
    """A folder from before, or whose modes somebody has changed."""
    write_journal(folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777 if path.is_dir() else 0o664)
    with pytest.raises(NotPrivate, match=r"/run \(mode 0777\).*chmod 700 \S*/run\b"):
        check_folder(folder)
    folder.chmod(0o755)
    check_folder(folder)
    assert make_folder(folder, "train.py") == folder
    assert "0700" in close(folder)
    assert close(folder) == ""
    assert open_to_others(folder) == []


@pytest.mark.failure(
    "Files, disks and output",
    "`--folder` names a folder that other users can write or own, or such a file is in it",
    seen="one line at once, with the users or the mode, and the `chmod`",
    outcome="exit code 2; nothing is started; root may use any folder",
)
def test_the_remedy_does_not_close_tmp(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(NotPrivate, match=rf"{re.escape(str(shared))} \(mode 1777\)") as refused:
        check_folder(shared)
    assert "chmod" not in str(refused.value)


def test_a_folder_is_made_in_one_step_and_those_above_as_usual(tmp_path: Path) -> None:
    with umask(0o022):
        files.make(tmp_path / "runs" / "r")
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "runs" / "r").stat().st_mode) == 0o700


@pytest.mark.failure(
    "Files, disks and output", "a symbolic link, a pipe or a hard link is in the place of a file of the run"
)
def test_a_link_of_ones_own_to_a_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    """A disk of its own for the checkpoints."""
    files.make(tmp_path / "disk")
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    check_folder(folder)
    write_checkpoint(folder)
    assert open_to_others(tmp_path / "disk") == []
    (tmp_path / "disk").chmod(0o770)
    with pytest.raises(NotPrivate, match=r"/\w+ \(mode 0770\)"):
        check_folder(folder)


def test_a_place_for_checkpoints_that_the_user_has_made_keeps_its_modes(tmp_path: Path) -> None:
    with umask(0o022):
        (tmp_path / "checkpoints").mkdir(mode=0o775)
        run = this_run(new_identity(), tmp_path / "run", inside=False)
        claim(str(tmp_path / "checkpoints"), run, alive=lambda *_: False)
    assert stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "checkpoints" / ".run").stat().st_mode) == 0o644


def test_a_ticket_that_others_can_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    ticket().save(path)
    assert exposed(str(path)) == ""
    path.chmod(0o644)
    assert exposed(str(path)) == f"others can read the ticket {path}, and join (mode 0644); chmod 600 {path}"
    path.chmod(0o660)
    assert exposed(str(path)).startswith(f"others can change the ticket {path}, and where its workers go (mode 0660)")
    assert exposed("-") == ""
