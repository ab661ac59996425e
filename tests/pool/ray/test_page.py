"""The commands of docs/ray.md, as a shell executes them, on a real cluster.

Only names and sizes are changed: fewer hosts, no GPUs, the address of this cluster, a folder of this test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON
from tests.support.harness import read_lines
from tests.support.pages import ROOT, block_with, changed, readme_script
from tests.support.ray_cluster import OF_JOBS, RayCluster, ray_cluster

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]
PAGE = ROOT / "docs" / "ray.md"


def fingerprint(folder: Path, command: str) -> str:
    """Execute a command in a folder. It must succeed. Returns the fingerprint that it prints."""
    environ = {**ENVIRON, "PATH": f"{os.path.dirname(sys.executable)}:{ENVIRON['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=200
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return re.findall(r"fingerprint of the weights: (\S+)", printed)[0]


def check(work: Path, command: str, folder: Path) -> None:
    """Execute a command with the README's script. It must train to the bits of one process, and save in the folder."""
    work.mkdir()
    (work / "train.py").write_text(changed(readme_script(), {"epochs=20": "epochs=2"}))
    assert fingerprint(work, command) == fingerprint(work, "python train.py")
    assert [line for line in read_lines(folder) if line.get("event") == "host"]
    assert list((folder / "checkpoints").glob("step-*.pt"))


def page_lines() -> list[str]:
    """The line for a node, and the one for a job."""
    return changed(block_with(PAGE, "ray job submit"), {"size=8,num_gpus=1": "size=2"}).splitlines()


def test_a_run_on_a_node_trains_to_the_bits_of_one_process(cluster: RayCluster, tmp_path: Path) -> None:
    check(tmp_path / "work", page_lines()[0], tmp_path / "work" / "runs" / "mine")
    assert cluster.actors() == []


@pytest.mark.skipif(not all(map(find_spec, OF_JOBS)), reason="Ray's job server needs the packages of ray[default]")
def test_a_job_of_ray_trains_to_the_bits_of_one_process(tmp_path: Path) -> None:
    with ray_cluster(tmp_path / "home", nodes=2, dashboard=True) as cluster:
        here = {"http://HEAD:8265": cluster.dashboard, "/shared": str(tmp_path)}
        check(tmp_path / "work", changed(page_lines()[1], here), tmp_path / "runs" / "mine")
