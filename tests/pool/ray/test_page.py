"""The commands of docs/ray.md, as a shell executes them, on a real cluster.

Only names and sizes are changed: fewer hosts, no GPUs, the address of this cluster, a folder of this test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON
from tests.support.harness import read_lines
from tests.support.pages import ROOT, block_with, changed, readme_script
from tests.support.ray_cluster import OF_JOBS, ray_cluster

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


@pytest.mark.skipif(not all(map(find_spec, OF_JOBS)), reason="Ray's job server needs the packages of ray[default]")
def test_a_run_on_a_node_and_a_job_of_ray_train_to_the_bits_of_one_process(tmp_path: Path) -> None:
    work, shared = tmp_path / "work", tmp_path / "shared"
    work.mkdir()
    (work / "train.py").write_text(changed(readme_script(), {"epochs=20": "epochs=2"}))
    on_a_node, as_a_job = block_with(PAGE, "ray job submit").splitlines()
    smaller: Mapping[str, str] = {"size=8,num_gpus=1": "size=2"}
    with ray_cluster(tmp_path / "home", nodes=2, dashboard=True) as cluster:
        here = {**smaller, "http://HEAD:8265": cluster.dashboard, "/shared": str(shared)}
        commands = ("python train.py", changed(on_a_node, smaller), changed(as_a_job, here))
        assert len({fingerprint(work, command) for command in commands}) == 1
        assert cluster.actors() == []
    for folder in (work / "runs" / "mine", shared / "runs" / "mine"):
        assert len({line["host"] for line in read_lines(folder) if line.get("event") == "host"}) >= 1
        assert list((folder / "checkpoints").glob("step-*.pt"))
