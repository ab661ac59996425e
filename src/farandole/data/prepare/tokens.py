"""`farandole data prepare --tokens`: token shards from texts (section "texts").

`shards.py` has the phases and the invariants. A shard holds the ids of its documents, each followed by the end of a
document. A shard without a document is not in the index. Each id is below the vocabulary. Documents that can't be read,
or have other ids, can't be used.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from farandole.data.cache import local_path
from farandole.data.cache_folder import Verified, opened
from farandole.data.index import ID_BYTES, TOKENS_KIND, Shard, TokenIndex, dtype_for
from farandole.data.prepare.shards import (
    WHOLE,
    BadSamples,
    Part,
    ShardJob,
    ShardRecord,
    ShardResult,
    cut,
    digest_of,
    make_shards,
    put_index,
)
from farandole.data.prepare.table_pieces import TableRows, is_table, read, tables
from farandole.errors import UsageError
from farandole.platform.extras import how_to_install

# --- texts ------------------------------------------------------------------------------------------------------------
#
# Texts are cut into pieces that can be read by themselves. A file holds one document, or one a line, or one a row.
#
#     .txt                a document, or one a line
#     .jsonl              one a line: a field of each line's object
#     .gz                 either of these, compressed
#     .parquet, .arrow    one a row: a column (`table_pieces.py`)
#
# A file of lines is cut by bytes without being read: a piece has the lines that begin in it, wherever they end. So
# processes and machines can share a file of any length. A file of one document, or a compressed one, is one piece.
#
# Invariant: the pieces of a file have each of its documents once, in the file's order. Documents are UTF-8, byte for
# byte: no newline is translated, and the newline that ends a line is not part of it. Empty documents do not count.

_TEXT, _LINES, _PACKED = ".txt", ".jsonl", ".gz"


class TextPiece(NamedTuple):
    """Bytes [start, stop) of a file. `path` is relative to the source folder; `changed_ns` is the file's mtime."""

    path: str
    start: int
    stop: int
    changed_ns: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> int:
        return 1  # the number of documents is unknown

    @property
    def content(self) -> tuple[Any, ...]:
        return self[:3]


class TextFormat(msgspec.Struct, frozen=True):
    """How to read files. `lines`: each line of a .txt file is a document. `field`: the field of a .jsonl line's object,
    or the column of a row, that holds the text.
    """

    lines: bool = False
    field: str = "text"


@dataclass(frozen=True, kw_only=True)
class Texts:
    """A source: a folder with texts anywhere in it, or one file. `passed_over`: number of files of other names."""

    folder: str
    files: int
    pieces: tuple[TextPiece | TableRows, ...]
    passed_over: int

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class NoText(ValueError):
    """A document that can't be used; the text says why."""


def listing(place: str | Path, reading: TextFormat, piece_bytes: int) -> Texts:
    """Returns the texts at `place`, in the order of their paths; files that can be cut, in pieces of at most
    `piece_bytes`.

    Raises:
        UsageError: there are no texts, or tables have no such column.
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
    pieces: list[TextPiece] = []
    texts = [path for path in paths if _kind(path) in (_TEXT, _LINES)]
    for path in texts:
        stat = path.stat()
        cut = _by_lines(path, reading) and path.suffix != _PACKED
        step = piece_bytes if cut else max(stat.st_size, 1)
        name = str(path.relative_to(folder))
        pieces += [
            TextPiece(name, start, min(start + step, stat.st_size), stat.st_mtime_ns)
            for start in range(0, stat.st_size, step)
        ]
    if not pieces:
        raise UsageError(f"{source} holds no texts as FILE.txt or FILE.jsonl, which may be compressed as FILE.txt.gz")
    return Texts(folder=str(folder), files=len(texts), pieces=tuple(pieces), passed_over=len(paths) - len(texts))


def _of_tables(place: str, reading: TextFormat, piece_bytes: int) -> Texts:
    source = tables(place, piece_bytes)
    if reading.field not in source.schema.names:
        columns = ", ".join(map(repr, source.schema.names))
        raise UsageError(f"{place} has no column {reading.field!r}; name the text's by --field: there are {columns}")
    files = len({piece.path for piece in source.pieces})
    return Texts(folder=source.folder, files=files, pieces=source.pieces, passed_over=source.passed_over)


def documents(folder: str, piece: TextPiece | TableRows, reading: TextFormat) -> Iterator[tuple[int, str | NoText]]:
    """Yields each document of a piece as (place, text). The place is the byte of the (decompressed) file at which it
    begins, or its row. The text is a `NoText` if the document can't be used.
    """
    if isinstance(piece, TableRows):
        for _, row, values in read(folder, [piece], [reading.field]):
            text = values[reading.field]
            error = NoText(f"{reading.field} is {type(text).__name__}, not text")
            yield row, text if isinstance(text, str) else error
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
        os.scandir(folder)  # raises the error
    return [Path(root, name) for root, _, names in sorted(os.walk(folder, followlinks=True)) for name in sorted(names)]


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == _PACKED else path).suffix


def _by_lines(path: Path, reading: TextFormat) -> bool:
    return _kind(path) == _LINES or reading.lines


def _lines(file: BinaryIO, piece: TextPiece, *, packed: bool) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that begin in the piece, each after its place and without its line end."""
    place = 0
    if piece.start and not packed:
        file.seek(piece.start - 1)
        place = piece.start - 1 + len(file.readline())  # skip the line that begins before the piece
    while (packed or place < piece.stop) and (line := file.readline()):
        if text := line.rstrip(b"\r\n"):
            yield place, text
        place += len(line)


def _field(line: bytes, field: str) -> str | NoText:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return NoText(str(error))
    text = fields.get(field)
    if not isinstance(text, str):
        return NoText(f"no text as {field!r}; it has {', '.join(sorted(fields)[:8]) or 'nothing'}")
    return text


def _decoded(text: bytes) -> str | NoText:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return NoText(f"not UTF-8 at its byte {error.start} ({error.reason})")


# --- tokenizer --------------------------------------------------------------------------------------------------------
#
# Tokenizers by name: they encode a text as ids, and define the vocabulary.
#
#     bytes             the bytes of UTF-8, 256 ids and the end of a document: needs no package
#     tiktoken:NAME     an encoding of OpenAI's tiktoken, such as tiktoken:gpt2
#     PATH.json         a tokenizer.json of Hugging Face's tokenizers
#
# Special tokens within a text are encoded as ordinary letters, so a document can't end itself. Texts are not extended,
# cut or padded, even if a tokenizer.json asks for it.
#
# Invariant: `digest` covers everything on which ids depend, except the version of the tokenizer's package.

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")  # the usual names of this token


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """`encode` returns the ids of a text. `vocabulary`: all ids are below it. `end`: the id that ends a document.
    `digest`: SHA-256 in hex.
    """

    name: str
    encode: Callable[[str], Sequence[int] | npt.NDArray[Any]]
    vocabulary: int
    end: int
    digest: str


@functools.lru_cache(maxsize=1)
def tokenizer(name: str, end: str = "") -> Tokenizer:
    """Returns the tokenizer of that name. `end`: the token that ends a document, if it is not a usual one.

    Raises:
        UsageError: there is no such tokenizer or token, or its package is not installed.
    """
    if name == "bytes":
        if end:
            raise UsageError(f"--end {end}: the tokenizer `bytes` always ends a document with id 256; leave it out")
        return Tokenizer(name=name, encode=_bytes, vocabulary=257, end=256, digest=_digest(b"bytes"))
    if name.startswith("tiktoken:"):
        return _tiktoken(name, end)
    if name.endswith(".json"):
        return _tokenizer_json(name, end)
    raise UsageError(f"--tokens {name}: bytes, tiktoken:NAME such as tiktoken:gpt2, or the path of a tokenizer.json")


def _bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode(), np.uint8)


def _tiktoken(name: str, end: str) -> Tokenizer:
    _require("tiktoken", name)
    import tiktoken

    try:
        encoding: Any = tiktoken.get_encoding(name.partition(":")[2])
    except Exception as error:
        raise UsageError(f"--tokens {name}: {error}") from error
    ends: dict[str, int] = encoding._special_tokens
    digest = _digest(
        encoding._pat_str.encode(),
        json.dumps(sorted(ends.items())).encode(),
        *(token for ranked in sorted(encoding._mergeable_ranks.items(), key=_rank) for token in (ranked[0], b"\n")),
    )
    return Tokenizer(
        name=name,
        encode=encoding.encode_ordinary,
        vocabulary=encoding.n_vocab,
        end=_end(name, end, ends),
        digest=digest,
    )


def _rank(ranked: tuple[bytes, int]) -> int:
    return ranked[1]


def _tokenizer_json(name: str, end: str) -> Tokenizer:
    _require("tokenizers", name)
    import tokenizers

    try:
        content = Path(name).read_bytes()
        loaded: Any = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise UsageError(f"--tokens {name}: {error.strerror}") from None
    except Exception as error:  # the package raises plain Exceptions
        raise UsageError(f"--tokens {name} is not a tokenizer.json: {error}") from error
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True  # encodes special tokens in a text as letters

    def encode(text: str) -> Sequence[int]:
        return loaded.encode(text, add_special_tokens=False).ids

    ids: dict[str, int] = loaded.get_vocab(with_added_tokens=True)
    return Tokenizer(
        name=Path(name).name,
        encode=encode,
        vocabulary=max(ids.values()) + 1,
        end=_end(name, end, ids),
        digest=_digest(content),
    )


def _end(name: str, requested: str, ids: dict[str, int]) -> int:
    for token in [requested] if requested else _ENDS:
        if token in ids:
            return ids[token]
    problem = f"--end {requested}: no such token in {name}" if requested else f"{name} has none of {', '.join(_ENDS)}"
    raise UsageError(f"{problem}; give the token that ends a document by --end")


def _require(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"--tokens {name} needs {package}, which is not installed: {how_to_install('tokens')}")


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


# --- prepare tokens ---------------------------------------------------------------------------------------------------


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How to encode documents. `vocabulary`: the model's, which all ids must be below; 0: the tokenizer's own."""

    tokenizer: str
    end: str = ""
    vocabulary: int = 0
    reading: TextFormat = TextFormat()


class TokenShardRecord(ShardRecord, frozen=True, kw_only=True):
    """The record of a shard of tokens."""

    documents: int


@dataclass(frozen=True, kw_only=True)
class TokenJob(ShardJob[TokenShardRecord]):
    """The job of making one shard. `digest`: the tokenizer's."""

    folder: str
    pieces: tuple[TextPiece | TableRows, ...]
    encoding: Encoding
    vocabulary: int
    digest: str
    suffix = ".bin"
    samples_are = "documents"
    record_type = TokenShardRecord

    @property
    def made_from(self) -> str:
        return digest_of([*self._how, self.pieces])

    @property
    def holds(self) -> str:
        return digest_of([*self._how, [piece.content for piece in self.pieces]])

    @property
    def _how(self) -> list[object]:
        reading = self.encoding.reading
        return [1, self.digest, self.encoding.end, self.vocabulary, reading.lines, reading.field]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def write(self, file: BinaryIO) -> tuple[int, dict[str, Any]] | BadSamples:
        how = tokenizer(self.encoding.tokenizer, self.encoding.end)
        if how.digest != self.digest:
            raise UsageError(f"{self.encoding.tokenizer} has changed meanwhile; start again")
        width = ID_BYTES[dtype_for(self.vocabulary)]
        count, bad = 0, BadSamples()
        for piece in self.pieces:
            for place, text in documents(self.folder, piece, self.encoding.reading):
                try:
                    ids = _ids(how, text, self.vocabulary)
                except NoText as error:
                    at = f"row {place}" if isinstance(piece, TableRows) else f"the document at byte {place}"
                    bad = bad.plus(f"{os.path.join(self.folder, piece.path)}, {at}: {error}")
                    continue
                if ids.size:
                    file.write(np.append(ids, how.end).astype(f"<u{width}").tobytes())
                    count += 1
        return bad if bad.number else (file.tell() // width, {"documents": count})

    def written(self, shard: Shard) -> None:
        """Notes that the shard has its MD5, computed as it was written: readers of this machine need not compare it."""
        local = local_path(self.url)
        if local is None:
            return
        path = Path(local, shard.url)
        descriptor = opened(path)
        try:
            Verified().note(path, descriptor, shard.md5sum)
        finally:
            os.close(descriptor)


def prepare(
    source: Texts,
    url: str,
    encoding: Encoding,
    *,
    shard_bytes: int,
    processes: int,
    begin: Callable[[int], None],
    on_result: Callable[[ShardResult[TokenShardRecord]], None],
    part: Part = WHOLE,
) -> TokenIndex | int:
    """Runs phases 2 to 4: makes the shards of `source` at `url`, each of about `shard_bytes` of text.

    See `make_shards` for the other arguments. Returns the index, or the number of shards of other parts that are not
    finished yet.

    Raises:
        BadSample: documents can't be used; all shards without such documents are made.
        FarandoleError: a process was killed.
        UsageError: unknown kind of URL or tokenizer, or the texts hold no document.
    """
    how = tokenizer(encoding.tokenizer, encoding.end)
    vocabulary = _vocabulary(how, encoding.vocabulary)
    url = url.rstrip("/")
    jobs = [
        TokenJob(
            folder=source.folder, url=url, name=f"shard-{n:06d}", pieces=pieces, encoding=encoding,
            vocabulary=vocabulary, digest=how.digest,
        )
        for n, (_, pieces) in enumerate(cut(source.pieces, shard_bytes))
    ]  # fmt: skip
    records = make_shards(jobs, url, part, processes=processes, begin=begin, on_result=on_result)
    if isinstance(records, int):
        return records
    index = _index(records, how, vocabulary, source)
    put_index(url, index, part)
    return index


def _vocabulary(how: Tokenizer, requested: int) -> int:
    vocabulary = requested or how.vocabulary
    if not how.end < vocabulary <= 1 << 32:
        raise UsageError(
            f"--vocabulary {vocabulary}: the end of a document is {how.end} in {how.name}, which has ids below "
            f"{how.vocabulary}; give a number from {how.end + 1} to 2^32"
        )
    return vocabulary


def _index(records: list[TokenShardRecord], how: Tokenizer, vocabulary: int, source: Texts) -> TokenIndex:
    shards = tuple(record.shard for record in records if record.shard.nsamples)
    if not shards:
        raise UsageError(f"the texts in {source.folder} hold no document that is not empty")
    return TokenIndex(
        kind=TOKENS_KIND, dtype=dtype_for(vocabulary), vocabulary=vocabulary, end_of_document=how.end,
        tokenizer=how.name, tokenizer_hash=how.digest, documents=sum(record.documents for record in records),
        shardlist=shards,
    )  # fmt: skip


def _ids(how: Tokenizer, text: str | NoText, vocabulary: int) -> npt.NDArray[np.int64]:
    if isinstance(text, NoText):
        raise text
    try:
        ids = np.asarray(how.encode(text), np.int64)
    except Exception as error:  # packages raise any exception
        raise NoText(f"{how.name} can't encode it: {error}") from error
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        raise NoText(f"its token {at} is {ids[at]}, and ids are below the vocabulary, {vocabulary}")
    return ids
