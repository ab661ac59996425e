"""The ledger checks that every sample was used exactly once: each worker records what it computed and what was
committed.

A worker has one file, `<worker id>.jsonl`, with two kinds of lines. `computed` states which samples this worker
computed as which shard; it is written when the shard's backward pass is done. `committed` states that a step was
committed, and for each shard the worker whose computation counted; it is written when the step is applied. A shard that
is computed and not committed has lost a race, which is not an error. Each line is one `write` to a file opened for
appending, so kill -9 loses nothing that was written and at most leaves the last line torn, which `count` leaves out. A
shard of 64 samples takes 6 us and 510 bytes.

`count` trusts no single record: all workers' records of a step must name the same computations, each of these must
exist, and a computation that is recorded twice must be the same.

A run that goes back to a checkpoint repeats steps, and their earlier commits are void. Each beginning of the state is
an *origin*, with the step at which it began and the origin of the checkpoint, its parent. A worker records which origin
it has entered. A chain of origins counts, each origin up to the step at which the next began; of several chains the one
with the highest step counts. This uses no clock and no order of files.

A record that can't be written (a full disk) is lost; training goes on. The file's first line holds the number of lost
records. Its digits are overwritten in place, which needs no more room, even where there is none for a new line. `count`
refuses a ledger that lacks any record.

Left out: loss of a machine's disk cache (nothing is synced).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from farandole.errors import LedgerError, LedgerIncomplete, UsageError
from farandole.platform.files import make, opener

_SUFFIX = ".jsonl"


class _Computed(msgspec.Struct, frozen=True, tag="computed", forbid_unknown_fields=True, omit_defaults=True):
    epoch: int
    step: int
    shard: int
    samples: list[int]
    skipped: list[int] = []


class _Committed(msgspec.Struct, frozen=True, tag="committed", forbid_unknown_fields=True):
    epoch: int
    step: int
    shards: dict[int, str]


class _Entered(msgspec.Struct, frozen=True, tag="entered", forbid_unknown_fields=True):
    origin: str


class _Resumed(msgspec.Struct, frozen=True, tag="resumed", forbid_unknown_fields=True):
    origin: str
    step: int
    parent: str


class _Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """The first line of a file; `lost` always has the same number of digits."""

    lost: str


_Record = _Computed | _Committed | _Entered | _Resumed | _Opened
_decode = msgspec.json.Decoder(_Record).decode
_DIGITS = 12
_HEAD = msgspec.json.encode(_Opened("0" * _DIGITS)) + b"\n"
_LOST_AT = _HEAD.index(b"0" * _DIGITS)


class Ledger:
    """The records of one worker. `path` is `<folder>/<worker id>.jsonl`; makes the folder, continues an existing file.

    `lost_records` counts the records that could not be written. `tell` is called with the reason at the first of them.
    """

    def __init__(self, path: str | os.PathLike[str], tell: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        if self.path.suffix != _SUFFIX:
            raise UsageError(f"{self.path}: the name of a ledger must be <worker id>{_SUFFIX}")
        self.lost_records = 0
        self._tell = tell
        self._file = self._mark = -1
        self._headed = False
        with contextlib.suppress(OSError):  # no room for a file: the first record will be reported as lost
            self._open()

    def _open(self) -> None:
        make(self.path.parent)
        file = opener(str(self.path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        if self._mark < 0:  # this descriptor does not append: it can overwrite the first line
            self._mark = opener(str(self.path), os.O_WRONLY)
        whole = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(file, whole)  # the next record would be joined to a line that an earlier process left torn
        self._file, self._headed = file, whole > 0

    def entered(self, *, origin: str) -> None:
        """Records that all following records of this worker belong to the state that began as `origin`."""
        self._append(_Entered(origin))

    def resumed(self, *, origin: str, step: int, parent: str) -> None:
        """Records that `origin` begins at `step` with the state of `parent` then; "" for the run's beginning."""
        self._append(_Resumed(origin, step, parent))

    def computed(
        self, *, epoch: int, step: int, shard: int, samples: Sequence[int], skipped: Sequence[int] = ()
    ) -> None:
        """Records that this worker computed `samples` as `shard` of `step`, and left out the bad samples `skipped`."""
        self._append(_Computed(epoch, step, shard, [int(sample) for sample in samples], [int(s) for s in skipped]))

    def committed(self, *, epoch: int, step: int, shards: Mapping[int, str]) -> None:
        """Records that `step` is applied; `shards` names for each shard the worker whose computation counted."""
        self._append(_Committed(epoch, step, dict(shards)))

    def close(self) -> None:
        for handle in (self._file, self._mark):
            if handle >= 0:
                os.close(handle)

    def _append(self, record: _Record) -> None:
        try:
            if self._file < 0:
                self._open()
            if not self._headed:
                self._write(_HEAD)
                self._headed = True
            self._write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            self.lost_records += 1
            if self.lost_records == 1 and self._tell:
                self._tell(f"{self.path}: {error.strerror}")
        if self.lost_records:
            self._record_lost()

    def _write(self, line: bytes) -> None:
        """Writes the whole line or nothing."""
        written = os.write(self._file, line)
        if written != len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _record_lost(self) -> None:
        """Writes the number of lost records into the first line."""
        with contextlib.suppress(OSError):
            if self._headed:
                os.pwrite(self._mark, f"{self.lost_records:0{_DIGITS}}".encode(), _LOST_AT)


def count(folder: str | os.PathLike[str]) -> Counter[tuple[int, int]]:
    """Counts how often each (epoch, sample) went into a committed step, over the ledgers of all workers in `folder`.

    Raises:
        LedgerError: the records contradict each other; names the first difference.
        LedgerIncomplete: records are missing because they could not be written.
    """
    return _read(folder).count()


def skipped(folder: str | os.PathLike[str]) -> Counter[tuple[int, int]]:
    """Counts how often each (epoch, sample) was left out of a committed step because it was bad, or, after an epoch's
    last step, by `drop_last`. Raises as `count` does.
    """
    return _read(folder).count(skipped=True)


def _read(folder: str | os.PathLike[str]) -> _Records:
    state = _Records()
    for path in sorted(Path(folder).glob("*" + _SUFFIX)):
        origin = ""
        for record in _records(path):
            if isinstance(record, _Entered):
                origin = record.origin
            elif isinstance(record, _Opened):
                _check_whole(path, record)
            else:
                state.enter(origin, path.stem, record)
    return state


class _Records:
    """The records of all workers, by origin."""

    def __init__(self) -> None:
        self.computed: dict[tuple[str, str, int, int, int], tuple[list[int], list[int]]] = {}
        self.committed: dict[tuple[str, int, int], tuple[str, dict[int, str]]] = {}
        self.resumed: dict[str, _Resumed] = {}

    def enter(self, origin: str, worker: str, record: _Record) -> None:
        match record:
            case _Computed(epoch, step, shard, samples, skipped):
                lists = samples, skipped
                if self.computed.setdefault((origin, worker, epoch, step, shard), lists) != lists:
                    raise LedgerError(f"{_place(epoch, step, shard)}: {worker} computed it twice, of different samples")
            case _Committed(epoch, step, shards):
                first, known_shards = self.committed.setdefault((origin, epoch, step), (worker, shards))
                _agree((epoch, step), first, known_shards, worker, shards)
            case _Resumed():
                if self.resumed.setdefault(record.origin, record) != record:
                    raise LedgerError(f"origin {record.origin}: it was resumed twice, differently")
            case _Entered() | _Opened():
                raise AssertionError("`_read` handles these records")

    def lineage(self) -> dict[str, float]:
        """Returns the origins that count, each with the step from which on the steps of the next origin count.

        Of several origins that resumed from the same checkpoint, the one with the highest committed step counts.
        """
        furthest: dict[str, int] = {}
        for origin, _, step in self.committed:
            furthest[origin] = max(step, furthest.get(origin, -1))
        ends: dict[str, float] = {}
        origin = max(furthest, key=lambda o: (furthest[o], o not in self._parents()), default="")
        end = float("inf")
        while origin not in ends:
            ends[origin] = end
            resumption = self.resumed.get(origin)
            if resumption is None or (resumption.step == 0 and not resumption.parent):
                break
            origin, end = resumption.parent, resumption.step
        return ends

    def _parents(self) -> set[str]:
        return {record.parent for record in self.resumed.values()}

    def count(self, *, skipped: bool = False) -> Counter[tuple[int, int]]:
        ends = self.lineage()
        counts: Counter[tuple[int, int]] = Counter()
        for (origin, epoch, step), (witness, shards) in sorted(self.committed.items()):
            if step >= ends.get(origin, 0):
                continue
            for shard, worker in sorted(shards.items()):
                computed = self.computed.get((origin, worker, epoch, step, shard))
                if computed is None:
                    raise LedgerError(
                        f"{_place(epoch, step, shard)}: {witness} counted {worker}'s computation, which {worker} did "
                        f"not record"
                    )
                counts.update((epoch, sample) for sample in computed[skipped])
        return counts


def _records(path: Path) -> Iterator[_Record]:
    *whole, _torn = path.read_bytes().split(b"\n")  # bytes after the last line end are an unfinished record
    for number, line in enumerate(whole, start=1):
        try:
            yield _decode(line)
        except msgspec.DecodeError as error:
            raise LedgerError(f"{path}, line {number}: not a record of a ledger ({error})") from error


def _check_whole(path: Path, opened: _Opened) -> None:
    if int(opened.lost):
        raise LedgerIncomplete(
            f"{path}: incomplete, {int(opened.lost)} of its records could not be written, so it can't be counted; give "
            f"the run's folder more room, or leave out --ledger"
        )


def _agree(step: tuple[int, int], first: str, shards: dict[int, str], second: str, others: dict[int, str]) -> None:
    for shard in sorted(shards.keys() | others.keys()):
        if shards.get(shard) != others.get(shard):
            raise LedgerError(
                f"{_place(*step, shard)}: {first} counted {shards.get(shard, 'nobody')}'s, "
                f"{second} counted {others.get(shard, 'nobody')}'s"
            )


def _place(epoch: int, step: int, shard: int) -> str:
    return f"epoch {epoch}, step {step}, shard {shard}"
