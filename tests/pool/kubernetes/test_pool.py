"""A run whose hosts are pods of a cluster that this process plays (`tests/support/kubernetes.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone
from tests.support.kubernetes import IMAGE, NAMESPACE, Cluster, kubernetes, names

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]

JOB = Path(__file__).parents[2] / "jobs" / "small.py"
EPOCHS = ("--epochs", "60")
NODES = 2


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path, NODES) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bits of a world of one."""
    folder = tmp_path_factory.mktemp("alone")
    alone(folder / "one", JOB, str(folder / "out"), *EPOCHS)
    return (folder / "out").read_bytes()


class Rig:
    """A run with a pace that `hurry` takes away."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.pace = folder, folder / "out", folder / "pace"
        self.pace.write_text("0.2")

    def run(self, *keys: str, workers: int = NODES, options: tuple[str, ...] = (), epochs: str = EPOCHS[1]) -> Elastic:
        job = (str(self.out), "--pace", str(self.pace), "--epochs", epochs)
        pool = ",".join(("kubernetes", f"namespace={NAMESPACE}", f"image={IMAGE}", f"size={workers}", *keys))
        return Elastic(
            self.folder / "run", JOB, *job, workers=workers, deadline_s=200, options=["--pool", pool, *options]
        )

    def hurry(self) -> None:
        self.pace.unlink()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def nothing_is_left(cluster: Cluster) -> bool:
    return not (names(cluster.pods()) or cluster.secrets() or cluster.processes())


def test_two_pods_train_to_the_same_bits_and_nothing_is_left(cluster: Cluster, rig: Rig, expected: bytes) -> None:
    rig.hurry()
    with rig.run() as run:
        run.finish()
        assert len([event for event in run.events("host") if event["state"] == "joined"]) == NODES
    assert rig.out.read_bytes() == expected
    assert nothing_is_left(cluster)
