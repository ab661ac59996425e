"""Tars with any fields: samples as they were written, decoded by their names, the same in every process."""

from __future__ import annotations

import contextlib
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole
from attack import files
from farandole.data.formats.webdataset import WebDataset
from farandole.data.loader import Key, Loader
from farandole.errors import BadSample, ShardError
from farandole.plan.batch import GlobalBatch
from tests.support import tars
from tests.support.file_server import FileServer
from tests.support.s3_server import S3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tars.folder(tmp_path_factory.mktemp("tars"))


# --- what is in it --------------------------------------------------------------------------------------------------


def test_in_bytes_the_samples_are_those_that_were_written(folder: Path) -> None:
    found = WebDataset(folder, decode=False)
    assert len(found) == 12
    for number in range(12):
        key, fields = tars.sample(number)
        assert found[number] == {"__key__": key, **fields}
    assert found[-1] == found[11]
    for outside in (12, -13):
        with pytest.raises(IndexError, match=f"sample {outside} of 12"):
            found[outside]


def test_fields_are_decoded_by_their_names(folder: Path) -> None:
    found = farandole.WebDataset(folder)[7]
    assert (found["cls"], found["txt"], found["json"], found["bin"]) == (7, "é7", {"number": 7}, b"\x07\x00\xff")
    assert found["npy"].dtype == np.float32
    assert found["npy"].tolist() == [[7, 7, 7]] * 2
    assert (found["seg.png"].mode, found["seg.png"].size) == ("RGB", (6, 4))


def test_some_fields_own_decoders_and_a_transform(folder: Path) -> None:
    found = WebDataset(
        folder,
        fields=["cls", "seg.png"],
        decode={"seg.png": len, "cls": float},
        transform=lambda sample: [*sample.items()],
    )
    assert found[3] == [("__key__", "folder.d/0003"), ("seg.png", len(tars.picture(3))), ("cls", 3.0)]
    with pytest.raises(ValueError, match=r"'folder\.d/0002'.*part-000\.tar\b.*\bjpg\b.*seg\.png, cls, txt"):
        WebDataset(folder, fields=["jpg"])[2]


def test_what_webdataset_s_own_writer_wrote_is_read_as_its_own_reader_does(tmp_path: Path) -> None:
    import webdataset
    from webdataset.tariterators import group_by_keys, tar_file_iterator

    with webdataset.TarWriter(str(tmp_path / "theirs.tar")) as writer:
        for number in range(5):
            key, fields = tars.sample(number)
            writer.write({"__key__": key, **fields})
    tars.make_index(tmp_path)
    ours = WebDataset(tmp_path, decode=False)
    with (tmp_path / "theirs.tar").open("rb") as file:
        parts = [{**part, "__url__": "theirs"} for part in tar_file_iterator(file)]
    theirs = list(group_by_keys(parts))
    assert [ours[n] for n in range(len(ours))] == [
        {name: value for name, value in each.items() if name not in ("__url__", "__local_path__")} for each in theirs
    ]


def test_the_index_may_lie_elsewhere_and_nothing_is_copied_twice(folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "elsewhere.json"
    index.write_bytes((folder / "index.json").read_bytes())
    with FileServer(folder) as server:
        found = WebDataset(server.url, index=index, cache=tmp_path / "cache", decode=False)
        order = list(range(12)) * 2
        random.Random(1).shuffle(order)
        for number in order:
            assert found[number]["cls"] == str(number).encode()
    assert server.gets == {"part-000.tar": 1, "part-001.tar": 1, "part-002.tar": 1}


# --- in loader processes --------------------------------------------------------------------------------------------


def _noisy(sample: dict[str, Any]) -> dict[str, Any]:
    pixels = bytes(byte ^ random.getrandbits(1) for byte in sample["seg.png"].tobytes())
    return {
        "key": sample["__key__"],
        "image": torch.frombuffer(bytearray(pixels), dtype=torch.uint8),
        "npy": sample["npy"],
        "cls": sample["cls"],
        "txt": sample["txt"],
    }


KEYS = [Key(epoch=1, step=n, shard=0, start=4 * n, stop=4 * n + 4) for n in range(3)]


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert found.keys() == expected.keys()
    return all(
        torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name]
        for name, value in found.items()
    )


@pytest.mark.processes
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_bits_are_the_same_in_loader_processes(folder: Path, start: str, make: Any) -> None:
    here = Loader(WebDataset(folder, transform=_noisy), GlobalBatch(4, micro=4), seed=5)
    expected = [here.fetch(key) for key in KEYS]
    dataset = WebDataset(folder, transform=_noisy)
    dataset.read(0)  # open in this process when the others are started
    loader = make(dataset, GlobalBatch(4, micro=4), seed=5, multiprocessing_context=start)
    loader.expect(KEYS)
    assert all(equal(loader.fetch(key), batch) for key, batch in zip(KEYS, expected, strict=True))


@pytest.mark.world
@pytest.mark.processes
def test_from_s3_the_bits_are_those_of_the_folder(s3: S3, folder: Path, tmp_path: Path) -> None:
    del s3
    for path in folder.iterdir():
        fsspec.filesystem("s3").put_file(str(path), f"bucket/tars/{path.name}")
    remote = WebDataset("s3://bucket/tars", cache=tmp_path / "cache", decode=False)
    here = WebDataset(folder, decode=False)
    assert [remote[n] for n in range(12)] == [here[n] for n in range(12)]


def test_it_travels_without_what_it_holds_open(folder: Path) -> None:
    found = WebDataset(folder)
    fresh = len(pickle.dumps(found))
    assert found[0]["cls"] == 0
    assert len(pickle.dumps(found)) == fresh
    assert pickle.loads(pickle.dumps(found))[5]["cls"] == 5


# --- what a stranger's tar may hold ---------------------------------------------------------------------------------


@pytest.mark.failure(
    "Data and loader processes",
    "a field of a tar or MDS shard, or an image of a table, is not of its declared type or size",
    seen="a bad sample, with its key or column and the reason",
    outcome="as for `on_bad_sample`; no memory is allocated beyond the size of the file",
)
def test_a_field_that_is_not_what_it_says_is_a_bad_sample_that_is_named(tmp_path: Path) -> None:
    tars.write(tmp_path / "a.tar", [("x", {"cls": b"1"}), ("y", {"cls": b"one"}), ("z", {"cls": b"3"})])
    tars.make_index(tmp_path)
    found = WebDataset(tmp_path)
    batch, key = GlobalBatch(3, micro=3), Key(0, 0, 0, 0, 3)
    with pytest.raises(BadSample, match=r"\b1\b.*\bWebDataset\b.*ValueError\b.*\bcls\b.*'y'"):
        Loader(found, batch, seed=0, shuffle=False).fetch(key)
    loader = Loader(found, batch, seed=0, shuffle=False, on_bad_sample="skip")
    assert loader.fetch(key)["cls"].tolist() == [1, 3]


@pytest.mark.failure("Data and loader processes", "a column or field is a pickle")
@pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "pt", "pth"])
def test_pickles_stay_bytes(tmp_path: Path, name: str) -> None:
    program = b"cposix\nsystem\n(S'touch was-here'\ntR."
    tars.write(tmp_path / "a.tar", [("x", {name: program})])
    tars.make_index(tmp_path)
    assert WebDataset(tmp_path)[0] == {"__key__": "x", name: program}


@pytest.mark.failure(
    "Data and loader processes",
    "a field of a tar or MDS shard, or an image of a table, is not of its declared type or size",
)
@pytest.mark.parametrize("behind", [0, 2])
def test_a_field_of_more_than_the_tar_is_a_bad_sample_and_so_are_those_behind_it(tmp_path: Path, behind: int) -> None:
    found = WebDataset(files.claimed_image(tmp_path, 2, behind), decode=False)
    tracemalloc.start()
    try:
        assert [found[n]["cls"] for n in range(2)] == [b"0", b"0"]
        for number in range(2, 3 + behind):
            with pytest.raises(ValueError, match=r"/shard\.tar\b"):
                found[number]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(20)
def test_an_entry_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"'b\.jpg'"):
        WebDataset(files.leading_back(tmp_path))[0]


@pytest.mark.parametrize("said", [3, 1 << 50])
def test_an_index_that_promises_other_numbers_of_samples_takes_no_memory_for_them(tmp_path: Path, said: int) -> None:
    found = WebDataset(files.images(tmp_path, [files.picture()] * 2, nsamples=said))
    with pytest.raises(ShardError, match=r"shard\.tar\b.*\b2 samples|\b\d+ samples"):
        found[0]


def test_a_field_twice_is_a_bad_sample(tmp_path: Path) -> None:
    entries = [files.entry("a.cls", b"1"), files.entry("a.cls", b"2"), files.entry("b.cls", b"3")]
    found = WebDataset(files.shard(tmp_path, entries, 2))
    with pytest.raises(ValueError, match=r"\bcls\b.*'a'"):
        found[0]
    assert found[1] == {"__key__": "b", "cls": 3}


def test_what_has_no_key_or_no_field_is_passed_over(tmp_path: Path) -> None:
    names = ["README", ".hidden", "a.cls", "__meta__", "b.x.cls"]
    found = WebDataset(files.shard(tmp_path, [files.entry(name, b"1") for name in names], 2))
    assert [found[n] for n in range(2)] == [{"__key__": "a", "cls": 1}, {"__key__": "b", "x.cls": 1}]


@settings(max_examples=60)
@given(data=st.data())
def test_arbitrary_tars_are_samples_or_errors_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("any")
    content = bytearray(tars.write(place / "shard.tar", [tars.sample(n) for n in range(2)]).read_bytes())
    for _ in range(data.draw(st.integers(0, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(1, len(content)))]
    files.shard(place, [bytes(content)], 2)
    found = WebDataset(place, fields=["cls", "json", "npy"])
    for number in range(2):
        with contextlib.suppress(ShardError, ValueError):
            found[number]


@pytest.mark.failure(
    "Data and loader processes",
    "tars have no index, or one of them is truncated",
    seen="an error names `farandole data index`; that command names each truncated tar and writes no index",
    outcome="started again, the command reads only the rest",
)
def test_no_index_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"index\.json\b.*`farandole data index`"):
        WebDataset(tmp_path)
    (tmp_path / "index.json").write_bytes(msgspec.json.encode({"shardlist": []}))
    with pytest.raises(ShardError, match=r"index\.json\b"):
        WebDataset(tmp_path)
