"""How the values that the shards of a step give a buffer become one: the kinds, and their way through float64 lanes.

A forward pass may change buffers. Each shard begins with the same values (`start`), and lanes are summed over the
shards in the order of the tree, so the result depends on no worker. A buffer's kind says what becomes of its values:

    mean      the mean over the shards; for floating point, where nothing else is said
    agree     the value that all shards have; for integers and booleans, where nothing else is said. If two shards
              differ it is an error, since a mean of counts is none
    sum       start + the sum over the shards of (value - start): counters, histograms
    max       the largest value, elementwise; of booleans: any. Each shard has lanes of its own: `GlobalBatch` only
    last      that of the step's last micro-batch; where this has no usable sample, start
    gathered  each element from the one shard that has changed it: rows of samples. If two shards have, it is an error

Integers go as (value - start), which is exact up to 2^53. That all shards agree shows in sums: for numbers x of n
shards n * sum(x^2) = sum(x)^2 only if all are equal. x is the remainder of value - start by the prime `PRIME`, between
-PRIME / 2 and PRIME / 2, so that squares stay exact for as many shards as there may be.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from farandole.errors import UsageError

_log = logging.getLogger(__name__)

KINDS = ("mean", "sum", "max", "last", "gathered")
AGREE = "agree"
COUNTS_STEPS = "num_batches_tracked"  # of batch normalization; other counters may mean samples
PRIME = 65521
EXACT = float(1 << 53)
MOST_OF_AGREED = float(1 << 40)
MOST_LANES = 1 << 20  # of one buffer


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A buffer's lanes: `[at, at + width)`, of which the first `numel` are its values in most kinds."""

    name: str
    kind: str
    shape: torch.Size
    at: int
    width: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes[self.at : self.at + self.width]

    def values(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes[self.at : self.at + self.numel].view(self.shape)


class BufferLanes:
    """The lanes of `buffers`, by full name: first whether each has changed, then what their kinds need.

    `kinds`: by pattern of names (`fnmatch`), for those that are not to be of the usual kind. `shards`: the most that a
    step has, 0 if nobody knows.

    Attributes:
        count: of all lanes.
        kinds: of all buffers, by name.

    Raises:
        UsageError: a pattern without a buffer, an unknown kind, or one that does not fit.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], kinds: Mapping[str, str], shards: int = 0) -> None:
        self.kinds = {name: _kind(name, buffer, kinds) for name, buffer in buffers.items()}
        self._shards = shards
        agreed = [name for name, kind in self.kinds.items() if kind == AGREE]
        places: dict[str, _Part] = {}
        at = len(buffers)
        for name in [*agreed, *(name for name in buffers if name not in agreed)]:
            shape = real(buffers[name]).shape
            width = _width(self.kinds[name], shape.numel(), shards)
            if width > MOST_LANES:
                raise UsageError(
                    f"buffers: {name} of {shape.numel()} elements is too large for {self.kinds[name]!r} over {shards} "
                    f"micro-batches; use 'gathered' rows and take their maximum in the loop body"
                )
            places[name] = _Part(name=name, kind=self.kinds[name], shape=shape, at=at, width=width)
            at += width
        self._agreed = slice(len(buffers), len(buffers) + sum(places[name].width for name in agreed))
        self._squares = slice(at, at + self._agreed.stop - self._agreed.start)
        self.count = self._squares.stop
        self._parts = [places[name] for name in buffers]
        self._start64 = torch.zeros(self.count, dtype=torch.float64)
        self._lanes: torch.Tensor | None = None  # that `write` was called with last
        self._places: list[torch.Tensor] = []
        self._warned: set[str] = set()

    def begin(self, start: Sequence[torch.Tensor]) -> None:
        """The shards of a step begin with the values `start`."""
        for part, value in zip(self._parts, start, strict=True):
            if part.kind == AGREE:
                part.values(self._start64).copy_(value)

    def write(
        self, lanes: torch.Tensor, start: Sequence[torch.Tensor], now: Sequence[torch.Tensor], *, shard: int, last: bool
    ) -> None:
        """A shard has made `now` of `start`: fill `lanes`, shape (count,), the same memory each time.

        Raises:
            UsageError: an integer has changed by more than can be summed.
        """
        if not self._parts:
            return
        changed = [not torch.equal(*each) for each in zip(start, now, strict=True)]
        lanes[: len(changed)] = torch.tensor(changed, dtype=torch.float64)
        if self._lanes is not lanes:
            self._lanes, self._places = lanes, [part.values(lanes) for part in self._parts]
        for part, place, change, before, value in zip(self._parts, self._places, changed, start, now, strict=True):
            if part.kind in ("mean", AGREE):
                place.copy_(real(value))
            elif not change:
                part.of(lanes).zero_()
                if part.kind == "max":
                    self._fill(part, lanes, before, value, shard, last=last)
            else:
                self._fill(part, lanes, before, value, shard, last=last)
        if self._agreed.stop > self._agreed.start:
            self._write_agreed(lanes, changed, start, now)

    def _write_agreed(
        self, lanes: torch.Tensor, changed: list[bool], start: Sequence[torch.Tensor], now: Sequence[torch.Tensor]
    ) -> None:
        agreed = lanes[self._agreed]
        large = bool(agreed.numel()) and float(agreed.abs().max()) > EXACT
        agreed -= self._start64[self._agreed]
        if large:  # than float64 holds: the difference is exact in integers
            for part, change, before, value in zip(self._parts, changed, start, now, strict=True):
                if part.kind == AGREE and change:
                    part.values(lanes).copy_(_encoded(part, before, value))
                elif part.kind == AGREE:
                    part.values(lanes).zero_()
        if agreed.numel() and float(agreed.abs().max()) > MOST_OF_AGREED:
            [name] = [p.name for p in self._parts if p.kind == AGREE and p.of(lanes).abs().max() > MOST_OF_AGREED][:1]
            raise UsageError(_too_large(name))
        lanes[self._squares] = _residue(agreed).square_()

    def _fill(
        self, part: _Part, lanes: torch.Tensor, start: torch.Tensor, value: torch.Tensor, shard: int, *, last: bool
    ) -> None:
        part.of(lanes).zero_()
        code = _encoded(part, start, value)
        if part.kind == "sum":
            part.values(lanes).copy_(code if _is_integer(value) else _added(real(start), real(value)))
        elif part.kind == "last" and last:
            part.values(lanes).copy_(code)
            part.of(lanes)[-1] = 1.0
        elif part.kind == "gathered":
            other = _other(real(start), real(value)).cpu()
            part.values(lanes).copy_(torch.where(other, code, 0.0))
            part.of(lanes)[part.numel :] = other.reshape(-1)
        elif part.kind == "max":
            row = part.of(lanes).view(self._shards, 1 + part.numel)[shard]
            row[0] = 1.0
            row[1:] = code.reshape(-1)

    def read(
        self, lanes: torch.Tensor, start: Sequence[torch.Tensor], now: Sequence[torch.Tensor], shards: int
    ) -> None:
        """The reduced lanes of a step of so many shards: give the buffers `now` their values.

        Raises:
            UsageError: shards differ where they must agree, or have changed the same element of what is gathered.
        """
        changes = lanes[: len(self._parts)].tolist()
        self._check_agreed(lanes, shards)
        agreed = self._start64[: self._agreed.stop] + lanes[: self._agreed.stop] / shards
        large = bool(agreed.numel()) and float(agreed.abs().max()) > EXACT  # than float64 holds
        for part, change, before, buffer in zip(self._parts, changes, start, now, strict=True):
            if not change:
                buffer.copy_(before)
                continue
            into = real(buffer)
            values = part.values(lanes)
            if part.kind == "mean":
                mean = values / shards
                into.copy_(mean if into.is_floating_point() else mean.round())
            elif part.kind == AGREE:
                if shards > 1 and buffer.dtype != torch.bool and not part.name.endswith(COUNTS_STEPS):
                    self._warn(part.name)
                into.copy_(_decoded(part, before, values / shards) if large else part.values(agreed))
            elif part.kind == "sum":
                into.copy_(_decoded(part, before, values) if _is_integer(buffer) else _total(real(before), values))
            elif part.kind == "last":
                buffer.copy_(before)
                if part.of(lanes)[-1]:
                    into.copy_(_decoded(part, before, values))
            elif part.kind == "gathered":
                times = part.of(lanes)[part.numel :].view(part.shape)
                if times.numel() and times.max() > 1:
                    raise UsageError(
                        f"buffer {part.name}: several micro-batches of a step have changed the same element; what is "
                        f"gathered has a row for each sample: write to buffer[step.rows]"
                    )
                into.copy_(torch.where((times == 1).to(into.device), _decoded(part, before, values), real(before)))
            else:
                rows = part.of(lanes).view(self._shards, 1 + part.numel)
                into.copy_(_decoded(part, before, rows[rows[:, 0] > 0][:, 1:].amax(0).view(part.shape)))

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "buffer %s has grown alike in all micro-batches of a step, which counts once: if each is to count, say "
                "run.replicate(..., buffers={%r: 'sum'})", name, name,
            )  # fmt: skip

    def _check_agreed(self, lanes: torch.Tensor, shards: int) -> None:
        mean = lanes[self._agreed] / shards
        equal = (mean == mean.round()) & (lanes[self._squares] == _residue(mean).square_() * shards)
        if bool(equal.all()):
            return
        for part in self._parts:
            place = slice(part.at - self._agreed.start, part.at - self._agreed.start + part.width)
            if part.kind == AGREE and not bool(equal[place].all()):
                raise UsageError(
                    f"buffer {part.name} of integers or booleans is another after different micro-batches of a step, "
                    f"and a mean of counts is none: say what is meant, run.replicate(..., buffers="
                    f"{{{part.name!r}: 'sum'}}), or one of {', '.join(KINDS)}"
                )


def _kind(name: str, buffer: torch.Tensor, kinds: Mapping[str, str]) -> str:
    kind = next((kind for pattern, kind in kinds.items() if fnmatchcase(name, pattern)), None)
    if kind == "sum" and buffer.dtype == torch.bool:
        raise UsageError(f"buffers: {name} of booleans has no sum; use 'max' for any of them")
    if kind == "max" and buffer.is_complex():
        raise UsageError(f"buffers: {name} of complex numbers has no maximum")
    return kind or ("mean" if buffer.is_floating_point() or buffer.is_complex() else AGREE)


def check_kinds(kinds: Mapping[str, str], small: Mapping[str, torch.Tensor], large: Mapping[str, torch.Tensor]) -> None:
    """Raises UsageError for an unknown kind, and for a pattern of no buffer, or of one that is `large`."""
    for pattern, kind in kinds.items():
        if kind not in KINDS:
            raise UsageError(f"buffers={{{pattern!r}: {kind!r}}}: no such kind; use one of {', '.join(KINDS)}")
        if any(fnmatchcase(name, pattern) for name in large):
            [name] = [name for name in large if fnmatchcase(name, pattern)][:1]
            raise UsageError(
                f"buffers={{{pattern!r}: {kind!r}}}: {name} has {large[name].numel()} elements and is too large; "
                f"split it"
            )
        if not any(fnmatchcase(name, pattern) for name in small):
            known = ", ".join(small) or "none"
            raise UsageError(f"buffers={{{pattern!r}: {kind!r}}}: there is no such buffer; there are {known}")


def _width(kind: str, numel: int, shards: int) -> int:
    if kind == "max":
        if not shards:
            raise UsageError(
                "buffers: 'max' needs a constant batch (GlobalBatch); use 'gathered' rows and take their maximum in "
                "the loop body"
            )
        return shards * (1 + numel)
    return {"last": numel + 1, "gathered": 2 * numel}.get(kind, numel)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _encoded(part: _Part, start: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What goes into lanes: values, of integers the difference to the start."""
    if not _is_integer(value):
        return real(value).to("cpu", torch.float64)
    difference = (value.to(torch.int64) - start.to(torch.int64)).cpu()
    if difference.numel() and int(difference.abs().max()) > EXACT:
        raise UsageError(_too_large(part.name))
    return difference.double()


def _decoded(part: _Part, start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not _is_integer(start):
        return values.to(start.device)
    whole = start.to(torch.int64) + values.to(start.device, torch.int64)
    if start.dtype not in (torch.bool, torch.int64) and whole.numel():
        limits = torch.iinfo(start.dtype)
        if int(whole.min()) < limits.min or int(whole.max()) > limits.max:
            raise UsageError(f"buffer {part.name}: {int(whole.max())} does not fit into {start.dtype}; use torch.int64")
    return whole


def _other(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """True where elements are unequal; nan is nan."""
    return (one != other) & ~((one != one) & (other != other))


def _added(start: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    added = value.to(torch.float64) - start.to(torch.float64)
    return torch.where(_other(start, value), added, 0.0).cpu()


def _total(start: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    added = added.to(start.device)
    return torch.where(added == 0, start.to(torch.float64), start.to(torch.float64) + added)


def _too_large(name: str) -> str:
    return f"buffer {name} changed in one micro-batch by more than can be summed up; keep counts below 2**40"


def _residue(values: torch.Tensor) -> torch.Tensor:
    return values - (values / PRIME).round() * PRIME


def real(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, of complex numbers as a view of real ones."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
