"""Parquet and Arrow: each row as it was written, in any order, within its memory, in any process."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import struct
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

import farandole
from farandole.data.formats.table import Table
from farandole.data.loader import Key, Loader
from farandole.errors import BadSample, ShardError, UsageError
from farandole.plan.batch import GlobalBatch
from tests.support.s3_server import S3

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
tables = pytest.importorskip("tests.support.tables")
KINDS = ("parquet", "arrow", "stream")
ROWS = 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: tables.folder(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


# --- what is in it --------------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Data and loader processes", "the order is shuffled, and the row groups to decode are larger than `memory_bytes`"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_bytes", [1 << 30, 1])
@pytest.mark.filterwarnings("ignore:.*most samples of a shuffled order")
def test_each_row_is_as_it_was_written_in_any_order(folders: dict[str, Path], kind: str, memory_bytes: int) -> None:
    table = farandole.Table(folders[kind], memory_bytes=memory_bytes)
    assert len(table) == ROWS
    order = list(range(ROWS)) * 2
    random.Random(2).shuffle(order)
    for number in order:
        assert tables.same(table[number], tables.expected(number))
    assert tables.same(table[-1], table[ROWS - 1])
    for outside in (ROWS, -ROWS - 1):
        with pytest.raises(IndexError, match=f"sample {outside} of {ROWS}"):
            table[outside]


def test_files_are_named_by_themselves_by_folder_and_by_pattern(folders: dict[str, Path]) -> None:
    folder = folders["parquet"]
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "part.parquet").write_bytes(b"torn")
    every = [str(folder / f"part-{n}.parquet") for n in range(3)]
    assert list(Table(folder).files) == every
    assert list(Table(f"{folder}/part-[01].parquet").files) == every[:2]
    assert list(Table([every[2], every[0]]).files) == [every[2], every[0]]
    assert Table([every[2], every[0]], ["number"])[16] == {"number": 0}
    assert Table(every[1], ["name", "number"])[0] == {"name": "é16", "number": 16}


def test_own_decoders_and_a_transform(folders: dict[str, Path]) -> None:
    table = Table(
        folders["arrow"], ["data", "number"], lambda sample: (sample["number"], sample["data"]), decode={"data": len}
    )
    assert table[5] == (5, 2)


def image_table(pictures: list[Any]) -> Any:
    """As Hugging Face's `datasets` writes images and labels."""
    stored = pa.array(pictures, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": stored, "label": pa.array([n % 2 for n in range(len(pictures))], pa.int64())})
    label = {"names": ["ant", "bee"], "_type": "ClassLabel"}
    return tables.noted(table, image={"_type": "Image"}, label=label)


@pytest.mark.failure(
    "Data and loader processes",
    "a field of a tar or MDS shard, or an image of a table, is not of its declared type or size",
)
def test_images_are_those_that_hugging_face_has_noted(tmp_path: Path) -> None:
    import PIL.Image

    written = io.BytesIO()
    PIL.Image.new("L", (5, 4), 9).save(written, "PNG")
    pictures = [
        {"bytes": written.getvalue(), "path": "a.png"},
        {"bytes": b"%!PS", "path": None},
        {"bytes": None, "path": "/x"},
    ]
    table = Table(tables.write(tmp_path / "a.parquet", image_table(pictures), "parquet"))
    assert table.class_names("label") == ("ant", "bee")
    assert table.class_names("image") == ()
    assert (table[0]["image"].size, table[0]["image"].mode, table[0]["label"]) == ((5, 4), "RGB", 0)
    with pytest.raises(PIL.UnidentifiedImageError):
        table[1]
    with pytest.raises(ValueError, match="'/x'"):
        table[2]
    assert Table(table.files, decode=False)[0]["image"] == pictures[0]
    loader = Loader(Table(table.files, transform=lambda x: x["label"]), GlobalBatch(3, micro=3), seed=0, shuffle=False)
    with pytest.raises(BadSample, match=r"\b1\b.*\bTable\b.*UnidentifiedImageError"):
        loader.fetch(Key(0, 0, 0, 0, 3))


# --- whole micro-batches --------------------------------------------------------------------------------------------


def equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert type(value) is type(wanted[name])
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape, value.stride()) == (
                wanted[name].dtype, wanted[name].shape, wanted[name].stride(),
            ), name  # fmt: skip
            assert torch.equal(value, wanted[name]), name
        else:
            assert value == wanted[name], name
    return True


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(samples=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=20))
def test_gather_is_what_collate_makes_of_the_samples(folders: dict[str, Path], kind: str, samples: list[int]) -> None:
    table = Table(folders[kind], list(tables.PLAIN))
    assert equal(table.gather(np.array(samples, dtype=np.int64)), default_collate([table[n] for n in samples]))


def test_gather_is_there_only_where_samples_draw_nothing_and_are_plain(folders: dict[str, Path]) -> None:
    assert hasattr(Table(folders["arrow"], ["number", "tokens"]), "gather")
    assert not hasattr(Table(folders["arrow"], ["number"], lambda sample: sample), "gather")
    assert not hasattr(Table(folders["arrow"], ["number"], decode={"number": float}), "gather")
    assert not hasattr(Table(folders["arrow"], ["number", "data"]), "gather")
    assert hasattr(pickle.loads(pickle.dumps(Table(folders["arrow"], ["number"]))), "gather")


@pytest.mark.parametrize("column", ["ragged", "gaps"])
def test_gather_refuses_what_collate_refuses(folders: dict[str, Path], column: str) -> None:
    table = Table(folders["arrow"], [column])
    for make in (lambda: table.gather(np.arange(4)), lambda: default_collate([table[n] for n in range(4)])):
        with pytest.raises((TypeError, RuntimeError)):
            make()
    assert equal(table.gather(np.array([2, 2])), default_collate([table[2], table[2]]))


# --- in loader processes, and elsewhere -----------------------------------------------------------------------------


def _noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": sample["number"],
        "tokens": sample["tokens"] ^ np.uint16(random.getrandbits(8)),
        "name": sample["name"],
    }


KEYS = [Key(epoch=1, step=n, shard=0, start=8 * n, stop=8 * n + 8) for n in range(6)]


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_bits_are_the_same_in_loader_processes(folders: dict[str, Path], kind: str, start: str, make: Any) -> None:
    here = Loader(Table(folders[kind], transform=_noisy), GlobalBatch(8, micro=8), seed=5)
    expected = [here.fetch(key) for key in KEYS]
    table = Table(folders[kind], transform=_noisy)
    assert table[3]["number"] == 3  # open in this process when the others are started
    loader = make(table, GlobalBatch(8, micro=8), seed=5, multiprocessing_context=start)
    loader.expect(KEYS)
    assert all(equal(loader.fetch(key), batch) for key, batch in zip(KEYS, expected, strict=True))


@pytest.fixture
def elsewhere(folders: dict[str, Path]) -> Any:
    store = fsspec.filesystem("memory")
    for kind in ("parquet", "arrow"):
        store.put(str(folders[kind]) + "/", f"/{kind}", recursive=True)
    yield store
    store.rm("/", recursive=True)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_from_any_url_the_rows_are_the_same_and_what_its_client_draws_leaves_no_trace(
    elsewhere: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = type(elsewhere)._open

    def drawing(self: Any, *arguments: Any, **options: Any) -> Any:
        random.random()
        return reads(self, *arguments, **options)

    monkeypatch.setattr(type(elsewhere), "_open", drawing)
    random.seed(7)
    state = random.getstate()
    table = Table(f"memory://{kind}/part-*")
    assert [file.rpartition("/")[2] for file in table.files] == [f"part-{n}.{kind}" for n in range(3)]
    for number in (47, 0, 20, 21):
        assert tables.same(table[number], tables.expected(number))
    assert random.getstate() == state


def test_a_stream_elsewhere_is_refused_with_the_remedy(folders: dict[str, Path], elsewhere: Any) -> None:
    elsewhere.put(str(folders["stream"] / "part-0.arrow"), "/stream.arrow")
    with pytest.raises(ShardError, match=r"memory://stream\.arrow\b.*\bArrow\b"):
        Table("memory://stream.arrow")


@pytest.mark.world
@pytest.mark.processes
def test_from_s3_in_loader_processes_the_bits_are_those_of_the_folder(
    s3: S3, folders: dict[str, Path], make: Any
) -> None:
    del s3
    for path in folders["parquet"].glob("*.parquet"):
        fsspec.filesystem("s3").put_file(str(path), f"bucket/table/{path.name}")
    here = Loader(Table(folders["parquet"], transform=_noisy), GlobalBatch(8, micro=8), seed=5)
    loader = make(Table("s3://bucket/table", transform=_noisy), GlobalBatch(8, micro=8), seed=5)
    loader.expect(KEYS)
    assert all(equal(loader.fetch(key), here.fetch(key)) for key in KEYS)


# --- what can't be read ---------------------------------------------------------------------------------------------


@pytest.mark.failure(
    "Data and loader processes",
    "the order is shuffled, and the row groups to decode are larger than `memory_bytes`",
    seen="a warning when the dataset is created, with both sizes",
    outcome="each sample costs the decoding of its group; the samples are right",
)
def test_what_memory_can_not_hold_is_said(folders: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match=r"\b\d+ bytes.*memory_bytes\b.*\b99\b"):
        Table(folders["parquet"], memory_bytes=99)
    Table(folders["arrow"], memory_bytes=99)  # mapped


@pytest.mark.failure(
    "Data and loader processes",
    "the files of a table differ in a column, or pyarrow is not installed",
    seen="an error when the `Table` is created, with the column, both types and both files, or with the extra",
    outcome="training does not start",
)
def test_mistakes_are_said_when_it_is_made(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"part-0\.arrow\b.*'x'.*'number', 'half'"):
        Table(folders["arrow"], ["x"])
    with pytest.raises(UsageError, match=r"\['number', 'number'\]"):
        Table(folders["arrow"], ["number", "number"])
    with pytest.raises(UsageError, match=r"\.parquet\b"):
        Table(tmp_path)
    with pytest.raises(ShardError, match=r"gone\.parquet"):
        Table(tmp_path / "gone.parquet")
    with pytest.raises(UsageError, match=r"\bTable\b"):
        Table([])
    tables.write(tmp_path / "a.parquet", pa.table({"x": [1]}), "parquet")
    tables.write(tmp_path / "b.parquet", pa.table({"x": [1.5]}), "parquet")
    with pytest.raises(UsageError, match=r"'x'.*\bint64\b.*\ba\.parquet\b.*\bdouble\b.*\bb\.parquet\b"):
        Table(tmp_path)
    tables.write(tmp_path / "b.parquet", pa.table({"x": pa.array([], pa.int64())}), "parquet")
    with pytest.raises(UsageError, match=r"b\.parquet\b"):
        Table(tmp_path / "b.parquet")


@pytest.mark.failure(
    "Data and loader processes", "the files of a table differ in a column, or pyarrow is not installed"
)
def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install .*\[tables\]"):
        Table("somewhere")


@pytest.mark.failure(
    "Data and loader processes",
    "a file of a table is replaced while a run trains",
    seen="`ShardError` with the file, if the rows of its groups differ",
    outcome="the script fails, exit code 1",
)
def test_a_file_that_is_another_one_now_is_no_other_rows(tmp_path: Path) -> None:
    path = tables.write(tmp_path / "a.parquet", tables.rows(0, 16), "parquet")
    table = Table(path, ["number"])
    tables.write(path, tables.rows(0, 16), "parquet", group=5)
    with pytest.raises(ShardError, match=rf"{re.escape(str(path))}.*\bTable\b"):
        table[15]


@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_offsets_that_lead_out_of_a_batch_are_never_followed(tmp_path: Path, kind: str) -> None:
    path = tables.write(tmp_path / "a.arrow", pa.table({"x": ["ab", "cd", "ef"]}), kind)
    content = path.read_bytes()
    assert content.count(struct.pack("<4i", 0, 2, 4, 6)) == 1
    path.write_bytes(content.replace(struct.pack("<4i", 0, 2, 4, 6), struct.pack("<4i", 0, 2, 1 << 30, 6)))
    with pytest.raises(ShardError, match=r"a\.arrow\b.*ffset"):
        Table(path)[1]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_files_are_rows_or_errors_of_ours(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("damaged") / "a.table"
    content = bytearray(next(folders[kind].glob("part-0.*")).read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    place.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(ShardError, UsageError):
        table = Table(place, ["number", "name", "tokens", "ragged"])
        for number in range(min(len(table), 20)):
            with contextlib.suppress(ShardError, ValueError, OverflowError):
                table[number]
