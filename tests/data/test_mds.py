"""MDS shards: the samples that were written, compressed or not, here and elsewhere; and no more than a shard has."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole
from farandole.data.loader import Key, Loader
from farandole.data.mds import MDS
from farandole.data.mds_values import decoder_of
from farandole.errors import BadSample, ShardError, UsageError
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
    with pytest.raises(UsageError, match=r'pip install "farandole\[tables\]"'):
        MDS(tmp_path)[0]


def test_columns_own_decoders_and_bytes(tmp_path: Path) -> None:
    place = mds_files.folder(tmp_path)
    assert MDS(place, columns=["raw", "name"])[2] == {"name": "é2", "raw": b"\x02"}
    assert MDS(place, lambda sample: sample["raw"], columns=["raw"], decode={"raw": list})[2] == [2]
    assert MDS(place, decode=False)[7] == mds_files.encoded(7)
    with pytest.raises(UsageError, match="has no column nose; it has about, array"):
        MDS(place, columns=["nose"])


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    program = b"cposix\nsystem\n(S'touch was-here'\ntR."
    place = mds_files.write(tmp_path, [[{"x": program, "y": b"1"}]], {"x": "pkl", "y": "bytes"})
    with pytest.raises(UsageError, match=r"column 'x' of .* is a pickle, which can run any program; name the columns"):
        MDS(place)
    assert MDS(place, columns=["y"])[0] == {"y": b"1"}
    assert MDS(place, decode={"x": len})[0] == {"x": len(program), "y": b"1"}
    place = mds_files.write(tmp_path, [[{"x": b""}]], {"x": "list[jpeg]"})
    with pytest.raises(UsageError, match=r"is of an encoding that is not read, list\[jpeg\]"):
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
    with pytest.warns(UserWarning, match=r"takes \d+ bytes where memory_bytes is 2500: .*raise memory_bytes"):
        MDS("memory://mds", memory_bytes=2500)
    with pytest.warns(UserWarning, match="memory_bytes is 9"), pytest.raises(UsageError, match="of memory, and memory"):
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


# --- what a stranger may write --------------------------------------------------------------------------------------


def file(**said: Any) -> dict[str, Any]:
    return {"basename": "shard.00000.mds", "bytes": 2000, "hashes": {}} | said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(
            ({"raw_data": file(basename=name)}, r"basename .* is not that of a file below the index")
            for name in ("../a", "/etc/passwd", "a/../../b", "", ".a", "http://x/a", "a\0b", "x" * 201)
        ),
        ({"raw_data": file(bytes=-1)}, r"bytes -1 of .* is not from 0"),
        ({"raw_data": file(bytes=1 << 50)}, r"bytes \d+ of .* is not from 0"),
        ({"samples": -1}, "too few for -1 samples"),
        ({"samples": 1 << 40}, "too few for"),
        ({"column_sizes": [1]}, "and encodings and sizes of others"),
        ({"column_sizes": [-1] * 10}, "has column_sizes"),
        ({"column_names": ["a"] * 10}, "encodings and sizes of others"),
        ({"format": "json"}, "only 'mds', version 2, is read"),
        ({"compression": "br", "zip_data": file()}, "is compressed with 'br': of those gz, bz2, zstd are read"),
        ({"compression": "gz"}, "compression 'gz' and zip_data None"),
    ],
)
def test_an_index_that_claims_what_can_not_be_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    mds_files.folder(tmp_path, said=said)
    with pytest.raises(ShardError, match=f"index.json is no index of MDS shards: .*{message}"):
        MDS(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", '{"shards": []}', '{"shards": [{}]}'])
def test_an_index_that_is_none_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ShardError, match=r"is no index of MDS shards|names no samples"):
        MDS(tmp_path)
    with pytest.raises(ShardError, match=r"index\.json is not there"):
        MDS(tmp_path / "other")


@pytest.mark.parametrize("pair", [(0, 0), (2, 80), (1 << 31, (1 << 32) - 1), (900, 800)])
def test_offsets_that_lead_elsewhere_are_a_bad_sample(tmp_path: Path, pair: tuple[int, int]) -> None:
    path = mds_files.folder(tmp_path) / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    struct.pack_into("<II", content, 8, *pair)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"its sample 1 lies from {pair[0]} to {pair[1]}, where there is none"):
            MDS(tmp_path)[1]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_lengths_beyond_the_sample_are_a_bad_sample_that_may_be_left_out(tmp_path: Path) -> None:
    place = mds_files.write(tmp_path, [[{"x": b"1"}, {"x": b"22"}, {"x": b"3"}]], {"x": "str_int"})
    path = place / "shard.00000.mds"
    content = path.read_bytes().replace(struct.pack("<I", 2) + b"22", struct.pack("<I", 1 << 30) + b"22")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a sample of 6 bytes, whose columns take 1073741828"):
        MDS(place)[1]
    loader = Loader(MDS(place), GlobalBatch(3, micro=3), seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(Key(0, 0, 0, 0, 3))["x"].tolist() == [1, 3]
    with pytest.raises(BadSample, match="sample 1 of MDS"):
        Loader(MDS(place), GlobalBatch(3, micro=3), seed=0, shuffle=False).fetch(Key(0, 0, 0, 0, 3))


def test_a_bomb_is_decompressed_no_further_than_it_said(tmp_path: Path) -> None:
    mds_files.folder(tmp_path, compression="gz")
    bomb = mds_files.COMPRESS["gz"](bytes(64 << 20))
    (tmp_path / "shard.00000.mds.gz").write_bytes(bomb)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["zip_data"]["bytes"] = len(bomb)
    (tmp_path / "index.json").write_text(json.dumps(index))
    tracemalloc.start()
    try:
        with pytest.raises(ShardError, match=r"is damaged: it holds \d+ bytes or more, where the index says"):
            MDS(tmp_path)[0]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_shard_that_is_not_what_it_should_be_is_named(tmp_path: Path) -> None:
    place = mds_files.folder(tmp_path, compression="gz")
    (place / "shard.00001.mds.gz").unlink()
    with pytest.raises(ShardError, match=r"shard.00001.mds.gz is missing"):
        MDS(place)[5]
    data = (place / "shard.00002.mds.gz").read_bytes()
    (place / "shard.00002.mds.gz").write_bytes(bytes(len(data)))
    with pytest.raises(ShardError, match=r"shard.00002.mds.gz is damaged: it can't be decompressed"):
        MDS(place)[10]


ENCODINGS = [*mds_files.COLUMNS.values(), "jpeg", "str_int", "str_float", "str_decimal", "float16", "ndarray:uint8"]


@settings(max_examples=300)
@given(
    encoding=st.sampled_from(ENCODINGS),
    data=st.binary(max_size=100),
    seed=st.none() | st.sampled_from([*mds_files.COLUMNS]),
)
def test_any_bytes_are_a_value_or_an_error(encoding: str, data: bytes, seed: str | None) -> None:
    decoder = decoder_of(encoding)
    assert decoder is not None
    with contextlib.suppress(
        ValueError, OSError, SyntaxError, PIL.UnidentifiedImageError, PIL.Image.DecompressionBombError
    ):
        decoder(data if seed is None else mds_files.encoded(3)[seed][:50] + data)


@pytest.mark.parametrize("encoding", ["", "pkl", "x", "ndarray:object", "ndarray:int16:a", "int:3", "str:utf8"])
def test_encodings_that_are_none_have_no_decoder(encoding: str) -> None:
    assert decoder_of(encoding) is None


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_shards_are_samples_or_errors_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = mds_files.folder(tmp_path_factory.mktemp("damaged"))
    path = place / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    samples = MDS(place, columns=[name for name in mds_files.COLUMNS if name != "image"])
    for number in range(5):
        with contextlib.suppress(ShardError, ValueError):
            samples[number]
