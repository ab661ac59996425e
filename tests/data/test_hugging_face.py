"""Datasets of Hugging Face are map-style as they are: the same bits in every process, and from their files."""

from __future__ import annotations

import importlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farandole.data.formats.table import Table
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
ROWS = 40
EXHAUSTED = "all_exhausted_without_replacement"
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


def rows(parts: int) -> Any:
    return datasets.Dataset.from_dict({"n": list(range(ROWS * 20))}).to_iterable_dataset(num_shards=parts)


def plus(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": sample["n"] + random.random()}


STREAMS = {
    "plain": lambda: rows(4),
    "mapped": lambda: rows(4).map(plus),
    "torch": lambda: rows(1).with_format("torch"),
    "batched": lambda: (
        rows(3).map(lambda columns: columns, batched=True, batch_size=7).filter(lambda row: row["n"] >= 0)
    ),
    "shuffled": lambda: rows(4).shuffle(seed=9, buffer_size=50),
    "mixed": lambda: datasets.interleave_datasets([rows(2).take(400), rows(3).skip(400)], stopping_strategy=EXHAUSTED),
}


@pytest.mark.failure(
    "Data and loader processes",
    (
        "the state of an iterable dataset leads to other samples, as for a shuffle buffer whose content is not in the "
        "state"
    ),
)
@pytest.mark.processes
@pytest.mark.parametrize("make_stream", STREAMS.values(), ids=STREAMS)
def test_a_stream_of_theirs(make_stream: Any, make: Any) -> None:
    """Each sample once an epoch, in another order each if it is shuffled, and the same for one that begins later."""
    options: dict[str, Any] = {
        "seed": 5,
        "samples": ROWS * 20,
        "collate_fn": lambda rows: [float(r["n"]) for r in rows],
    }
    policy = GlobalBatch(32, micro=16)
    keys = [Key(epoch, at // 32, at % 32 // 16, at, at + 16) for epoch in (0, 1) for at in range(0, ROWS * 20, 16)]
    here = Loader(make_stream(), policy, **options)
    batches = {key: here.fetch(key) for key in keys}
    epochs = [[n for key, batch in batches.items() if key.epoch == e for n in batch] for e in (0, 1)]
    assert [sorted(map(int, epoch)) for epoch in epochs] == [list(range(ROWS * 20))] * 2
    shuffled = make_stream is STREAMS["shuffled"]
    assert ([*map(int, epochs[0])] != [*map(int, epochs[1])]) is shuffled
    joiner = Loader(make_stream(), policy, **options)
    assert here.stream is not None
    assert joiner.stream is not None
    joiner.stream.learn([here.stream.mark(1, 600)])
    for key in (keys[90], keys[5], keys[75]):
        assert joiner.fetch(key) == batches[key]
    assert joiner.stream._seeks is not shuffled, "a shuffle buffer is no part of their state"
    process = make(make_stream(), policy, num_workers=1, **options)
    process.expect(keys)
    assert [process.fetch(key) for key in keys] == [*batches.values()]


def test_a_part_of_a_stream_of_theirs_is_refused() -> None:
    part = importlib.import_module("datasets.distributed").split_dataset_by_node(rows(4), rank=1, world_size=2)
    with pytest.raises(UsageError):
        Loader(part, GlobalBatch(8, micro=8), seed=5, samples=ROWS * 10)


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
