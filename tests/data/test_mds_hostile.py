"""MDS shards made to do harm: no more is believed of an index or a shard than the shard is long."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.data.formats.mds import MDS, decoder_of
from farandole.data.loader import Key, Loader
from farandole.errors import BadSample, ShardError
from farandole.plan.batch import GlobalBatch
from tests.support import mds_files


def file(**said: Any) -> dict[str, Any]:
    return {"basename": "shard.00000.mds", "bytes": 2000, "hashes": {}} | said


@pytest.mark.parametrize(
    ("said", "message"),
    [
        *(
            ({"raw_data": file(basename=name)}, "basename ")
            for name in ("../a", "/etc/passwd", "a/../../b", "", ".a", "http://x/a", "a\0b", "x" * 201)
        ),
        ({"raw_data": file(bytes=-1)}, "bytes -1 "),
        ({"raw_data": file(bytes=1 << 50)}, r"bytes \d+ "),
        ({"samples": -1}, "-1 samples"),
        ({"samples": 1 << 40}, rf"\b{1 << 40} samples"),
        ({"column_sizes": [1]}, r"\b10\b"),
        ({"column_sizes": [-1] * 10}, r"\bcolumn_sizes\b"),
        ({"column_names": ["a"] * 10}, r"\b10\b"),
        ({"format": "json"}, r"'mds'.*\b2\b"),
        ({"compression": "br", "zip_data": file()}, "'br'.*gz, bz2, zstd"),
        ({"compression": "gz"}, r"\bcompression 'gz'.*\bzip_data None\b"),
    ],
)
def test_an_index_that_claims_what_can_not_be_is_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    mds_files.folder(tmp_path, said=said)
    with pytest.raises(ShardError, match=rf"index\.json\b.*{message}"):
        MDS(tmp_path)


@pytest.mark.parametrize("content", ["[" * 100_000, "{", '{"shards": []}', '{"shards": [{}]}'])
def test_an_index_that_is_none_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ShardError, match=r"index\.json\b"):
        MDS(tmp_path)
    with pytest.raises(ShardError, match=r"other/index\.json\b"):
        MDS(tmp_path / "other")


@pytest.mark.parametrize("pair", [(0, 0), (2, 80), (1 << 31, (1 << 32) - 1), (900, 800)])
def test_offsets_that_lead_elsewhere_are_a_bad_sample(tmp_path: Path, pair: tuple[int, int]) -> None:
    path = mds_files.folder(tmp_path) / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    struct.pack_into("<II", content, 8, *pair)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"\b1\b.*\b{pair[0]}\b.*\b{pair[1]}\b"):
            MDS(tmp_path)[1]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.failure(
    "Data and loader processes",
    "a field of a tar or MDS shard, or an image of a table, is not of its declared type or size",
)
def test_lengths_beyond_the_sample_are_a_bad_sample_that_may_be_left_out(tmp_path: Path) -> None:
    place = mds_files.write(tmp_path, [[{"x": b"1"}, {"x": b"22"}, {"x": b"3"}]], {"x": "str_int"})
    path = place / "shard.00000.mds"
    content = path.read_bytes().replace(struct.pack("<I", 2) + b"22", struct.pack("<I", 1 << 30) + b"22")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\b6 bytes.*\b1073741828\b"):
        MDS(place)[1]
    loader = Loader(MDS(place), GlobalBatch(3, micro=3), seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(Key(0, 0, 0, 0, 3))["x"].tolist() == [1, 3]
    with pytest.raises(BadSample, match=r"\b1\b.*\bMDS\b"):
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
        with pytest.raises(ShardError, match=r"shard\.00000\.mds\b.*\b\d+ bytes"):
            MDS(tmp_path)[0]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_shard_that_is_not_what_it_should_be_is_named(tmp_path: Path) -> None:
    place = mds_files.folder(tmp_path, compression="gz")
    (place / "shard.00001.mds.gz").unlink()
    with pytest.raises(ShardError, match=r"shard\.00001\.mds\.gz"):
        MDS(place)[5]
    data = (place / "shard.00002.mds.gz").read_bytes()
    (place / "shard.00002.mds.gz").write_bytes(bytes(len(data)))
    with pytest.raises(ShardError, match=r"shard\.00002\.mds\.gz"):
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
