from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ray_cluster import RayCluster, ray_cluster

NODES = 2


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("cluster") / "home", nodes=NODES) as found:
        yield found


@pytest.fixture
def cluster(shared: RayCluster) -> RayCluster:
    """With `NODES` nodes."""
    shared.restore()
    return shared
