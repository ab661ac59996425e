"""Locks on files, and file systems that keep none: who asks for one is told so, and nobody is taken to be alive."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from pathlib import Path

import pytest

from farandole.cli.folders import check_folder, make_folder
from farandole.code.pack import _locked  # pyright: ignore[reportPrivateUsage]
from farandole.control.run_folder import LOCK, hold, is_locked
from farandole.errors import RunFolderInUse
from farandole.platform.files import NoFileLocks, release_in_children
from farandole.pool import agent
from farandole.pool.local import _do_once  # pyright: ignore[reportPrivateUsage]
from farandole.worker.context import SingleProcess

NONE_KEPT = [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EIO]


@pytest.fixture(params=NONE_KEPT, ids=lambda number: errno.errorcode[number])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system call fails as it does on such a file system."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.failure(
    "Files, disks and output",
    "the file system of the run's folder has no locks (Lustre without `flock`, some FUSE mounts)",
    seen="one sentence at once",
    outcome=(
        "nothing is started, because a second run could use the folder; use another `--folder`; `--checkpoints` may "
        "stay"
    ),
)
@pytest.mark.usefixtures("no_locks")
def test_a_folder_without_locks_holds_no_run_and_takes_none(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with pytest.raises(NoFileLocks, match=re.escape(str(folder))):
        make_folder(folder, "train.py")
    assert not is_locked(folder)
    check_folder(folder)  # nobody is alive in it
    with pytest.raises(NoFileLocks):
        SingleProcess(str(folder), lambda: True)


@pytest.mark.usefixtures("no_locks")
def test_nothing_else_that_takes_a_lock_goes_on_without(tmp_path: Path) -> None:
    with pytest.raises(NoFileLocks), _locked(tmp_path / "pack"):
        pass
    with pytest.raises(NoFileLocks):
        agent.lock(tmp_path)
    with pytest.raises(NoFileLocks):
        _do_once("true", "--prepare", mark=tmp_path / "done", lock=tmp_path / "prepare", host="h")
    assert not (tmp_path / "done").exists()


@pytest.mark.failure(
    "Checkpoints",
    "a script trains by itself (`FARANDOLE_FOLDER`) in the folder of a live run or of another such script",
    seen="`RunFolderInUse` at `farandole.join()`, with the process and host of the other",
    outcome="exit code 1; the folder is not changed",
)
def test_a_folder_is_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scripts that train by themselves; one, and a `farandole run`."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    first = SingleProcess(str(tmp_path), lambda: True)
    assert first.identity
    assert is_locked(tmp_path)
    for second in (lambda: SingleProcess(str(tmp_path), lambda: True), lambda: make_folder(tmp_path, "train.py")):
        with pytest.raises(RunFolderInUse, match=rf"\b{os.getpid()}\b"):
            second()
    assert "process" in (tmp_path / LOCK).read_text()
    assert first._file is not None
    first._file.close()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A loader process, say, that outlives its worker."""
    handle = hold(tmp_path)
    release_in_children(handle)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            ours.close()
            theirs.send(b"up")
            theirs.recv(1)
            os._exit(0)
        theirs.close()
        assert ours.recv(2) == b"up"
        os.close(handle)
        assert not is_locked(tmp_path)
        ours.close()
        os.waitpid(child, 0)
