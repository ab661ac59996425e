"""Datasets of Hugging Face are map-style as they are: the same bits in every process, and from their files."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farandole.data.formats.table import Table
from farandole.data.loader import Key, Loader
from farandole.plan.batch import GlobalBatch

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
ROWS = 40
KEYS = [Key(epoch=1, step=n, shard=0, start=8 * n, stop=8 * n + 8) for n in range(5)]


def picture(shade: int) -> bytes:
    import PIL.Image

    made = io.BytesIO()
    PIL.Image.new("RGB", (6, 4), (shade, 0, 255 - shade)).save(made, "PNG")
    return made.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `save_to_disk`."""
    place = tmp_path_factory.mktemp("hugging") / "saved"
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
            "text": datasets.Value("string"),
            "tokens": datasets.Sequence(datasets.Value("int32")),
        }
    )
    rows = {
        "image": [{"bytes": picture(n), "path": None} for n in range(ROWS)],
        "label": [n % 3 for n in range(ROWS)],
        "text": [f"é{n}" for n in range(ROWS)],
        "tokens": [[n, n + 1, n + 2] for n in range(ROWS)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(place), num_shards=3)
    return place


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform as their `with_transform` takes it: columns of one row."""
    [image], [tokens] = sample["image"], sample["tokens"]
    pixels = np.array(image) ^ np.uint8(random.getrandbits(8))
    return {
        "image": [torch.from_numpy(pixels).permute(2, 0, 1)],
        "label": sample["label"],
        "tokens": [torch.tensor(tokens)],
    }


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert value.stride() == wanted[name].stride()
            assert torch.equal(value, wanted[name])
        else:
            assert value == wanted[name]
    return True


@pytest.mark.processes
@pytest.mark.parametrize("what", ["transform", "torch"])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_dataset_as_it_is_gives_the_same_bits_in_loader_processes(
    saved: Path, what: str, start: str, make: Any
) -> None:
    found = datasets.load_from_disk(str(saved))
    dataset = found.with_transform(noisy) if what == "transform" else found.with_format("torch")
    here = Loader(dataset, GlobalBatch(8, micro=8), seed=5)
    expected = [here.fetch(key) for key in KEYS]
    loader = make(dataset, GlobalBatch(8, micro=8), seed=5, multiprocessing_context=start)
    loader.expect(KEYS)
    assert all(equal(loader.fetch(key), batch) for key, batch in zip(KEYS, expected, strict=True))


def test_its_files_are_a_table(saved: Path) -> None:
    theirs = datasets.load_from_disk(str(saved))
    table = Table(saved)
    assert len(table) == len(theirs) == ROWS
    assert table.class_names("label") == ("ant", "bee", "cat")
    for number in (0, 17, ROWS - 1):
        ours, wanted = table[number], theirs[number]
        assert ours["image"].tobytes() == wanted["image"].tobytes()
        assert ours["tokens"].tolist() == wanted["tokens"]
        assert (ours["label"], ours["text"]) == (wanted["label"], wanted["text"])


def test_the_parquet_files_that_it_writes_are_a_table(saved: Path, tmp_path: Path) -> None:
    datasets.load_from_disk(str(saved)).to_parquet(str(tmp_path / "train.parquet"), batch_size=7)
    table = Table(tmp_path)
    assert [table[n]["label"] for n in range(ROWS)] == [n % 3 for n in range(ROWS)]
    assert table.class_names("label") == ("ant", "bee", "cat")
    assert table[3]["image"].getpixel((0, 0)) == (3, 0, 252)
