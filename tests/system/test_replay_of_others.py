"""A run's folder from somebody else is a program: what it names is neither executed nor connected to."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from farandole.cli.reproduce import replay
from farandole.code import pack
from farandole.errors import UsageError
from farandole.platform import files
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Checkpoints
from farandole.protocol.metrics import as_written
from tests.support import forked
from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.metric_lines import step_line
from tests.support.users import MALLORY, needs_root

TELLS = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()\n"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def connections(listener: socket.socket) -> int:
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


@pytest.fixture
def folder(tmp_path: Path, listener: socket.socket) -> Path:
    """A run of one step, with a copy of its script, whose settings name a place of checkpoints that listens."""
    place, script = tmp_path / "run", tmp_path / "train.py"
    files.make(place)
    script.write_text(TELLS)
    pack.keep(str(script), place / "code")
    settings = RunSettings(
        run="run",
        folder=str(place),
        command=(str(script), str(tmp_path / "executed")),
        directory=str(tmp_path),
        checkpoints=Checkpoints(url=f"http://127.0.0.1:{listener.getsockname()[1]}/x"),
    )
    files.write(place / "settings.json", msgspec.json.encode(settings))
    files.write(place / "metrics.jsonl", as_written(step_line(0)) + b"\n")
    return place


def of_another(*names: str) -> Callable[[Path], None]:
    def give(folder: Path) -> None:
        for name in names:
            for path, _ in files.below(folder / name):
                os.chown(path, MALLORY, MALLORY)

    return give


def writable(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod((folder / name).stat().st_mode | 0o020)


def without_copies(folder: Path) -> None:
    shutil.rmtree(folder / "code")
    (folder.parent / "train.py").chmod(0o666)


SUSPECT = {
    "the whole folder": pytest.param(of_another("."), "belongs to", marks=[needs_root, pytest.mark.world]),
    "its settings": pytest.param(
        of_another("settings.json"), "settings.json .*uid", marks=[needs_root, pytest.mark.world]
    ),
    "the copies of the code": pytest.param(of_another("code"), "code .*uid", marks=[needs_root, pytest.mark.world]),
    "a module among them": pytest.param(
        of_another("code/train.py"), "train.py .*uid", marks=[needs_root, pytest.mark.world]
    ),
    "a folder that others can write": pytest.param(writable("."), r"run\b.*mode 0720"),
    "settings that others can write": pytest.param(writable("settings.json"), "settings.json .*mode"),
    "code that others can write": pytest.param(writable("code/train.py"), "train.py .*mode"),
    "no copies, a script that others can write": pytest.param(without_copies, "train.py .*mode"),
}


@pytest.mark.failure(
    "Command line",
    "`farandole replay` names a folder of another user, or `--resume` one whose settings name another place",
    seen="one line with the program or the place that it would have used",
    outcome="exit code 2; nothing is executed; name the script or the place yourself",
)
@pytest.mark.parametrize(("taint", "why"), SUSPECT.values(), ids=SUSPECT.keys())
def test_what_another_can_have_written_runs_nothing(
    taint: Callable[[Path], None], why: str, folder: Path, tmp_path: Path, listener: socket.socket
) -> None:
    """Root is a user like any other here."""
    taint(folder)
    with pytest.raises(UsageError, match=f"{why}.*train.py.*replay .*run SCRIPT"):
        replay(folder)
    assert not (tmp_path / "executed").exists()
    assert connections(listener) == 0


@pytest.mark.world
@pytest.mark.processes
@needs_root
def test_with_a_script_of_ones_own_it_runs_that_and_connects_to_nothing(
    folder: Path, tmp_path: Path, listener: socket.socket
) -> None:
    def replayed(*script: str) -> str:
        command = [*FARANDOLE, "replay", str(folder), *script]
        return forked.run(command, env=ENVIRON, timeout=90).stderr

    own = tmp_path / "own.py"
    own.write_text(TELLS)
    (folder / "journal.sqlite").symlink_to("/proc/self/mem")  # what is in it is not even looked at
    of_another(".")(folder)
    said = replayed(str(own), str(tmp_path / "mine"))
    assert "http://127.0.0.1" in said
    assert "farandole.join()" in said, "it was run"
    assert (tmp_path / "mine").exists()
    assert not (tmp_path / "executed").exists()
    assert connections(listener) == 0
    listener.close()  # who connects is not kept waiting
    for path, _ in files.below(folder):
        os.chown(path, 0, 0, follow_symlinks=False)
    assert "http://127.0.0.1" in replayed(), "the place of checkpoints"
    assert (tmp_path / "executed").exists(), "the same folder, as one's own"
