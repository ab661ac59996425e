from __future__ import annotations

import pytest

from tests.support.cluster_run import EPOCHS, JOB
from tests.support.harness import alone


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the job of `tests/support/cluster_run.py` writes as a single process."""
    folder = tmp_path_factory.mktemp("alone")
    alone(folder / "one", JOB, str(folder / "out"), *EPOCHS)
    return (folder / "out").read_bytes()
