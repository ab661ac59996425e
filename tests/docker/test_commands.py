"""The commands with `docker` of the pages and of the Dockerfiles, by a real daemon; and what they make joins a run."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import docker
from tests.support.docker import Docker
from tests.support.harness import Elastic, alone
from tests.support.pages import ROOT, block_with, changed

pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.minutes,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not docker.AVAILABLE, reason=docker.WHY_NOT),
]
PAGE = ROOT / "docs" / "kubernetes.md"
JOB = ROOT / "tests" / "jobs" / "small.py"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    found = Docker(tmp_path_factory.mktemp("docker"))
    with found.serve():
        yield found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the images are built from."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("docker", "examples/kubernetes", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def header(file: Path) -> list[str]:
    """The commands with `docker` in the comment at the head of a Dockerfile."""
    found = re.findall(r"^#   (docker .*?)(?:  +.*)?$", file.read_text(), re.MULTILINE)
    assert found, file
    return found


def test_the_images_are_built_and_pushed_and_a_container_joins_a_run(
    daemon: Docker, checkout: Path, tmp_path: Path
) -> None:
    """The bits are those of one process."""
    work, pace, out = tmp_path / "work", tmp_path / "pace", tmp_path / "out"
    work.mkdir()
    shutil.copy(JOB, work / "train.py")
    (tmp_path / "files").write_text("*.py\n")
    build, build_cuda, join, _ = header(ROOT / "docker" / "Dockerfile")  # the last one takes a GPU
    for command in (build, build_cuda, block_with(PAGE, "docker push registry.example/farandole:1")):
        daemon.run(command, checkout)
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"))
    pace.write_text("0.5")
    on = ["env", "-C", str(work), *daemon.on]
    files = ["--files", str(tmp_path / "files")]
    job = (str(out), "--pace", str(pace))
    with Elastic(tmp_path / "run", Path("train.py"), *job, workers=1, options=files, on=on) as run:
        run.until_members(1)
        words = changed(join, {"FOLDER": str(run.folder)})
        with (tmp_path / "join.log").open("wb") as log:
            joiner = subprocess.Popen(
                [*daemon.on, "bash", "-c", words], env=daemon.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        run.until_members(2)
        pace.unlink()
        run.finish()
        assert joiner.wait(60) == 0, (tmp_path / "join.log").read_text()
    assert out.read_text() == (tmp_path / "expected").read_text()


def test_the_image_of_a_run_has_the_script_and_is_pushed(daemon: Docker, checkout: Path, tmp_path: Path) -> None:
    """By the page's block, and by the Dockerfile's own comment."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train.py").write_text("print('trained')\n")
    block = block_with(PAGE, "docker build -t farandole").splitlines()
    page = [line for line in block if line.startswith("docker ")]
    for command in (*page, *header(ROOT / "examples" / "kubernetes" / "Dockerfile")):
        places = re.sub(r"~/train|\bFOLDER\b", str(tmp_path / "train"), command)
        daemon.run(places, checkout)
        daemon.run("docker rmi -f registry.example/train:1", checkout)
        if "push" in places:
            shown = daemon.run("docker run --rm --entrypoint python registry.example/train:1 train.py", checkout)
            assert shown == "trained\n", "from the registry"
