"""Images and loaders for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.data.loader import Loader
from tests.support.drawing import BATCH
from tests.support.image_files import make_folder
from tests.support.shards import prepared


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("source"))


@pytest.fixture
def shards(source: Path, tmp_path: Path) -> Path:
    return prepared(source, str(tmp_path / "shards")) and tmp_path / "shards"


@pytest.fixture
def make() -> Iterator[Callable[..., Loader]]:
    """Loaders of two processes that end with the test."""
    made: list[Loader] = []

    def loader(dataset: Any, batch: Any = BATCH, **options: Any) -> Loader:
        made.append(Loader(dataset, batch, **{"seed": 3, "num_workers": 2, **options}))
        return made[-1]

    yield loader
    for each in made:
        each.close()
