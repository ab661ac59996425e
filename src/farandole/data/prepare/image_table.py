"""Tables of images as the source of shards: a column of encoded images, and a column of labels.

Columns: those that the user names, or those of types Image and ClassLabel in Hugging Face's note in the schema, or
"image" and "label". Classes: the note's names; or the texts in the column, sorted; or, for integers, all from 0 to the
largest. For the last two the label column is read beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from farandole.data.formats.columns import feature_of
from farandole.data.formats.table_files import opened
from farandole.data.prepare import table_pieces
from farandole.data.prepare.images import SourceImage
from farandole.data.prepare.table_pieces import TableRows, Tables, tables
from farandole.errors import UsageError

_MOST_CLASSES = 1_000_000
_PIECE = 1 << 20  # bytes: several pieces a shard, so that shards come close to the requested length


@dataclass(frozen=True)
class TableReader:
    """Reads the images of tables, in any process. `text`: labels are names of classes, not numbers."""

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
        for piece, row, values in table_pieces.read(self.folder, pieces, (self.image, self.label)):
            place = f"{self.folder}{piece.path}, row {row}"
            label = numbers.get(values[self.label])
            if label is None:
                error = ValueError(
                    f"{self.label} is {values[self.label]!r}, not one of the {len(self.classes)} classes"
                )
                yield SourceImage(place, 0, error)
            else:
                yield SourceImage(place, label, _bytes(values[self.image], self.image))


@dataclass(frozen=True, kw_only=True)
class TableImages:
    """A source of tables. `passed_over`: number of files whose names are not those of tables."""

    reader: TableReader
    classes: tuple[str, ...]
    pieces: tuple[TableRows, ...]
    passed_over: int


def list_table(source: str, image: str, label: str, shard_bytes: int) -> TableImages:
    """Returns all images of the tables that `source` names. `image`, `label`: columns; detected if empty.

    Raises:
        UsageError: there are no tables or no such columns, or labels are no valid classes.
        ShardError: a file can't be read.
    """
    table_source = tables(source, min(shard_bytes // 4, _PIECE))
    image = image or _column(table_source.schema, "Image", "image")
    label = label or _column(table_source.schema, "ClassLabel", "label")
    names = feature_of(table_source.schema, label).get("names")
    if isinstance(names, list):
        classes, text = tuple(map(str, cast(list[object], names))), False
    else:
        classes, text = _classes(table_source, label)
    reader = TableReader(table_source.folder, image, label, classes, text)
    return TableImages(reader=reader, classes=classes, pieces=table_source.pieces, passed_over=table_source.passed_over)


def _column(schema: Any, kind: str, name: str) -> str:
    candidates = [each for each in schema.names if feature_of(schema, each).get("_type") == kind]
    if len(candidates) == 1:
        return candidates[0]
    if name in schema.names:
        return name
    raise UsageError(
        f"which column has the {name}s? Name it by --{name}: there are {', '.join(map(repr, schema.names))}"
    )


def _classes(source: Tables, label: str) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the classes, and True if the column holds them as text."""
    import pyarrow as pa

    from farandole.data.formats.table import Table

    values: set[Any] = set()
    for path in dict.fromkeys(piece.path for piece in source.pieces):
        file = opened(Table(source.folder + path, [label]).files[0])  # `Table` raises if there is no such column
        for group in range(len(file.rows)):
            column = file.read(group, [label]).column(0)
            if not (pa.types.is_integer(column.type) or pa.types.is_string(column.type) or _is_text(column.type)):
                raise UsageError(f"column {label!r} of {path} is {column.type}: labels must be integers or text")
            values.update(column.unique().to_pylist())
    values.discard(None)  # a row without a label is reported when it is read
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
    """Returns the encoded image, which Hugging Face stores in a struct beside its path; or the error."""
    if isinstance(value, Mapping):
        struct = cast(Mapping[str, Any], value)
        if struct.get("bytes") is None and struct.get("path"):
            return ValueError(
                f"{column} is stored outside the table, at {struct['path']!r}: only images in the table are read "
                f"(Hugging Face's `to_parquet` leaves images in their files, `save_to_disk` and `push_to_hub` store "
                f"them in the table)"
            )
        value = struct.get("bytes")
    return value if isinstance(value, bytes) else ValueError(f"{column} is {type(value).__name__}, not bytes")
