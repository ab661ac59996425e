"""The commands of docs/kubernetes.md, as a shell executes them: the real `kubectl`, and a cluster that is empty.

Only names and sizes are changed: fewer pods, an address of this machine, a folder in place of a bucket.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON
from tests.support.harness import members
from tests.support.kubernetes import Cluster, kubernetes, names, until
from tests.support.pages import ROOT, block_with, changed, readme_script


def _client() -> tuple[int, int]:
    """The version of the installed kubectl; (0, 0) without one."""
    if not shutil.which("kubectl"):
        return 0, 0
    version = json.loads(subprocess.check_output(["kubectl", "version", "--client", "-o", "json"]))["clientVersion"]
    return int(version["major"]), int(version["minor"].rstrip("+"))


pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.timeout(280),
    pytest.mark.skipif(_client() < (1, 31), reason="this takes kubectl 1.31 or newer"),  # which uses WebSockets
]
PAGE, EXAMPLES = ROOT / "docs" / "kubernetes.md", ROOT / "examples" / "kubernetes"
TRAIN = "registry.example/train:1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path, nodes=4, empty=True) as found:
        found.images.add(TRAIN)
        yield found


@pytest.fixture
def checkout(cluster: Cluster, tmp_path: Path) -> Path:
    """A folder with the examples, and the README's script. The image has the script too."""
    folder = tmp_path / "checkout"
    shutil.copytree(EXAMPLES, folder / "examples" / "kubernetes")
    for place in (folder, cluster.folder / "root"):
        (place / "train.py").write_text(changed(readme_script(), {"epochs=20": "epochs=100_000"}))
    return folder


class Shell:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.environ = {**ENVIRON, "PATH": f"{cluster.folder / 'bin'}:{ENVIRON['PATH']}"}
        self.admin = {**self.environ, "KUBECONFIG": str(cluster.admin)}
        self.folder = folder

    def run(self, text: str) -> str:
        """Execute the lines as an administrator of the cluster. All must succeed. Returns what they have printed."""
        done = subprocess.run(
            ["bash", "-e", "-c", text], cwd=self.folder, env=self.admin, capture_output=True, text=True, check=False,
            timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_a_run_from_outside_has_its_namespace_account_pods_and_secret(cluster: Cluster, checkout: Path) -> None:
    shell = Shell(cluster, checkout)
    assert "namespace/ml created" in shell.run(block_with(PAGE, "kubectl create namespace"))
    smaller = {"10.0.0.5": "127.0.0.1", "s3://bucket/mine": "checkpoints", "size=8,gpus=1": "size=2,grace=5"}
    command = changed(block_with(PAGE, "size=8,gpus=1"), {**smaller, "run ": "run --folder run "})
    with (checkout / "out").open("wb") as output:
        run = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=checkout, env=shell.environ, stdout=output, stderr=output
        )
    try:
        until(lambda: len(members(checkout / "run")) == 2 or run.poll() is not None, "both workers", 120)
        assert run.poll() is None, (checkout / "out").read_text()
        pods = shell.run(block_with(PAGE, "get pods -l"))
        assert len([line for line in pods.splitlines() if line.startswith("farandole-")]) == 2
        assert "joined" in shell.run(f"kubectl --namespace ml logs {next(iter(names(cluster.pods())))}")
        run.kill()
        run.wait()
        get, delete = block_with(PAGE, "delete secret").splitlines()
        [secret] = cluster.secrets()
        assert secret in shell.run(get)
        shell.run(changed(delete, {"farandole-5c12d0ef2cdc3fc7": secret}))
        until(lambda: not cluster.pods() and not cluster.processes(), "the end of its pods, after their grace")
    finally:
        run.kill()
        run.wait()


def test_the_run_in_the_cluster_is_watched_and_stopped(cluster: Cluster, checkout: Path) -> None:
    shell = Shell(cluster, checkout)
    shell.run(block_with(PAGE, "kubectl create namespace"))
    coordinator = checkout / "examples/kubernetes/coordinator.yaml"
    listens = "coordinator.farandole.ml.svc.cluster.local:4000"
    here = {listens: "127.0.0.1", "s3://bucket/mine": "/runs/checkpoints", "size=8": "size=2"}
    coordinator.write_text(changed(coordinator.read_text(), here))
    [_, _, apply, follow, status, stop] = block_with(PAGE, "job/farandole").splitlines()
    applied = shell.run(apply)
    assert "role.rbac.authorization.k8s.io/farandole unchanged" in applied
    assert "job.batch/farandole created" in applied
    until(lambda: len(members(cluster.folder / "claims/farandole/mine")) == 2, "both workers", 120)
    assert shell.run(status).count(" member ") == 2
    with (checkout / "followed").open("wb") as output:
        following = subprocess.Popen(["bash", "-c", f"exec {follow}"], env=shell.admin, stdout=output, stderr=output)
    try:
        shell.run(stop)
        assert following.wait(60) == 0
    finally:
        following.kill()
        following.wait()
    assert "checkpoints" in (checkout / "followed").read_text()
    until(lambda: not names(cluster.secrets()), "the end of its Secret")
    assert list((cluster.folder / "claims/farandole/checkpoints").glob("step-*.pt"))
