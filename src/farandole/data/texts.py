"""Texts, cut into pieces that can be read by themselves: files of one document, of one a line, of one a row.

    .txt                a document, or one a line
    .jsonl              one a line: a field of each line's object
    .gz                 of either
    .parquet, .arrow    one a row: a column (`table_pieces.py`)

A file of lines is cut by bytes without being read: a piece has the lines that begin in it, wherever they end. So a file
of any length is shared by processes and machines. What is one document, or compressed, is one piece.

Invariant: the pieces of a file have each of its documents once, in the file's order. Documents are UTF-8, byte for
byte: no newline is translated, but the one that ends a line is not part of it. Empty ones are none.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from farandole.data.table_pieces import Rows, is_table, read, tables
from farandole.errors import UsageError

_TEXT, _LINES, _PACKED = ".txt", ".jsonl", ".gz"


class Piece(NamedTuple):
    """Bytes [start, stop) of a file, its path being that under the source folder; when it was changed."""

    path: str
    start: int
    stop: int
    changed_ns: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> int:
        return 1  # it is unknown how many documents

    @property
    def content(self) -> tuple[Any, ...]:
        return self[:3]


class Reading(msgspec.Struct, frozen=True):
    """How files are read. `lines`: a .txt file is a document a line. `field`: of a .jsonl line's object, or of a row,
    the text.
    """

    lines: bool = False
    field: str = "text"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A source: a folder with texts anywhere in it, or one file. `passed_over`: files that are none by their names."""

    folder: str
    files: int
    pieces: tuple[Piece | Rows, ...]
    passed_over: int

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class NoText(ValueError):
    """A document that can't be used."""


def listing(place: str | Path, reading: Reading, piece_bytes: int) -> Texts:
    """The texts at `place`, in the order of their paths, in pieces of at most `piece_bytes` where they can be cut.

    Raises:
        UsageError: there are none, or tables without such a column.
        ShardError: a table can't be read.
    """
    if is_table(str(place)):
        return _of_tables(str(place), reading, piece_bytes)
    source = Path(place)
    try:
        paths = [source] if source.is_file() else _walked(source)
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}; give a text, or a folder of texts") from None
    folder = source.parent if source.is_file() else source
    pieces: list[Piece] = []
    texts = [path for path in paths if _kind(path) in (_TEXT, _LINES)]
    for path in texts:
        stat = path.stat()
        cut = _by_lines(path, reading) and path.suffix != _PACKED
        step = piece_bytes if cut else max(stat.st_size, 1)
        name = str(path.relative_to(folder))
        pieces += [
            Piece(name, start, min(start + step, stat.st_size), stat.st_mtime_ns)
            for start in range(0, stat.st_size, step)
        ]
    if not pieces:
        raise UsageError(f"{source} holds no texts as FILE.txt or FILE.jsonl, which may be compressed as FILE.txt.gz")
    return Texts(folder=str(folder), files=len(texts), pieces=tuple(pieces), passed_over=len(paths) - len(texts))


def _of_tables(place: str, reading: Reading, piece_bytes: int) -> Texts:
    found = tables(place, piece_bytes)
    if reading.field not in found.schema.names:
        there = ", ".join(map(repr, found.schema.names))
        raise UsageError(f"{place} has no column {reading.field!r}; name the text's by --field: there are {there}")
    files = len({piece.path for piece in found.pieces})
    return Texts(folder=found.folder, files=files, pieces=found.pieces, passed_over=found.passed_over)


def documents(folder: str, piece: Piece | Rows, reading: Reading) -> Iterator[tuple[int, str | NoText]]:
    """Each document of a piece, after the byte of the (decompressed) file at which it begins, or after its row; or why
    it is none.
    """
    if isinstance(piece, Rows):
        for _, row, found in read(folder, [piece], [reading.field]):
            text = found[reading.field]
            none = NoText(f"{reading.field} is {type(text).__name__}, and no text")
            yield row, text if isinstance(text, str) else none
        return
    path, place = Path(folder, piece.path), 0
    try:
        with gzip.open(path) if path.suffix == _PACKED else path.open("rb") as opened:
            file = cast(BinaryIO, opened)
            if not _by_lines(path, reading):
                yield place, _decoded(file.read())
                return
            for place, line in _lines(file, piece, packed=path.suffix == _PACKED):
                yield place, _field(line, reading.field) if _kind(path) == _LINES else _decoded(line)
    except (OSError, EOFError, zlib.error) as error:
        yield place, NoText(str(error))


def _walked(folder: Path) -> list[Path]:
    if not folder.exists():
        os.scandir(folder)  # says why
    return [Path(root, name) for root, _, names in sorted(os.walk(folder, followlinks=True)) for name in sorted(names)]


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == _PACKED else path).suffix


def _by_lines(path: Path, reading: Reading) -> bool:
    return _kind(path) == _LINES or reading.lines


def _lines(file: BinaryIO, piece: Piece, *, packed: bool) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the piece, each without its end."""
    place = 0
    if piece.start and not packed:
        file.seek(piece.start - 1)
        place = piece.start - 1 + len(file.readline())  # the line before, to its end: if that is here, nothing of ours
    while (packed or place < piece.stop) and (line := file.readline()):
        if text := line.rstrip(b"\r\n"):
            yield place, text
        place += len(line)


def _field(line: bytes, field: str) -> str | NoText:
    try:
        found = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return NoText(str(error))
    text = found.get(field)
    if not isinstance(text, str):
        return NoText(f"no text as {field!r}; it has {', '.join(sorted(found)[:8]) or 'nothing'}")
    return text


def _decoded(text: bytes) -> str | NoText:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return NoText(f"no UTF-8 at its byte {error.start} ({error.reason})")
