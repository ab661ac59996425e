"""Texts become token shards: `farandole data prepare --tokens`.

    1. *list*    the texts, in pieces that can be read by themselves (`texts.py`)
    2. *cut*     the pieces into shards by their lengths: arithmetic, so that a second start cuts the same
    3. *make*    each shard in a process: the ids of its documents, each followed by the end of a document, and then its
                 record, which says from what it was made and what its MD5 is. A shard whose record fits and whose MD5
                 verifies is kept
    4. *index*   the shards, last of all: a folder with an index is whole. One without a document is not in it

Several machines share phase 3 as with images (`prepare.py`), each with the same texts and tokenizer.

Invariant: whatever is killed at any moment, the next start ends with the same bytes, and a shard that was finished is
not made again. Each id is below the vocabulary. Documents that can't be read, or have other ids, are counted, the first
of them named with their places, and no index is written.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt

from farandole.data.cache import filesystem, local_path
from farandole.data.cutting import WHOLE, Part, cut, digest_of
from farandole.data.index import INDEX, Shard
from farandole.data.making import make_all, md5_of, put
from farandole.data.table_pieces import Rows
from farandole.data.texts import NoText, Piece, Reading, Texts, documents
from farandole.data.token_index import KIND, WIDTHS, TokenIndex, dtype_for
from farandole.data.tokenizer import Tokenizer, tokenizer
from farandole.data.verification import Verified, opened
from farandole.errors import BadSample, UsageError

_NAMED = 20  # bad documents in one message


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How documents become ids. `vocabulary`: the model's, which ids must be below; 0 for the tokenizer's own."""

    tokenizer: str
    end: str = ""
    vocabulary: int = 0
    reading: Reading = Reading()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard to make, as it is sent to a process. `digest`: of the tokenizer."""

    folder: str
    url: str
    name: str
    pieces: tuple[Piece | Rows, ...]
    encoding: Encoding
    vocabulary: int
    digest: str

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


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of one finished shard: what the index will say of it, and digests of what it was made from; `holds` is the one
    without the files' times, which differ between copies on several machines.
    """

    shard: Shard
    documents: int
    made_from: str
    holds: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """What became of one shard. `size`: bytes of text. `bad`: the first of `bads` documents that can't be used, and
    why; where there are any there is no shard.
    """

    size: int
    record: Record | None = None
    kept: bool = False
    bads: int = 0
    bad: tuple[str, ...] = ()


def prepare(
    source: Texts,
    url: str,
    encoding: Encoding,
    *,
    shard_bytes: int,
    processes: int,
    begin: Callable[[int], None],
    made: Callable[[Made], None],
    part: Part = WHOLE,
) -> TokenIndex | int:
    """Phases 2 to 4: the shards of `source` at `url`, each of about `shard_bytes` of text.

    Each process first calls `begin` with this process's id; `made` hears of each shard. Returns the index, or how many
    shards of other parts are not there yet.

    Raises:
        BadSample: documents that can't be used; all shards without them are made.
        FarandoleError: a process was killed.
        UsageError: no such place or tokenizer, or there is nothing in the texts.
    """
    how = tokenizer(encoding.tokenizer, encoding.end)
    vocabulary = _vocabulary(how, encoding.vocabulary)
    url = url.rstrip("/")
    place, path = filesystem(url)
    place.makedirs(path, exist_ok=True)
    if place.exists(f"{path}/{INDEX}"):
        place.rm_file(f"{path}/{INDEX}")  # while it is there, the shards are what it says
    jobs = [
        Job(
            folder=source.folder, url=url, name=f"shard-{n:06d}", pieces=pieces, encoding=encoding,
            vocabulary=vocabulary, digest=how.digest,
        )
        for n, (_, pieces) in enumerate(cut(source.pieces, shard_bytes))
    ]  # fmt: skip
    results = make_all(_make, [job for n, job in enumerate(jobs) if part.has(n)], processes, begin, made)
    if bads := sum(result.bads for result in results):
        named = [each for result in results for each in result.bad][:_NAMED]
        more = f"\n  and {bads - len(named)} more" if bads > len(named) else ""
        raise BadSample(
            f"{bads} documents can't be used; mend or remove them and start again, which keeps the shards without "
            f"any:\n  " + "\n  ".join(named) + more
        )
    mine = iter(results)
    found = [next(mine).record if part.has(n) else _of_others(job) for n, job in enumerate(jobs)]
    records = [record for record in found if record is not None]
    if len(records) < len(jobs):
        return len(jobs) - len(records)
    index = _index(records, how, vocabulary, source)
    put(f"{url}/{INDEX}", io.BytesIO(msgspec.json.format(msgspec.json.encode(index))), by=f".{part.number}")
    return index


def _vocabulary(how: Tokenizer, asked: int) -> int:
    vocabulary = asked or how.vocabulary
    if not how.end < vocabulary <= 1 << 32:
        raise UsageError(
            f"--vocabulary {vocabulary}: the end of a document is {how.end} in {how.name}, which has ids below "
            f"{how.vocabulary}; give a number from {how.end + 1} to 2^32"
        )
    return vocabulary


def _index(records: list[Record], how: Tokenizer, vocabulary: int, source: Texts) -> TokenIndex:
    shards = tuple(record.shard for record in records if record.shard.nsamples)
    if not shards:
        raise UsageError(f"the texts in {source.folder} hold no document that is not empty")
    return TokenIndex(
        kind=KIND, dtype=dtype_for(vocabulary), vocabulary=vocabulary, end_of_document=how.end, tokenizer=how.name,
        tokenizer_hash=how.digest, documents=sum(record.documents for record in records), shardlist=shards,
    )  # fmt: skip


# --- one shard ---------------------------------------------------------------------------------------------------


def _make(job: Job) -> Made:
    if (record := _finished(job)) is not None:
        return Made(size=job.size, record=record, kept=True)
    how = tokenizer(job.encoding.tokenizer, job.encoding.end)
    if how.digest != job.digest:
        raise UsageError(f"{job.encoding.tokenizer} has changed meanwhile; start again")
    dtype = dtype_for(job.vocabulary)
    count, bads, bad = 0, 0, list[str]()
    with tempfile.TemporaryFile() as file:
        for piece in job.pieces:
            for place, text in documents(job.folder, piece, job.encoding.reading):
                try:
                    ids = _ids(how, text, job.vocabulary)
                except NoText as error:
                    bads += 1
                    if len(bad) < _NAMED:
                        at = f"row {place}" if isinstance(piece, Rows) else f"the document at byte {place}"
                        bad.append(f"{os.path.join(job.folder, piece.path)}, {at}: {error}")
                    continue
                if ids.size:
                    file.write(np.append(ids, how.end).astype(f"<u{WIDTHS[dtype]}").tobytes())
                    count += 1
        if bads:
            return Made(size=job.size, bads=bads, bad=tuple(bad))
        size = file.tell()
        shard = Shard(url=f"{job.name}.bin", nsamples=size // WIDTHS[dtype], filesize=size, md5sum=md5_of(file))
        put(f"{job.url}/{shard.url}", file)
    _note(job, shard)
    record = Record(shard=shard, documents=count, made_from=job.made_from, holds=job.holds)
    put(f"{job.url}/{job.name}.json", io.BytesIO(msgspec.json.encode(record)))
    return Made(size=job.size, record=record)


def _ids(how: Tokenizer, text: str | NoText, vocabulary: int) -> npt.NDArray[np.int64]:
    if isinstance(text, NoText):
        raise text
    try:
        ids = np.asarray(how.encode(text), np.int64)
    except Exception as error:  # whatever a tokenizer's package raises
        raise NoText(f"{how.name} can't encode it: {error}") from error
    if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        raise NoText(f"its token {at} is {ids[at]}, and ids are below the vocabulary, {vocabulary}")
    return ids


def _finished(job: Job) -> Record | None:
    """The record, if the shard was made from the same texts in the same way and is as it was written."""
    record = _record(job)
    if record is None or record.made_from != job.made_from:
        return None
    files, path = filesystem(job.url)
    try:
        with files.open(f"{path}/{record.shard.url}", "rb") as file:
            if md5_of(cast(BinaryIO, file)) != record.shard.md5sum:
                return None
    except FileNotFoundError:
        return None
    return record


def _of_others(job: Job) -> Record | None:
    """The record, if the shard was made of such texts; who made it has looked at its bytes."""
    record = _record(job)
    return record if record is not None and record.holds == job.holds else None


def _record(job: Job) -> Record | None:
    files, path = filesystem(job.url)
    try:
        return msgspec.json.decode(files.cat_file(f"{path}/{job.name}.json"), type=Record)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _note(job: Job, shard: Shard) -> None:
    """Whoever reads it here need not compare it: its MD5 is of what was written."""
    local = local_path(job.url)
    if local is None:
        return
    path = Path(local, shard.url)
    descriptor = opened(path)
    try:
        Verified().note(path, descriptor, shard.md5sum)
    finally:
        os.close(descriptor)
