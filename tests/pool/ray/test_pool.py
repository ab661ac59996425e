"""A run whose hosts are actors of a real Ray cluster on this machine (`tests/support/ray_cluster.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone
from tests.support.ray_cluster import RayCluster, ray_cluster

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]

JOB = Path(__file__).parents[2] / "jobs" / "small.py"
EPOCHS = ("--epochs", "60")
NODES = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster") / "home", nodes=NODES) as found:
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

    def run(self, pool: str, *options: str, workers: int = NODES, epochs: tuple[str, ...] = EPOCHS) -> Elastic:
        job = (str(self.out), "--pace", str(self.pace), *epochs)
        return Elastic(
            self.folder / "run", JOB, *job, workers=workers, deadline_s=200, options=["--pool", pool, *options]
        )

    def hurry(self) -> None:
        self.pace.unlink()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_two_hosts_train_to_the_bits_of_one_process_and_nothing_is_left(
    cluster: RayCluster, rig: Rig, expected: bytes
) -> None:
    with rig.run(f"ray,size={NODES}") as run:
        run.until_members(NODES)
        assert len(cluster.actors("ALIVE")) == NODES
        rig.hurry()
        run.finish()
        assert not run.events("lost"), run.report()
    assert rig.out.read_bytes() == expected
    assert cluster.actors() == []
    assert cluster.processes() == []
