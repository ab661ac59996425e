"""What several modules need: a run of one within the tests' own process; the chaos job undisturbed, trained once; an S3
server.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import settings

import farandole
from chaos import trial
from chaos.verdict import Reference
from farandole import joining
from farandole.platform import output, process
from tests.support import small_job
from tests.support.harness import ENVIRON, alone
from tests.support.launched import Launched
from tests.support.parts import in_part
from tests.support.s3_server import AWS, S3
from tests.support.shared import folder, once

SEED = 5

settings.register_profile("untimed", deadline=None)  # speed belongs in benchmarks
settings.load_profile("untimed")
os.umask(0o022)  # a folder that a test makes, and a group can write, is no place for a run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of N parts of the selected tests that with number K, from 0 on")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers have no terminal
        config.pluginmanager.register(Failures(config))


class Failures:
    """Names each failed test at once. The summary is not written if the run is ended early."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.write_line(f"failed: {report.nodeid}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of processes first: where several share the work, short ones are left to even out its end."""
    if part := config.getoption("--part"):
        mine = {item: in_part(item.nodeid, part) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not mine[item]])
        items[:] = [item for item in items if mine[item]]
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return once(tmp_path_factory, "chaos", trial.undisturbed)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Path:  # noqa: ARG001  it makes the place
    return folder(tmp_path_factory) / "chaos"


@pytest.fixture(autouse=True)
def unset_logs() -> Iterator[None]:
    """What a test's own process has set up for farandole's log is gone after it."""
    yield
    output.hide()


@pytest.fixture(autouse=True)
def no_fork_server_left() -> Iterator[None]:
    """A fork server that a command started in the test's own process, and that no pool took, ends with the test."""
    yield
    process.end_spare()


@pytest.fixture(autouse=True)
def working_folder_unchanged() -> Iterator[None]:
    """A test that leaves its process in another folder fails itself, and not the tests after it."""
    before = os.getcwd()
    yield
    after = os.getcwd()
    os.chdir(before)
    assert after == before, f"the test has left the working folder at {after}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[farandole.Run]:
    for name in ("TICKET", "WORKER", "POOL", "FOLDER", "LEDGER", "THREADS", "HISTORY"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setattr(joining, "_current", None)
    threads = torch.get_num_threads()
    yield farandole.join()
    torch.set_num_threads(threads)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[farandole.Run]:
    """A run that writes a checkpoint at each step, and counts samples. It is not ended with the tests' process."""
    for name in ("TICKET", "WORKER", "POOL", "THREADS", "HISTORY"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED))
    monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path))
    monkeypatch.setenv("FARANDOLE_LEDGER", "1")
    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "1steps")
    monkeypatch.setattr(joining, "_current", None)
    threads = torch.get_num_threads()
    run = farandole.join()
    atexit.unregister(run._context._end)  # type: ignore[attr-defined]
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    server = S3(tmp_path / "moto.log")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delitem(ENVIRON, name)
    for name, value in {**AWS, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setitem(ENVIRON, name, value)
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # clients of an earlier server
    yield server
    server.end()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def start(*options: str, arguments: tuple[str, ...] = ()) -> Launched:
        launched.append(Launched(tmp_path, *options, arguments=arguments))
        return launched[-1]

    yield start
    for each in launched:
        each.process.kill()  # the rest dies with it
        each.process.wait()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small job's fingerprint, from a world of one without checkpoints."""

    def train(folder: Path) -> str:
        alone(folder, small_job.SCRIPT, str(folder / "out"))
        return (folder / "out").read_text()

    return once(tmp_path_factory, "small", train)
