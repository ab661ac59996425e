"""`Stream` gives the samples of an iterable dataset by their index: it reads forward, and goes back where it must.

So an iterable dataset is a map-style one for the loader, in the order in which the dataset yields. Why each worker sees
the same sample at the same index:

1. Every process reads the whole stream, and keeps the samples of its own micro-batches. Nothing depends on the number
   of workers or processes: `get_worker_info()` is None while the dataset is read.
2. The random state before each sample depends on (run's seed, epoch, index) alone, for samples that are read and left
   alone too. `set_epoch(epoch)` is called before an epoch is read.
3. The dataset must yield the same samples each time it is iterated over. The first `CHECKED` samples are read twice
   when the stream is made. Their digest is part of the worker's signature, so it is equal on all workers.
4. Where samples before the present place are needed (of a lost worker, in another pass over a batch), the newest `keep`
   samples are still here. Earlier ones are read once more: from a *mark* at or before them, or from the beginning.
5. A mark is a state of the dataset (`state_dict`, as torchdata's StatefulDataLoader uses it) with its epoch, its index
   and the digest of the `PROOF` samples that were read after it. Whoever seeks to a mark reads these samples and
   compares. A state that leads to others, such as that of a shuffle buffer without its content, is never used: the
   stream is read from its beginning.
6. A mark is a shortcut and no part of the state that workers compare. A joiner gets the newest one of one member, and
   a checkpoint has that of its writer. Without any, the samples before are read and left alone.

Cost in time: each process reads all samples of the stream, and takes 20 us for each beside that (7 of them seed the
global generators); with states a digest of `PROOF` in `every` samples. In memory: `keep` samples.

Left out: several processes a worker; bad samples that are skipped, since an iterator has ended when it raises; states
of others' types than `collective/state_transfer.py` sends, which stay in their process.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from farandole.collective.state_transfer import Snapshot, restore
from farandole.data.epochs import Epochs
from farandole.data.order import derive, keep_random_state, own_generators, seed_all, set_random_state
from farandole.errors import BadSample, FarandoleError, UnknownState, UsageError
from farandole.platform import output
from farandole.platform.bounds import whole

ENDLESS = 1 << 53  # the length of a stream whose length nobody states
CHECKED = 8  # samples at the beginning, which are read twice
PROOF = 32  # samples after a mark
MARKS = 32  # that a process keeps; they are at least a batch apart
_log = logging.getLogger(__name__)
_torch: Any = torch_worker
_NONE = object()
_readers: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()  # by the dataset's id: who read last
_initial_states: dict[int, tuple[Any, Any]] = {}  # by the dataset's id: a reference to it, and its first state


def is_stream(dataset: Any) -> bool:
    """Returns True if `dataset` can be iterated over and has no samples by index."""
    return isinstance(dataset, IterableDataset)


class StreamMark(NamedTuple):
    """A place at which reading may begin."""

    epoch: int
    start: int  # the index of the first sample after it
    state: Any
    proof: bytes  # a digest of the samples [start, start + PROOF)


@dataclass
class _Reader:
    """One iteration over the dataset."""

    iterator: Iterator[Any]
    epoch: int
    index: int  # of the sample that comes next
    reads: int = 0
    generators: Sequence[Any] = ()
    unproved: deque[tuple[StreamMark, Any]] = field(
        default_factory=lambda: deque[tuple[StreamMark, Any]]()
    )  # with their hashes


class StreamEnded(UsageError):
    """The stream has fewer samples than the run needs."""


class Streamed(NamedTuple):
    """A micro-batch of a loader process, with the marks that the process has made since its last one, packed."""

    batch: Any
    marks: list[bytes]


class Stream:
    """The samples of an iterable dataset by index, in the epoch of the last `set_epoch`.

    Attributes:
        dataset: the iterable dataset.
        length: the number of samples of an epoch; `ENDLESS` if it is not known.
        digest: the first 16 hex digits of a SHA-256 of the first `CHECKED` samples of epoch 0.
    """

    def __init__(self, dataset: Any, seed: int, *, samples: int | None = None, keep: int = 0, every: int = 256) -> None:
        """Reads the first samples, twice. `samples`: the length of a dataset that has no `len()`.

        `keep`: the samples that it holds, beside `PROOF`. `every`: samples from one mark to the next.

        Raises:
            UsageError: two iterations yield other samples or none, the length is unknown where it is needed, or the
                dataset is one node's part.
        """
        self.dataset, self._kind = dataset, type(dataset).__name__
        self._seed, self._keep, self._every = seed, keep + PROOF, max(every, PROOF)
        self._refuse_parts()
        self.length = self._length(samples)
        self._epochs = Epochs(dataset)
        self._epoch = 0
        self._reader: _Reader | None = None
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()  # by epoch and index
        self._marks: deque[StreamMark] = deque(maxlen=MARKS)
        self._unsent: list[StreamMark] = []
        self._given: list[bytes] = []
        self._seeks = True  # False once a state has led to other samples
        self._initial = _initial_state(dataset)
        self.digest = self._checked()

    def __str__(self) -> str:
        return f"that of a {self._kind}, first samples {self.digest}"

    def set_epoch(self, epoch: int) -> None:
        """Samples are those of `epoch` from now on."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        """Returns a copy of sample `index` of the epoch.

        Raises:
            BadSample: the dataset raises while it is read.
            UsageError: it ends before this sample, or goes on after the last one.
        """
        key = self._epoch, index
        if key not in self._kept:
            self._read_up_to(index)
        try:
            return deepcopy(self._kept[key])  # a collate function may change it
        except Exception:  # noqa: BLE001  whatever a class raises
            return self._kept.pop(key)

    # --- marks ---------------------------------------------------------------------------------------------------

    def mark(self, epoch: int, index: int) -> bytes:
        """Returns the newest mark at or before sample `index` of `epoch`, packed; b"" if there is none."""
        best = self._best(epoch, index)
        return b"" if best is None else self._packed(best)

    def learn(self, marks: Iterable[bytes], *, given: bool = True) -> None:
        """Takes over packed marks of another process. It leaves out what is no mark; b"" is none.

        `given`: they are of another worker or a checkpoint, so this worker's loader process has to get them too.
        """
        for packed in filter(None, marks):
            try:
                self._add(_unpacked(packed))
                self._given += [packed] if given else []
            except Exception as error:  # noqa: BLE001  a member sent it: whatever decoding raises
                _log.warning("a mark of the stream can't be read: %s", error)

    def given_marks(self) -> list[bytes]:
        """Returns the marks that `learn` was given since the last call."""
        given, self._given = self._given, []
        return given

    def new_marks(self) -> list[bytes]:
        """Returns the marks that were made since the last call, packed."""
        marks, self._unsent = self._unsent, []
        return [packed for mark in marks if (packed := self._packed(mark))]

    def _add(self, mark: StreamMark) -> None:
        if all(mark[:2] != other[:2] for other in self._marks):
            self._marks.append(mark)

    def _best(self, epoch: int, index: int) -> StreamMark | None:
        marks = [mark for mark in tuple(self._marks) if mark.epoch == epoch and mark.start <= index]
        return max(marks, key=lambda mark: mark.start, default=None) if self._seeks else None

    def _packed(self, mark: StreamMark) -> bytes:
        try:
            snapshot = Snapshot({"requires_grad": [], "mark": list(mark)})
        except UnknownState as error:
            output.warn_once(
                _log, f"the state of {self._kind} stays in its process, so workers that join read the stream from its "
                f"beginning: {error}"
            )  # fmt: skip
            return b""
        content = snapshot.piece(0, snapshot.bytes).numpy().tobytes()
        return len(snapshot.skeleton).to_bytes(8, "little") + snapshot.skeleton + content

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_up_to(self, index: int) -> None:
        other = _readers.get(id(self.dataset))
        if other is not None and other is not self:
            other._reader = None  # a dataset may keep its place itself
        _readers[id(self.dataset)] = self
        reader, best = self._reader, self._best(self._epoch, index)
        at = best.start if best else 0
        if reader is None or reader.epoch != self._epoch or not at <= reader.index <= index:
            reader = self._seek(best)
            if index - reader.index > self._keep + self._every:
                _log.warning(
                    "%s: reads %d samples of epoch %d from sample %d on, to reach sample %d",
                    self._kind, index - reader.index, self._epoch, reader.index, index,
                )  # fmt: skip
        while reader.index <= index:
            self._read(reader)

    def _seek(self, mark: StreamMark | None) -> _Reader:
        """Begins to read at `mark`, None: at the epoch's beginning."""
        self._reader = None
        if mark is None:
            return self._begin()
        try:
            reader = self._begin(mark)
            hasher = hashlib.blake2b()
            for _ in range(PROOF):
                feed(hasher, self._read(reader))
            if hasher.digest() == mark.proof:
                return reader
            what = "leads to other samples than those that came after it"
        except Exception as error:  # noqa: BLE001  whatever a dataset raises for a state that it can't load
            what = f"can't be used ({type(error).__name__}: {error})"
        output.warn_once(
            _log, f"the state of {self._kind} {what}, as that of a shuffle buffer does; its states are not used, and "
            f"the stream is read from its beginning wherever a worker must go back or joins"
        )  # fmt: skip
        self._seeks, self._reader = False, None
        self._marks.clear()
        self._kept.clear()
        return self._begin()

    def _begin(self, mark: StreamMark | None = None) -> _Reader:
        dataset = self.dataset
        set_random_state(derive(self._seed, "stream", self._epoch))
        seed_all(own_generators(dataset), derive(self._seed, "stream", self._epoch))
        if mark is None and self._initial is not _NONE:
            dataset.load_state_dict(deepcopy(self._initial))
        self._epochs.enter(self._epoch, call_all=True)
        state = None if mark is None else deepcopy(mark.state)
        if mark is not None and _is_stateful(dataset):
            dataset.load_state_dict(state)
        with _no_worker_info():
            iterator: Any = iter(dataset)
        if mark is not None and _is_stateful(iterator):
            iterator.load_state_dict(state)
        self._reader = _Reader(iterator, self._epoch, 0 if mark is None else mark.start)
        return self._reader

    def _read(self, reader: _Reader) -> Any:
        """Returns the next sample, and keeps it."""
        epoch, index = reader.epoch, reader.index
        self._make_mark(reader)
        value = derive(self._seed, "sample", epoch, index)
        set_random_state(value)
        if reader.reads < 2:  # the first `next` may have made generators
            reader.generators = own_generators(self.dataset)
        seed_all(reader.generators, value)
        try:
            sample = self._next(reader, index)
            if sample is _NONE:
                raise self._ended(epoch, index)
            reader.index, reader.reads = index + 1, reader.reads + 1
            if reader.index == self.length and self._next(reader, reader.index) is not _NONE:
                raise UsageError(
                    f"{self._kind} yields more than {self.length} samples in epoch {epoch}, which is its length; "
                    f"correct the length, or end the stream there: itertools.islice(samples, {self.length}), or "
                    f".take({self.length}) of a datasets.IterableDataset"
                )
        except BaseException:
            self._reader = None  # it may have ended
            raise
        self._kept[epoch, index] = sample
        self._kept.move_to_end((epoch, index))
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        self._prove(reader, sample)
        return sample

    def _next(self, reader: _Reader, index: int) -> Any:
        try:
            with _no_worker_info():
                return next(reader.iterator, _NONE)
        except (FarandoleError, MemoryError, OSError):
            raise
        except Exception as error:
            raise BadSample(
                f"sample {index} of {self._kind}, in epoch {reader.epoch}: {type(error).__name__}: {error}; repair it, "
                f"or leave it out where the stream is read: an iterator has ended when it raises"
            ) from error

    def _ended(self, epoch: int, index: int) -> StreamEnded:
        if self.length == ENDLESS:
            return StreamEnded(
                f"{self._kind} ended after {index} samples, and the run needs more; give the number of samples of an "
                f"epoch, run.loader(..., samples={index}), or repeat the stream"
            )
        return StreamEnded(
            f"{self._kind} ended after {index} samples in epoch {epoch}, and its length is {self.length}; correct the "
            f"length, which must be the same in each epoch"
        )

    def _make_mark(self, reader: _Reader) -> None:
        if not self._seeks or not reader.index or reader.index % self._every:
            return
        source: Any = reader.iterator if _is_stateful(reader.iterator) else self.dataset
        if _is_stateful(source):
            mark = StreamMark(reader.epoch, reader.index, deepcopy(source.state_dict()), b"")
            reader.unproved.append((mark, hashlib.blake2b()))

    def _prove(self, reader: _Reader, sample: Any) -> None:
        for mark, hasher in tuple(reader.unproved):
            feed(hasher, sample)
            if reader.index == mark.start + PROOF:
                reader.unproved.popleft()
                proved = mark._replace(proof=hasher.digest())
                self._add(proved)
                self._unsent = [*self._unsent[1 - MARKS :], proved]

    # --- at the beginning ----------------------------------------------------------------------------------------

    def _checked(self) -> str:
        """Returns the digest of the first samples. Raises UsageError if a second iteration yields others."""
        put_back, threads = keep_random_state(), torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            first, second = self._first(), self._first()
        finally:
            put_back()
            torch.set_num_threads(threads)
            self._reader = None
            self._kept.clear()
        if first[0] == 0:
            raise UsageError(f"{self._kind} yields no sample: a dataset needs at least one sample")
        if first != second:
            raise UsageError(
                f"{self._kind} yields other samples when it is iterated over again: a worker that joins, or takes over "
                f"from a lost one, must read the same ones; return a new iterator from __iter__(), draw random numbers "
                f"from torch's, NumPy's or Python's global generator, and write what comes once (a socket, a queue) to "
                f"files first"
            )
        count, digest = first
        if count < min(CHECKED, self.length) and self.length != ENDLESS:
            raise self._ended(0, count)
        return digest

    def _first(self) -> tuple[int, str]:
        """Returns how many samples there are at the beginning, at most `CHECKED`, and their digest."""
        reader, hasher = self._begin(), hashlib.sha256()
        with suppress(StreamEnded):
            for _ in range(min(CHECKED, self.length)):
                feed(hasher, self._read(reader))
        return reader.index, hasher.hexdigest()[:16]

    def _refuse_parts(self) -> None:
        """Raises UsageError for a part of a dataset of Hugging Face, which belongs to one node."""
        part: Any = getattr(self.dataset, "_distributed", None)
        if part is not None and getattr(part, "world_size", 1) != 1:
            raise UsageError(
                f"this {self._kind} is the part of rank {part.rank} of {part.world_size}: leave out "
                f"split_dataset_by_node, because the workers divide each batch among them"
            )

    def _length(self, samples: int | None) -> int:
        own: int | None = None
        if hasattr(self.dataset, "__len__"):
            try:
                own = len(cast(Sized, self.dataset))
            except (TypeError, NotImplementedError):  # torch's wrappers have a len() that asks the dataset within
                own = None
        if samples is None:
            return ENDLESS if own is None else whole(f"the length of {self._kind}, {{}}", own, 1, why="samples")
        given = whole("run.loader(samples={})", samples, 1, ENDLESS - 1, why="samples of an epoch")
        if own is not None and own != given:
            raise UsageError(f"run.loader(samples={given}): {self._kind} has len() {own}; leave out `samples`")
        return given


def _initial_state(dataset: Any) -> Any:
    """Returns the state that `dataset` had before it was read by any stream; `_NONE` if it has none."""
    reference, state = _initial_states.get(id(dataset), (_NONE, _NONE))
    if reference is not _NONE and reference() is dataset:
        return state
    state = _NONE
    if _is_stateful(dataset):
        try:
            state = deepcopy(dataset.state_dict())
        except Exception as error:  # noqa: BLE001  some have a state only while they are iterated over
            _log.debug("%s has no state before it is read: %s", type(dataset).__name__, error)
    _initial_states[id(dataset)] = weakref.ref(dataset), state
    return state


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


@contextmanager
def _no_worker_info() -> Generator[None]:
    """Hides that this is a loader process: a dataset would yield its part only."""
    info, _torch._worker_info = _torch._worker_info, None
    try:
        yield
    finally:
        _torch._worker_info = info


def _unpacked(packed: bytes) -> StreamMark:
    size = int.from_bytes(packed[:8], "little")
    payload = torch.frombuffer(bytearray(packed[8 + size :]) or bytearray(1), dtype=torch.uint8)
    content = restore(packed[8 : 8 + size], payload[: len(packed) - 8 - size])
    epoch, index, state, proof = content["mark"]
    return StreamMark(int(epoch), int(index), state, bytes(proof))


def feed(hasher: Any, value: Any) -> None:
    """Adds the content of a sample to a hash: of other objects than tensors, arrays, plain values, containers of these
    and what has `tobytes()`, the class alone."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        hasher.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        hasher.update(f"{len(entries)}:".encode())
        for name, each in entries.items():
            feed(hasher, name)
            feed(hasher, each)
    elif isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        hasher.update(f"{len(items)};".encode())
        for each in items:
            feed(hasher, each)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        text = repr(value).encode()
        hasher.update(f"{len(text)}=".encode() + text)
    elif callable(to_bytes := getattr(value, "tobytes", None)):
        hasher.update(to_bytes())
    else:
        hasher.update(type(value).__qualname__.encode())
