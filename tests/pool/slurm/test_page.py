"""The commands of docs/slurm.md, as a shell executes them, on a real Slurm.

Only names and sizes are changed: the partitions of this cluster, fewer nodes and CPUs, no GPUs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON
from tests.support.harness import members, read_lines
from tests.support.pages import ROOT, block_with, changed, readme_script
from tests.support.slurm import Slurm, slurm, until

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]
PAGE = ROOT / "docs" / "slurm.md"
SMALLER = {"size=8": "size=2", "partition=spot": "partition=low"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("cluster")) as found:
        Path(ENVIRON["HOME"], "train").symlink_to(sys.prefix)  # as the page installs it
        yield found


@pytest.fixture
def runs(cluster: Slurm) -> Iterator[Path]:
    """The folder for the runs of one test. At the end no job is left."""
    folder = Path(ENVIRON["HOME"], "runs")
    folder.mkdir()
    yield folder
    until(lambda: cluster.jobs() == {}, "the end of all jobs")
    folder.rename(folder.with_name(f"runs-{len(list(folder.parent.iterdir()))}"))


def shell(folder: Path, text: str, epochs: str = "2") -> str:
    """Execute the lines in a folder with the README's script. It must succeed. Returns what it has printed."""
    (folder / "train.py").write_text(changed(readme_script(), {"epochs=20": f"epochs={epochs}"}))
    script = f"set -e\nsource ~/train/bin/activate\n{text}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=ENVIRON, capture_output=True, text=True, check=False, timeout=200
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return printed


def fingerprint(printed: str) -> str:
    return re.findall(r"fingerprint of the weights: (\S+)", printed)[0]


def test_jobs_of_its_own_and_an_allocation_train_to_the_bits_of_one_process(runs: Path, tmp_path: Path) -> None:
    jobs = block_with(PAGE, "cpus=4")
    salloc, nodes = block_with(PAGE, "salloc").splitlines()
    allocation = changed(salloc, {"--nodes=4": "--nodes=2", " --gres=gpu:8": ""})
    inside = changed(nodes, {",slots=8": "", "run ": f"run --folder {runs}/inside "})
    found = [
        fingerprint(shell(tmp_path, commands))
        for commands in (
            "python train.py",
            changed(jobs, {**SMALLER, "cpus=4": "cpus=1"}),
            f"{allocation} <<'END'\n{inside}\nEND\n",
        )
    ]
    assert len(set(found)) == 1
    assert [hosts(runs / name) for name in ("mine", "inside")] == [2, 2]
    assert list((runs / "mine/checkpoints").glob("step-*.pt"))


def test_the_batch_script_saves_at_slurm_s_signal_and_goes_on_when_it_is_submitted_again(
    cluster: Slurm, runs: Path, tmp_path: Path
) -> None:
    here: Mapping[str, str] = {**SMALLER, "--partition=long": "--partition=high", ",gres=gpu:1": "", " --mem=2G": ""}
    script = changed(block_with(PAGE, "#SBATCH"), here)
    (tmp_path / "run.sh").write_text(script)
    shell(tmp_path, "sbatch run.sh", epochs="100_000")
    until(lambda: len(members(runs / "mine")) == 2, "both workers")
    shell(tmp_path, block_with(PAGE, "squeue"), epochs="100_000")
    cluster.run("scancel", "--signal=TERM", "--batch", driver(cluster))
    until(lambda: cluster.jobs() == {}, "the end of all jobs", 120)
    assert list((runs / "mine/checkpoints").glob("step-*.pt"))
    steps = last_step(runs / "mine")
    shell(tmp_path, "sbatch run.sh", epochs="100_000")
    until(lambda: last_step(runs / "mine") > steps, "a later step")
    cluster.run("scancel", "--signal=TERM", "--batch", driver(cluster))


def driver(cluster: Slurm) -> str:
    """The job of `farandole run` itself, by the name that the script gives it."""
    return cluster.run("squeue", "-h", "--name=mine", "-o", "%i").strip()


def hosts(folder: Path) -> int:
    return len({line["host"] for line in read_lines(folder) if line.get("event") == "host"})


def last_step(folder: Path) -> int:
    return max((line["step"] for line in read_lines(folder) if "loss" in line), default=-1)
