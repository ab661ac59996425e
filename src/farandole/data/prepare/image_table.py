"""Tables of images as the source of shards: a column of encoded images, and one of labels.

Columns: those that are named, or that Hugging Face's note in the schema calls Image and ClassLabel, or that are
called "image" and "label". Classes: the note's names; or the texts in the column, sorted; or, of whole numbers, all
from 0 to the largest. For the last two the label column is read beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from farandole.data.formats.table import feature_of, opened
from farandole.data.prepare import table_pieces
from farandole.data.prepare.images import SourceImage
from farandole.data.prepare.table_pieces import TableRows, Tables, tables
from farandole.errors import UsageError

_MOST_CLASSES = 1_000_000
_PIECE = 1 << 20  # bytes: a few pieces a shard, so that shards are as long as they should be


@dataclass(frozen=True)
class TableReader:
    """Reads pieces, in any process. `text`: whether labels are names of classes."""

    folder: str
    image: str
    label: str
    classes: tuple[str, ...]
    text: bool

    @property
    def how(self) -> tuple[Any, ...]:
        return self.image, self.label, self.classes

    def read(self, pieces: Sequence[TableRows]) -> Iterator[SourceImage]:
        numbers: Mapping[Any, int] = {name if self.text else number: number for number, name in enumerate(self.classes)}
        for piece, row, found in table_pieces.read(self.folder, pieces, (self.image, self.label)):
            place = f"{self.folder}{piece.path}, row {row}"
            label = numbers.get(found[self.label])
            if label is None:
                wrong = ValueError(f"{self.label} is {found[self.label]!r}, none of {len(self.classes)} classes")
                yield SourceImage(place, 0, wrong)
            else:
                yield SourceImage(place, label, _bytes(found[self.image], self.image))


@dataclass(frozen=True, kw_only=True)
class TableImages:
    """A source of tables. `passed_over`: files that are no tables by their names."""

    reader: TableReader
    classes: tuple[str, ...]
    pieces: tuple[TableRows, ...]
    passed_over: int


def list_table(source: str, image: str, label: str, shard_bytes: int) -> TableImages:
    """All images of the tables that `source` names. `image`, `label`: columns; found by themselves where empty.

    Raises:
        UsageError: no tables, no such columns, or labels that name no classes.
        ShardError: a file can't be read.
    """
    found = tables(source, min(shard_bytes // 4, _PIECE))
    image = image or _column(found.schema, "Image", "image")
    label = label or _column(found.schema, "ClassLabel", "label")
    names = feature_of(found.schema, label).get("names")
    if isinstance(names, list):
        classes, text = tuple(map(str, cast(list[object], names))), False
    else:
        classes, text = _classes(found, label)
    reader = TableReader(found.folder, image, label, classes, text)
    return TableImages(reader=reader, classes=classes, pieces=found.pieces, passed_over=found.passed_over)


def _column(schema: Any, kind: str, name: str) -> str:
    noted = [each for each in schema.names if feature_of(schema, each).get("_type") == kind]
    if len(noted) == 1:
        return noted[0]
    if name in schema.names:
        return name
    raise UsageError(
        f"which column has the {name}s? Name it by --{name}: there are {', '.join(map(repr, schema.names))}"
    )


def _classes(found: Tables, label: str) -> tuple[tuple[str, ...], bool]:
    """Names of the classes, and whether the column has them as text."""
    import pyarrow as pa

    from farandole.data.formats.table import Table

    values: set[Any] = set()
    for path in dict.fromkeys(piece.path for piece in found.pieces):
        file = opened(Table(found.folder + path, [label]).files[0])  # which says it, where there is no such column
        for group in range(len(file.rows)):
            column = file.read(group, [label]).column(0)
            if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type) or _is_text(column.type)):
                raise UsageError(f"column {label!r} of {path} is {column.type}: labels are whole numbers or text")
            values.update(column.unique().to_pylist())
    values.discard(None)  # a row without a label is named when it is read
    if all(isinstance(value, str) for value in values):
        return tuple(sorted(values)), True
    if max(values) >= _MOST_CLASSES or min(values) < 0:
        raise UsageError(
            f"column {label!r} has numbers from {min(values)} to {max(values)}: classes are numbered from 0 on, and "
            f"there are at most {_MOST_CLASSES}; name another column by --label"
        )
    return tuple(map(str, range(max(values) + 1))), False


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _bytes(value: Any, column: str) -> bytes | Exception:
    """The encoded image, which Hugging Face keeps in a struct beside its path."""
    if isinstance(value, Mapping):
        its = cast(Mapping[str, Any], value)
        if its.get("bytes") is None and its.get("path"):
            return ValueError(
                f"{column} lies elsewhere, at {its['path']!r}: only what is in the table is read (Hugging Face's "
                f"`to_parquet` leaves images where they lie, `save_to_disk` and `push_to_hub` take them along)"
            )
        value = its.get("bytes")
    return value if isinstance(value, bytes) else ValueError(f"{column} is {type(value).__name__}, and no bytes")
