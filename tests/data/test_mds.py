"""MDS shards: the samples that were written, compressed or not, here and elsewhere; and no more than a shard has."""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

import farandole
from farandole.data.formats.mds import MDS
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from farandole.plan.batch import GlobalBatch
from tests.support import mds_files
from tests.support.file_server import FileServer

ROWS = 15
KEYS = [Key(epoch=1, step=n, shard=0, start=5 * n, stop=5 * n + 5) for n in range(3)]


def check(sample: dict[str, Any], number: int) -> None:
    assert list(sample) == list(mds_files.COLUMNS)
    assert (sample["about"], sample["name"], sample["raw"]) == ({"n": number}, f"é{number}", bytes([number]))
    assert (sample["number"], type(sample["number"])) == (-number, int)
    assert (sample["half"], type(sample["half"])) == (number / 2, np.float32)
    assert (sample["image"].mode, sample["image"].getpixel((0, 0))) == ("L", number)
    assert (sample["pixels"].mode, sample["pixels"].size, sample["pixels"].getpixel((3, 2))) == ("L", (4, 3), number)
    for name, shape, kind in (("array", (number % 3 + 1, 2), np.int16), ("shaped", (2, 3), np.float32)):
        assert (sample[name].shape, sample[name].dtype) == (shape, kind)
        assert (sample[name] == number).all()
        assert sample[name].flags.writeable
    assert (sample["typed"].tolist(), sample["typed"].dtype) == ([number, -number], np.int16)


# --- what is in it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gz", "bz2"])
@pytest.mark.parametrize("memory_bytes", [1 << 30, 2500])
@pytest.mark.filterwarnings("ignore:.*in a shuffled order")
def test_the_samples_are_those_that_were_written(tmp_path: Path, compression: str | None, memory_bytes: int) -> None:
    samples = farandole.MDS(mds_files.folder(tmp_path, compression=compression), memory_bytes=memory_bytes)
    assert len(samples) == ROWS
    order = list(range(ROWS)) * 2
    random.Random(4).shuffle(order)
    for number in order:
        check(samples[number], number)
    check(samples[-1], ROWS - 1)
    for outside in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=f"sample {outside} of {ROWS}"):
            samples[outside]


def test_zstd_takes_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setitem(mds_files.COMPRESS, "zstd", lambda data: pa.compress(data, "zstd", asbytes=True))
    samples = MDS(mds_files.folder(tmp_path, compression="zstd"))
    for number in range(ROWS):
        check(samples[number], number)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install .*\[tables\]"):
        MDS(tmp_path)[0]


def test_columns_own_decoders_and_bytes(tmp_path: Path) -> None:
    place = mds_files.folder(tmp_path)
    assert MDS(place, columns=["raw", "name"])[2] == {"name": "é2", "raw": b"\x02"}
    assert MDS(place, lambda sample: sample["raw"], columns=["raw"], decode={"raw": list})[2] == [2]
    assert MDS(place, decode=False)[7] == mds_files.encoded(7)
    with pytest.raises(UsageError, match=r"\bnose\b.*\babout, array\b"):
        MDS(place, columns=["nose"])


@pytest.mark.failure(
    "Data and loader processes",
    "a column or field is a pickle",
    seen=(
        "for an MDS column, an error when the dataset is created, with the column and the remedy; a field of a tar "
        "stays bytes"
    ),
    outcome="nothing is ever unpickled",
)
def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    program = b"cposix\nsystem\n(S'touch was-here'\ntR."
    place = mds_files.write(tmp_path, [[{"x": program, "y": b"1"}]], {"x": "pkl", "y": "bytes"})
    with pytest.raises(UsageError, match=r"'x'.*\bpickle\b"):
        MDS(place)
    assert MDS(place, columns=["y"])[0] == {"y": b"1"}
    assert MDS(place, decode={"x": len})[0] == {"x": len(program), "y": b"1"}
    place = mds_files.write(tmp_path, [[{"x": b""}]], {"x": "list[jpeg]"})
    with pytest.raises(UsageError, match=r"list\[jpeg\]"):
        MDS(place)


# --- elsewhere, and in loader processes -----------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gz"])
def test_with_an_md5_a_shard_is_fetched_once_into_the_cache(tmp_path: Path, compression: str | None) -> None:
    place = mds_files.folder(tmp_path / "mds", compression=compression, md5=True)
    with FileServer(place) as server:
        for _ in range(2):
            samples = MDS(server.url, cache=tmp_path / "cache")
            for number in (14, 0, 7, 1):
                check(samples[number], number)
    assert {count for name, count in server.gets.items() if "shard" in name} == {1}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Any:
    store = fsspec.filesystem("memory")
    store.put(str(mds_files.folder(tmp_path / "mds")) + "/", "/mds", recursive=True)
    yield store
    store.rm("/mds", recursive=True)


def test_without_one_it_is_taken_into_memory_and_nothing_shows_in_what_a_sample_draws(
    elsewhere: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = type(elsewhere).cat_file

    def drawing(self: Any, *arguments: Any, **options: Any) -> Any:
        random.random()
        return reads(self, *arguments, **options)

    monkeypatch.setattr(type(elsewhere), "cat_file", drawing)
    state = random.getstate()
    samples = MDS("memory://mds", cache=tmp_path / "cache")
    for number in range(ROWS):
        check(samples[number], number)
    assert random.getstate() == state
    with pytest.warns(UserWarning, match=r"\b\d+ bytes.*memory_bytes\b.*\b2500\b"):
        MDS("memory://mds", memory_bytes=2500)
    with pytest.warns(UserWarning, match=r"\bmemory_bytes\b.*\b9\b"), pytest.raises(UsageError, match="memory_bytes"):
        MDS("memory://mds", memory_bytes=9)[0]


def _noisy(sample: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(sample["shaped"] + random.random())


@pytest.mark.processes
@pytest.mark.parametrize("compression", [None, "gz"])
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_bits_are_the_same_in_loader_processes(
    tmp_path: Path, compression: str | None, start: str, make: Any
) -> None:
    place = mds_files.folder(tmp_path, compression=compression)
    here = Loader(MDS(place, _noisy), GlobalBatch(5, micro=5), seed=5)
    expected = [here.fetch(key) for key in KEYS]
    samples = MDS(place, _noisy)
    assert samples[3] is not None  # open in this process when the others are started
    loader = make(samples, GlobalBatch(5, micro=5), seed=5, multiprocessing_context=start)
    loader.expect(KEYS)
    assert all(torch.equal(loader.fetch(key), batch) for key, batch in zip(KEYS, expected, strict=True))


def test_it_travels_without_what_it_holds(tmp_path: Path) -> None:
    samples = MDS(mds_files.folder(tmp_path, compression="gz"))
    fresh = len(pickle.dumps(samples))
    check(samples[3], 3)
    assert len(pickle.dumps(samples)) == fresh
    check(pickle.loads(pickle.dumps(samples))[3], 3)
