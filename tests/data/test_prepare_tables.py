"""`farandole data prepare` of tables: every row once and in order, whatever cuts them, and each bad one by its row."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.data.images import ShardedImages
from farandole.data.index import INDEX, Index
from farandole.data.prepare import image_table, tokens
from farandole.data.prepare import images as image_folder
from farandole.data.prepare.shards import WHOLE, Part, samples_of
from farandole.data.prepare.table_pieces import is_table, tables
from farandole.errors import BadSample, ShardError, UsageError
from tests.support.image_files import CLASSES, in_order, make_folder

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
made_tables = pytest.importorskip("tests.support.tables")
SHARD = 9000


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, int]]:
    return in_order(make_folder(tmp_path_factory.mktemp("images"), each=11))


def table_of(samples: Sequence[tuple[bytes, int]], *, noted: bool = False, labels: Sequence[Any] | None = None) -> Any:
    """As Hugging Face has images, if `noted`; else columns of bytes and of whole numbers, or of `labels`."""
    numbers = [label for _, label in samples] if labels is None else labels
    if not noted:
        return pa.table({"n": range(len(samples)), "image": [data for data, _ in samples], "label": numbers})
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([{"bytes": data, "path": f"{n}.jpg"} for n, (data, _) in enumerate(samples)], kind)
    label = {"_type": "ClassLabel", "names": list(CLASSES)}
    return made_tables.noted(pa.table({"img": images, "fine": numbers}), img={"_type": "Image"}, fine=label)


def written(place: Path, table: Any, kind: str, *, files: int = 3, group: int = 4) -> Path:
    each = -(-table.num_rows // files)
    for number in range(files):
        ending = "parquet" if kind == "parquet" else "arrow"
        made_tables.write(place / f"part-{number}.{ending}", table.slice(number * each, each), kind, group)
    return place


def prepared(source: Any, target: Path, *, part: Part = WHOLE, shard_bytes: int = SHARD) -> Index | int:
    return image_folder.prepare(
        source, str(target), shard_bytes=shard_bytes, short_side=0, processes=1, begin=os.getpgid,
        on_result=lambda _: None, part=part,
    )  # fmt: skip


def stored(target: Path) -> list[tuple[bytes, int]]:
    images = ShardedImages(target)
    return [images.read(index) for index in range(len(images))]


@pytest.mark.parametrize("kind", made_tables.KINDS)
@pytest.mark.parametrize("noted", [True, False])
def test_images_of_a_table_become_the_shards_that_their_folder_would(
    tmp_path: Path, samples: list[tuple[bytes, int]], kind: str, noted: bool
) -> None:
    source = written(tmp_path / "source", table_of(samples, noted=noted), kind)
    listed = image_table.list_table(str(source), "", "", SHARD)
    assert listed.classes == (CLASSES if noted else tuple(str(number) for number in range(len(CLASSES))))
    index = prepared(listed, tmp_path / "target")
    assert isinstance(index, Index)
    assert len(index.shardlist) > 2
    assert stored(tmp_path / "target") == samples
    assert prepared(listed, tmp_path / "target") == index


@pytest.mark.parametrize("shard_bytes", [1, 3000, 1 << 20])
def test_any_cut_has_each_row_once(tmp_path: Path, samples: list[tuple[bytes, int]], shard_bytes: int) -> None:
    source = written(tmp_path / "source", table_of(samples), "parquet", files=2, group=5)
    listed = image_table.list_table(str(source / "*.parquet"), "image", "label", shard_bytes)
    assert sum(piece.samples for piece in listed.pieces) == len(samples)
    prepared(listed, tmp_path / "target", shard_bytes=shard_bytes)
    assert stored(tmp_path / "target") == samples


def test_parts_of_copies_on_other_machines_make_one_whole(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    place, copy = (written(tmp_path / name, table_of(samples), "parquet") for name in ("here", "there"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    target, parts = tmp_path / "target", [Part(1, 2), Part(2, 2)]
    first, second = (image_table.list_table(str(each), "", "", SHARD) for each in (place, copy))
    assert isinstance(prepared(first, target, part=parts[0]), int)
    assert isinstance(prepared(second, target, part=parts[1]), Index)
    assert stored(target) == samples
    assert sum(samples_of(first.pieces, SHARD, part) for part in parts) == len(samples)


def test_labels_may_be_text(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    names = [f"class {9 - label}" for _, label in samples]
    source = written(tmp_path / "source", table_of(samples, labels=names), "arrow")
    listed = image_table.list_table(str(source), "", "", SHARD)
    assert listed.classes == tuple(sorted(set(names)))
    prepared(listed, tmp_path / "target")
    assert [listed.classes[label] for _, label in stored(tmp_path / "target")] == names


def test_bad_rows_are_named_with_their_file_and_row(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    bad: list[tuple[Any, int]] = list(samples)
    bad[3] = (b"no image", bad[3][1])
    bad[14] = (None, bad[14][1])
    labels: list[int | None] = [label for _, label in bad]
    labels[20] = None
    source = written(tmp_path / "source", table_of(bad, labels=labels), "parquet", files=1)
    with pytest.raises(BadSample, match=r"\b3\b.*\b33\b") as error:
        prepared(image_table.list_table(str(source), "", "", SHARD), tmp_path / "target")
    for said in ("part-0.parquet, row 3: ", "row 14: ", "NoneType", "row 20: ", "None", "3 "):
        assert said in str(error.value)
    assert not (tmp_path / "target" / INDEX).exists()


def test_an_image_that_lies_elsewhere_is_named(tmp_path: Path) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array([{"bytes": None, "path": "cat/1.jpg"}], kind), "label": [0]})
    source = written(tmp_path / "source", table, "parquet", files=1)
    with pytest.raises(BadSample, match=r"row 0\b.*'cat/1\.jpg'"):
        prepared(image_table.list_table(str(source), "", "", SHARD), tmp_path / "target")


def test_columns_that_are_not_there_or_are_no_labels(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    table = table_of(samples).append_column("half", pa.array([0.5] * len(samples)))
    source = str(written(tmp_path / "source", table.rename_columns(["n", "pixels", "label", "half"]), "parquet"))
    with pytest.raises(UsageError, match=r"--image\b.*'n', 'pixels'"):
        image_table.list_table(source, "", "", SHARD)
    with pytest.raises(UsageError, match="'class'"):
        image_table.list_table(source, "pixels", "class", SHARD)
    with pytest.raises(UsageError, match=r"'half'.*\bdouble\b"):
        image_table.list_table(source, "pixels", "half", SHARD)
    far = table_of(samples, labels=[-1] * len(samples))
    with pytest.raises(UsageError, match=r"-1\b.*-1\b.*\b0\b"):
        image_table.list_table(str(written(tmp_path / "far", far, "parquet")), "", "", SHARD)


def test_a_file_that_is_no_table_is_named(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    source = written(tmp_path / "source", table_of(samples), "parquet")
    torn = source / "part-1.parquet"
    torn.write_bytes(torn.read_bytes()[:-20])
    with pytest.raises(ShardError, match=r"part-1\.parquet"):
        image_table.list_table(str(source), "", "", SHARD)
    with pytest.raises(ShardError, match=r"nowhere\.parquet"):
        image_table.list_table(str(source / "nowhere.parquet"), "", "", SHARD)


def test_what_is_a_table_and_what_is_not(tmp_path: Path, samples: list[tuple[bytes, int]]) -> None:
    source = written(tmp_path / "source", table_of(samples), "arrow")
    (source / "dataset_info.json").write_text("{}")
    assert is_table(str(source))
    assert tables(str(source), SHARD).passed_over == 1
    for other in ("x.parquet", "data/*", "s3://bucket/folder"):
        assert is_table(other)
    for other in (tmp_path, tmp_path / "nowhere"):
        assert not is_table(str(other))
    with pytest.raises(UsageError, match=rf"{tmp_path}\b.*CLASS/FILE\.jpg.*\.parquet"):
        image_folder.list_folder(tmp_path)


def test_texts_of_a_table_each_once_and_bad_ones_by_their_rows(tmp_path: Path) -> None:
    written_texts = [f"text {number} \U0001f986" for number in range(40)]
    table = pa.table({"id": range(40), "body": written_texts})
    source = str(written(tmp_path / "source", table, "parquet"))
    reading = tokens.TextFormat(field="body")
    for piece_bytes in (1, 100, 1 << 20):
        listed = tokens.listing(source, reading, piece_bytes)
        found = [text for piece in listed.pieces for _, text in tokens.documents(listed.folder, piece, reading)]
        assert found == written_texts
    with pytest.raises(UsageError, match=r"'text'.*--field\b.*'id', 'body'"):
        tokens.listing(source, tokens.TextFormat(), 100)
    [*_, (row, none)] = tokens.documents(listed.folder, listed.pieces[0], tokens.TextFormat(field="id"))
    assert row == listed.pieces[0].stop - 1
    assert isinstance(none, tokens.NoText)
