"""The replica: the user's modules, optimizers and schedulers as one state.

Every worker holds the same replica, bit for bit, between two steps. This file lists its parameters and buffers, takes
and restores its state, names its differences, and computes its fingerprint. It does not depend on views.

Buffers: a forward pass may change them (running statistics), and the result of a shard must not depend on the worker
that computed other shards before. So before each shard they get the values that they had when the inner loop began.
After the step they get one value from those of the shards, carried in the exchange's float64 lanes (`BufferLanes`): the
mean, or another reduction that the script has selected.

The loop body may set buffers before the inner loop (for example a temperature that falls). So each buffer has two
values: that at the step's beginning, which is the state, and that at the inner loop's beginning. A joiner, or a run
that is resumed, begins with the step and runs the loop body itself: with the second value it would apply
`buffer.mul_(0.9)` twice.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from farandole.collective.buckets import ALIGNMENT
from farandole.collective.state_transfer import decode, encode
from farandole.errors import UnknownState, UsageError

# --- buffer lanes -----------------------------------------------------------------------------------------------------
#
# The reduction of a buffer's values after the shards of a step to one value: the kinds, and their float64 lanes.
#
# A forward pass may change buffers. Each shard begins with the same values (`start`), and lanes are summed over the
# shards in the order of the tree, so the result does not depend on the workers. A buffer's kind is its reduction:
#
#     mean      the mean over the shards; the default for floating point
#     agree     the value that all shards have; the default for integers and booleans. If two shards differ it is an
#               error, because a mean of counts has no meaning
#     sum       start + the sum over the shards of (value - start): counters, histograms
#     max       the largest value, elementwise; for booleans: any. Each shard has its own lanes: `GlobalBatch` only
#     last      the value after the step's last micro-batch; `start` if this has no usable sample
#     gathered  each element from the one shard that has changed it: rows of samples. If two shards have, it is an error
#
# Lanes carry integers as (value - start), which is exact up to 2^53. Sums show that all shards agree: for numbers x of
# n shards n * sum(x^2) = sum(x)^2 only if all are equal. x is the remainder of value - start by the prime `PRIME`,
# between -PRIME / 2 and PRIME / 2, so that squares stay exact for the largest number of shards.

_log = logging.getLogger(__name__)
KINDS = ("mean", "sum", "max", "last", "gathered")
AGREE = "agree"
COUNTS_STEPS = "num_batches_tracked"  # batch normalization's counter of steps; other counters may count samples
PRIME = 65521
EXACT = float(1 << 53)
MOST_OF_AGREED = float(1 << 40)
MOST_LANES = 1 << 20  # most lanes of one buffer


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A buffer's lanes: `[at, at + width)`. For most kinds the first `numel` of them are its values."""

    name: str
    kind: str
    shape: torch.Size
    at: int
    width: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def select(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes[self.at : self.at + self.width]

    def values(self, lanes: torch.Tensor) -> torch.Tensor:
        return lanes[self.at : self.at + self.numel].view(self.shape)


class BufferLanes:
    """The lanes of `buffers`, by full name: first one lane per buffer, 1 if it has changed, then those of the kinds.

    All values that its methods take are in host memory (`HostCopies`).

    `kinds`: kind by pattern of names (`fnmatch`), for buffers that do not use the default kind. `shards`: the largest
    number of shards in a step, 0 if unknown.

    Attributes:
        count: the number of all lanes.
        kinds: the kinds of all buffers, by name.

    Raises:
        UsageError: a pattern matches no buffer, a kind is unknown, or a kind does not fit its buffer.
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
        self._lanes: torch.Tensor | None = None  # the argument of the last call of `write`
        self._places: list[torch.Tensor] = []
        self._warned: set[str] = set()

    def begin(self, start: Sequence[torch.Tensor]) -> None:
        """Set the values `start` with which the shards of a step begin."""
        for part, value in zip(self._parts, start, strict=True):
            if part.kind == AGREE:
                part.values(self._start64).copy_(value)

    def write(
        self, lanes: torch.Tensor, start: Sequence[torch.Tensor], now: Sequence[torch.Tensor], *, shard: int, last: bool
    ) -> None:
        """Fill `lanes` after a shard that has changed the buffers from `start` to `now`.

        `lanes` has shape (count,), and is the same memory in each call.

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
                part.select(lanes).zero_()
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
        if large:  # larger than float64 holds exactly: the difference is exact in integers
            for part, change, before, value in zip(self._parts, changed, start, now, strict=True):
                if part.kind == AGREE and change:
                    part.values(lanes).copy_(_encoded(part, before, value))
                elif part.kind == AGREE:
                    part.values(lanes).zero_()
        if agreed.numel() and float(agreed.abs().max()) > MOST_OF_AGREED:
            too_large = (p for p in self._parts if p.kind == AGREE and p.select(lanes).abs().max() > MOST_OF_AGREED)
            raise UsageError(_too_large(next(too_large).name))
        lanes[self._squares] = _residue(agreed).square_()

    def _fill(
        self, part: _Part, lanes: torch.Tensor, start: torch.Tensor, value: torch.Tensor, shard: int, *, last: bool
    ) -> None:
        part.select(lanes).zero_()
        code = _encoded(part, start, value)
        if part.kind == "sum":
            part.values(lanes).copy_(code if _is_integer(value) else _added(real(start), real(value)))
        elif part.kind == "last" and last:
            part.values(lanes).copy_(code)
            part.select(lanes)[-1] = 1.0
        elif part.kind == "gathered":
            other = _other(real(start), real(value))
            part.values(lanes).copy_(torch.where(other, code, 0.0))
            part.select(lanes)[part.numel :] = other.reshape(-1)
        elif part.kind == "max":
            row = part.select(lanes).view(self._shards, 1 + part.numel)[shard]
            row[0] = 1.0
            row[1:] = code.reshape(-1)

    def read(
        self, lanes: torch.Tensor, start: Sequence[torch.Tensor], now: Sequence[torch.Tensor], shards: int
    ) -> None:
        """Set the buffers `now` from the reduced lanes of a step of `shards` shards.

        Raises:
            UsageError: shards differ in a buffer that must agree, or have changed the same element of a gathered one.
        """
        changes = lanes[: len(self._parts)].tolist()
        self._check_agreed(lanes, shards)
        agreed = self._start64[: self._agreed.stop] + lanes[: self._agreed.stop] / shards
        large = bool(agreed.numel()) and float(agreed.abs().max()) > EXACT  # larger than float64 holds exactly
        for part, change, before, buffer in zip(self._parts, changes, start, now, strict=True):
            if not change:
                buffer.copy_(before)
                continue
            target = real(buffer)
            values = part.values(lanes)
            if part.kind == "mean":
                mean = values / shards
                target.copy_(mean if target.is_floating_point() else mean.round())
            elif part.kind == AGREE:
                if shards > 1 and buffer.dtype != torch.bool and not part.name.endswith(COUNTS_STEPS):
                    self._warn(part.name)
                target.copy_(_decoded(part, before, values / shards) if large else part.values(agreed))
            elif part.kind == "sum":
                target.copy_(_decoded(part, before, values) if _is_integer(buffer) else _total(real(before), values))
            elif part.kind == "last":
                buffer.copy_(before)
                if part.select(lanes)[-1]:
                    target.copy_(_decoded(part, before, values))
            elif part.kind == "gathered":
                times = part.select(lanes)[part.numel :].view(part.shape)
                if times.numel() and times.max() > 1:
                    raise UsageError(
                        f"buffer {part.name}: several micro-batches of a step have changed the same element; a "
                        f"'gathered' buffer has a row for each sample: write to buffer[step.rows]"
                    )
                target.copy_(torch.where(times == 1, _decoded(part, before, values), real(before)))
            else:
                rows = part.select(lanes).view(self._shards, 1 + part.numel)
                target.copy_(_decoded(part, before, rows[rows[:, 0] > 0][:, 1:].amax(0).view(part.shape)))

    def _warn(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning(
                "buffer %s has changed equally in all micro-batches of a step, and the change counts once: to add all "
                "changes, use run.replicate(..., buffers={%r: 'sum'})", name, name,
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
                    f"buffer {part.name} of integers or booleans differs after different micro-batches of a step, and "
                    f"a mean of counts has no meaning: name a reduction, run.replicate(..., buffers="
                    f"{{{part.name!r}: 'sum'}}), or another of {', '.join(KINDS)}"
                )


def _kind(name: str, buffer: torch.Tensor, kinds: Mapping[str, str]) -> str:
    kind = next((kind for pattern, kind in kinds.items() if fnmatchcase(name, pattern)), None)
    if kind == "sum" and buffer.dtype == torch.bool:
        raise UsageError(f"buffers: {name} of booleans has no sum; use 'max' for a logical or")
    if kind == "max" and buffer.is_complex():
        raise UsageError(f"buffers: {name} of complex numbers has no maximum")
    return kind or ("mean" if buffer.is_floating_point() or buffer.is_complex() else AGREE)


def check_kinds(kinds: Mapping[str, str], small: Mapping[str, torch.Tensor], large: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError for an unknown kind, and for a pattern that matches no buffer, or one of `large`."""
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
            names = ", ".join(small) or "none"
            raise UsageError(f"buffers={{{pattern!r}: {kind!r}}}: no such buffer; the buffers are {names}")


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
    """Return the numbers for the lanes: the values, or for integers their difference to `start`."""
    if not _is_integer(value):
        return real(value).to(torch.float64)
    difference = value.to(torch.int64) - start.to(torch.int64)
    if difference.numel() and int(difference.abs().max()) > EXACT:
        raise UsageError(_too_large(part.name))
    return difference.double()


def _decoded(part: _Part, start: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the buffer's values from numbers of lanes. Raises UsageError if one does not fit into its dtype."""
    if not _is_integer(start):
        return values
    whole = start.to(torch.int64) + values.to(torch.int64)
    if start.dtype not in (torch.bool, torch.int64) and whole.numel():
        limits = torch.iinfo(start.dtype)
        if int(whole.min()) < limits.min or int(whole.max()) > limits.max:
            raise UsageError(f"buffer {part.name}: {int(whole.max())} does not fit into {start.dtype}; use torch.int64")
    return whole


def _other(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return True for each element that differs; nan equals nan."""
    return (one != other) & ~((one != one) & (other != other))


def _added(start: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    added = value.to(torch.float64) - start.to(torch.float64)
    return torch.where(_other(start, value), added, 0.0)


def _total(start: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    return torch.where(added == 0, start.to(torch.float64), start.to(torch.float64) + added)


def _too_large(name: str) -> str:
    return f"buffer {name} changed in one micro-batch by more than can be summed; keep counts below 2**40"


def _residue(values: torch.Tensor) -> torch.Tensor:
    return values - (values / PRIME).round() * PRIME


def real(buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer itself, or for complex numbers a view of it as real numbers."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


class HostCopies:
    """Copies of `buffers` in host memory. A buffer in host memory is its own copy.

    Those of an accelerator are moved together, in one transfer for each dtype: a net with batch normalization has a
    hundred buffers, and each transfer waits for the device.

    `values`: the copies, in the order of the buffers.
    `force`: copy buffers in host memory too, to test without a device.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, force: bool = False) -> None:
        self.values = list(buffers)
        self._transfers: list[_Transfer] = []
        for places in _alike(buffers):
            tensors = [buffers[place] for place in places]
            if force or tensors[0].device.type != "cpu":
                transfer = _Transfer(tensors)
                self._transfers.append(transfer)
                for place, value in zip(places, transfer.values, strict=True):
                    self.values[place] = value

    def fetch(self) -> list[torch.Tensor]:
        """Set the copies to the buffers' present values, and return them."""
        for transfer in self._transfers:
            transfer.fetch()
        return self.values

    def put_back(self) -> None:
        """Set the buffers to the copies' values."""
        for transfer in self._transfers:
            transfer.put_back()


class _Transfer:
    """Buffers of one device and dtype, and their `values` in host memory."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers
        sizes = [buffer.numel() for buffer in buffers]
        device, dtype = buffers[0].device, buffers[0].dtype
        self._there = torch.empty(sum(sizes), dtype=dtype, device=device)
        self._here = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
        shapes = [buffer.shape for buffer in buffers]
        self.values = [part.view(shape) for part, shape in zip(self._here.split(sizes), shapes, strict=True)]
        self._arrived = [part.view(shape) for part, shape in zip(self._there.split(sizes), shapes, strict=True)]

    def fetch(self) -> None:
        torch.cat([buffer.detach().reshape(-1) for buffer in self._buffers], out=self._there)
        self._here.copy_(self._there)

    def put_back(self) -> None:
        self._there.copy_(self._here)
        torch._foreach_copy_(self._buffers, self._arrived)  # pyright: ignore


def _alike(buffers: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the places of the buffers, grouped by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, buffer in enumerate(buffers):
        groups.setdefault((buffer.device, buffer.dtype), []).append(place)
    return [*groups.values()]


class _Copying:
    """Copies between lists of tensors that have the shapes, dtypes and devices of `buffers`."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        on_host = all(buffer.device.type == "cpu" for buffer in buffers)
        self._groups = None if on_host else _alike(buffers)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target; on a device by one call for all that are alike."""
        with torch.no_grad():
            if self._groups is None:  # one call for all takes longer there
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)
                return
            for places in self._groups:
                some = [targets[place] for place in places], [sources[place] for place in places]
                torch._foreach_copy_(*some)  # pyright: ignore


# --- tensor listing ---------------------------------------------------------------------------------------------------
#
# The parameters and buffers of a replica's modules by name, and a cheap check that the modules still hold them.
#
# A step checks three times (`training/loop.py`), so a check compares objects and no values. A module keeps its tensors
# and submodules in three dicts. These are compared with copies of them: equality of dicts first compares the identity
# of the values, in C. Shapes, dtypes and devices, which an assignment to `.data` changes, take ten times as long: each
# step checks those of `FORMS` tensors, in turn. `model.half()` changes all of them, so the next step finds it. If a
# single tensor of a large model has another form, torch refuses its gradient, and then all are checked.
#
# A buffer that is assigned anew (`self.mean = 0.9 * self.mean + 0.1 * mean`) is adopted: its value is copied into the
# listed tensor, and that tensor is put back. So a replica holds the same buffers from its beginning to its end.

_Form = tuple[torch.Size, torch.dtype, torch.device]
_FORM = operator.attrgetter("shape", "dtype", "device")
FORMS = 32


class TensorListing:
    """A list of the tensors of `modules`, made when this object is created.

    Attributes:
        parameters, buffers: tensors by full name; a tensor that several modules share has its first name.
        paths: for each module of `modules` all paths of its `state_dict()` that are parameters or buffers.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.paths: dict[str, dict[str, torch.Tensor]] = {}
        listed_ids: set[int] = set()
        for name, module in modules.items():
            self.paths[name] = dict(module.named_parameters(remove_duplicate=False))
            for path, parameter in module.named_parameters():
                if id(parameter) not in listed_ids:
                    listed_ids.add(id(parameter))
                    self.parameters[f"{name}.{path}"] = parameter
        for name, module in modules.items():
            self.paths[name] |= module.named_buffers(remove_duplicate=False)
            for path, buffer in module.named_buffers():
                if id(buffer) not in listed_ids:
                    listed_ids.add(id(buffer))
                    self.buffers[f"{name}.{path}"] = buffer
        inner = {id(each): each for module in modules.values() for each in module.modules()}
        self._look_at([vars(each) for each in inner.values()])

    def _look_at(self, owners: Iterable[Mapping[str, Any]]) -> None:
        dicts = [owner.get(kind) for owner in owners for kind in ("_parameters", "_buffers", "_modules")]
        plain = [each for each in dicts if isinstance(each, dict)]  # torch.jit's are no dicts
        self._dicts: list[dict[str, Any]] = plain
        self._copies = [dict(each) for each in plain]
        listed = {id(buffer): name for name, buffer in self.buffers.items()}
        self._slots = [(each, key, value) for each in plain for key, value in each.items() if id(value) in listed]
        self._names = [listed[id(buffer)] for _, _, buffer in self._slots]
        self._owners = [owner for owner, _, _ in self._slots]
        self._keys = [key for _, key, _ in self._slots]
        self._listed = [buffer for _, _, buffer in self._slots]
        self._single = [
            (each, key, value)
            for each in plain
            for key, value in each.items()
            if isinstance(value, torch.nn.Parameter) and value.numel() <= 1
        ]
        self._tensors = [*self.parameters.values(), *self.buffers.values()]
        self._forms = [_FORM(tensor) for tensor in self._tensors]
        self._looks = 0

    def adopt(self) -> None:
        """Copy the values of buffers that were assigned anew into the listed tensors, and put those back.

        Raises:
            UsageError: a buffer has another shape, dtype or device, or is shared by several modules and was assigned in
                only one of them.
        """
        if all(map(operator.is_, map(dict.get, self._owners, self._keys), self._listed)):
            return
        for place, (owner, key, buffer) in enumerate(self._slots):
            value = owner.get(key)
            if value is buffer or value is None:  # `follow` finds a removed buffer, by its name
                continue
            name = self._names[place]
            if self._names.count(name) > 1:
                raise UsageError(
                    f"buffer {name} is in several modules and was assigned anew in one of them; "
                    f"change it in place (buffer.copy_(value))"
                )
            if not isinstance(value, torch.Tensor) or _FORM(value) != _FORM(buffer):
                raise UsageError(_changed("buffer", name, _FORM(buffer), value))
            with torch.no_grad():
                buffer.copy_(value)
            owner[key] = buffer

    def holds(self) -> bool:
        """Return True if the modules still hold the listed tensors, each under its name. Call `adopt` before it."""
        try:
            same = self._dicts == self._copies
        except Exception:  # noqa: BLE001  another tensor is in the place: torch refuses the truth value of its `==`
            return False
        return same and all(
            owner.get(key) is tensor for owner, key, tensor in self._single
        )  # `==` may be true for two different tensors of one element

    def check_forms(self, *, some: bool = False) -> None:
        """Compare shapes, dtypes and devices with those of the beginning. `some`: only of `FORMS` tensors, in turn.

        Raises:
            UsageError: a tensor differs. The message names the first one.
        """
        self._looks += 1
        every = -(-len(self._tensors) // FORMS) if some else 1
        part = slice(self._looks % every, None, every)
        if list(map(_FORM, self._tensors[part])) == self._forms[part]:
            return
        names = [("parameter", name) for name in self.parameters] + [("buffer", name) for name in self.buffers]
        for (kind, name), tensor, form in zip(names, self._tensors, self._forms, strict=True):
            if _FORM(tensor) != form:
                raise UsageError(_changed(kind, name, form, tensor))

    def follow(self, modules: Mapping[str, torch.nn.Module]) -> TensorListing:
        """Return a new listing of the same modules, after tensors were replaced by others of the same name and form.

        Raises:
            UsageError: a tensor was added or removed, or has another shape, dtype or device.
        """
        now = TensorListing(modules)
        _compare_names("parameter", self.parameters, now.parameters)
        _compare_names("buffer", self.buffers, now.buffers)
        for kind, then, new in (("parameter", self.parameters, now.parameters), ("buffer", self.buffers, now.buffers)):
            for name, tensor in then.items():
                if _FORM(tensor) != _FORM(new[name]):
                    raise UsageError(_changed(kind, name, _FORM(tensor), new[name]))
        for place, (owner, key, buffer) in enumerate(now._slots):
            listed = self.buffers[now._names[place]]
            if buffer is not listed:
                with torch.no_grad():
                    listed.copy_(buffer)
                owner[key] = listed
        return TensorListing(modules)


def _compare_names(kind: str, then: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
    removed = [name for name in then if name not in now]
    new = [name for name in now if name not in then]
    if not removed and not new:
        return
    changes = ((removed, "was removed"), (new, "was added"))
    parts = [f"{kind} {names[0]}{_more(names)} {change}" for names, change in changes if names]
    shared = [name for name, tensor in now.items() for old in removed if tensor is then[old]]
    tied = f"; {removed[0]} is {shared[0]} now" if removed and shared else ""
    raise UsageError(f"{' and '.join(parts)} since run.replicate{tied}; {REMEDY}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _changed(kind: str, name: str, then: _Form, now: Any) -> str:
    new = _words(_FORM(now)) if isinstance(now, torch.Tensor) else f"a {type(now).__name__}"
    return f"{kind} {name} was {_words(then)} at run.replicate and is {new} now; {REMEDY}"


def _words(form: _Form) -> str:
    shape, dtype, device = form
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


REMEDY = (
    "a worker that joins or resumes begins with the model that the script creates, so change a model's form only "
    "before run.replicate (for an export, convert a copy)"
)


# --- plain values -----------------------------------------------------------------------------------------------------
#
# Plain values of the replica when a step begins: all parts of its state except large tensors.
#
# A loop body may step a scheduler before the inner loop. A joiner or a resumed run begins with the step and runs that
# body itself, so the state must hold the rate from before: with the later rate it would step twice. So all plain values
# are copied when a step begins, and the state is composed of these copies: rates and other settings of parameter
# groups, numbers in optimizers' states, the whole state of schedulers and other objects, the extra state of modules;
# and small tensors among those (a rate may be one). Parameters and moments are too large to be copied. If a loop body
# changes them before its inner loop, their version counters show it (`changed`), and then the state is not treated as
# that of a step's beginning. Changes through `.data` or NumPy are not detected, because PyTorch doesn't count them.
#
# The values are kept in the encoding of `encode`. So a value that can't be sent to a joiner or written to a checkpoint
# is an error at the beginning of the first step that has it. The same bytes are the plain part of the step's digest.

WHOLE_BYTES = 4096  # a tensor up to this size is a plain value
_version = attrgetter("_version")


class PlainValues:
    """The plain values of `objects`. `state()`: the whole state, to find the path of a value that can't be sent.

    Attributes:
        skeleton: the plain values, encoded by `encode`.
        small: copies of the small tensors among them.
        large: the other tensors of optimizers and of objects that are no modules, by reference.
    """

    def __init__(self, objects: Mapping[str, Any], state: Callable[[], Any]) -> None:
        self._objects = objects
        self._state = state
        self._extra = {name: _extra_keys(thing) for name, thing in objects.items()}
        self.skeleton = b""
        self.small: list[torch.Tensor] = []
        self.large: list[torch.Tensor] = []
        self._in_skeleton: list[torch.Tensor] = []
        self._of_optimizers: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._versions: list[int] = []

    def keep(self, parameters: Sequence[torch.Tensor]) -> None:
        """Copy the values that belong to the state of a step that begins. `parameters`: also the large buffers.

        Raises:
            UnknownState: a value can't be sent without pickling. The message names its path.
        """
        values, tensors = self._collect()
        try:
            self.skeleton, referenced = encode(values)
            if not _same(tensors, self._of_optimizers):
                encode(tensors)
        except UnknownState:
            self.skeleton = b""
            encode(self._state())  # raises an error that names the path
            raise
        self._parameters, self._of_optimizers = [*parameters], tensors
        self._in_skeleton = [t if _is_large(t) else t.clone() for t in referenced]
        self.small = [t for t in self._in_skeleton if not _is_large(t)]
        self.large = [*tensors, *(t for t in referenced if _is_large(t))]
        self._versions = self._current_versions()

    def changed(self) -> bool:
        """Return True if a tensor that is not copied was changed or replaced since the last `keep`."""
        modules = [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]
        parameter_ids = set(map(id, self._parameters))
        return (
            self._versions != self._current_versions()
            or not _same(self._collect()[1], self._of_optimizers)
            or any(id(parameter) not in parameter_ids for module in modules for parameter in module.parameters())
        )

    def put_into(self, objects: dict[str, Any]) -> None:
        """Replace the plain values in the state_dicts of all objects by those of the last `keep`."""
        if not self.skeleton:
            return
        values = decode(self.skeleton, self._in_skeleton)
        for name, thing in self._objects.items():
            if isinstance(thing, torch.nn.Module):
                objects[name].update(values[name])
            elif _is_usual(thing):
                _put_into_optimizer(objects[name], *values[name])
            else:
                objects[name] = values[name]

    def _current_versions(self) -> list[int]:
        return [*map(_version, self._parameters), *map(_version, self.large)]

    def _collect(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the plain values by object, and the tensors in optimizers' states."""
        values: dict[str, Any] = {}
        tensors: list[torch.Tensor] = []
        for name, thing in self._objects.items():
            if isinstance(thing, torch.nn.Module):
                state = thing.state_dict() if self._extra[name] else {}
                values[name] = {key: state[key] for key in self._extra[name] if key in state}
            elif _is_usual(thing):
                groups = [
                    {key: value for key, value in group.items() if key != "params"} for group in thing.param_groups
                ]
                moments, numbers = _in_states(thing.state)
                tensors += moments
                values[name] = (groups, numbers)
            else:
                values[name] = thing.state_dict()
        return values, tensors


def _in_states(states: Mapping[Any, Any]) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """Return the tensors in an optimizer's states, and all other values there by the index of their state."""
    if set(map(type, states.values())) <= {dict}:
        values = list(chain.from_iterable(map(dict.values, states.values())))
        if set(map(type, values)) <= {torch.Tensor}:
            return values, {}  # fast path for torch's optimizers: a large model has thousands of states
    tensors: list[torch.Tensor] = []
    numbers: dict[int, Any] = {}
    for index, state in enumerate(states.values()):
        if not isinstance(state, dict):
            numbers[index] = state
            continue
        for key, value in cast("dict[Any, Any]", state).items():
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            else:
                numbers.setdefault(index, {})[key] = value
    return tensors, numbers


def _put_into_optimizer(state: dict[str, Any], groups: list[dict[str, Any]], numbers: dict[int, Any]) -> None:
    now = state["param_groups"]
    if len(groups) == len(now):
        state["param_groups"] = [{**then, "params": group["params"]} for then, group in zip(groups, now, strict=True)]
    state["state"] = {
        key: {**inner, **numbers[index]} if index in numbers and isinstance(inner, dict) else numbers.get(index, inner)
        for index, (key, inner) in enumerate(state["state"].items())
    }


def _is_usual(thing: Any) -> bool:
    """Return True for an optimizer whose state_dict() has its `state` and `param_groups`, and nothing else."""
    return isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict


def _extra_keys(thing: Any) -> tuple[str, ...]:
    """Return the keys of a module's state_dict() that are neither parameters nor buffers."""
    if not isinstance(thing, torch.nn.Module):
        return ()
    named = {name for name, _ in thing.named_parameters(remove_duplicate=False)}
    named |= {name for name, _ in thing.named_buffers(remove_duplicate=False)}
    return tuple(key for key in thing.state_dict() if key not in named)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > WHOLE_BYTES


# --- replica ----------------------------------------------------------------------------------------------------------

_OTHER_BYTES = 1 << 20  # allowance for small values, such as the step counts of optimizers
WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)
LARGEST_LANE_BUFFER = 1 << 16  # elements; larger buffers are constants (masks, tables), or an error
# In so many first steps, and loads of a state, the contents of large buffers are compared too: `.data` and BatchNorm's
# own operation change a tensor without a new version.
COMPARED_STEPS = 3


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be taken and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Replica:
    """The objects passed to `run.replicate`, by name.

    `buffer_kinds`: see `BufferLanes`; `shards`: the largest number of shards in a step, 0 if unknown.

    Raises:
        UsageError: an object has no state_dict() or load_state_dict(), no module has parameters, a module has a
            SyncBatchNorm, or kinds of buffers do not fit.
    """

    def __init__(
        self, objects: Mapping[str, object], buffer_kinds: Mapping[str, str] = MappingProxyType({}), *, shards: int = 1
    ) -> None:
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"replicate({name}={type(thing).__name__}): it has no state_dict() and load_state_dict(); "
                    f"joining workers need both to receive an object's state"
                )
        self.objects = cast("dict[str, Stateful]", dict(objects))
        self._modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        for name, module in self._modules.items():
            _refuse_uninitialized(name, module)
            _refuse_synchronized(name, module)
            _refuse_distributed(name, module)
        self._listing = TensorListing(self._modules)
        self.parameters = dict(self._listing.parameters)
        self.buffers = self._listing.buffers
        if not self.parameters:
            raise UsageError(f"replicate({', '.join(objects) or 'nothing'}): no object is a module with parameters")
        self.ids = frozenset(map(id, self.parameters.values()))
        for name, thing in objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                foreign = sum(id(p) not in self.ids for group in thing.param_groups for p in group["params"])
                if foreign:
                    raise UsageError(
                        f"replicate({name}={type(thing).__name__}): {foreign} of its parameters are in none of the "
                        f"modules, so their gradients would differ between workers; pass the module that has them"
                    )
        self._in_groups: dict[str, list[torch.nn.Parameter]] = {}
        self._grouped: dict[
            str, list[torch.nn.Parameter | None]
        ] = {}  # of the last `keep_buffers`, None after each group
        self._kept_groups: dict[str, list[list[str]]] = {}
        self._functions = {
            name: len(each.lr_lambdas) for name, each in objects.items() if isinstance(each, WITH_FUNCTIONS)
        }
        self._align()
        self._in_lanes = [b for b in self.buffers.values() if b.numel() <= LARGEST_LANE_BUFFER]
        self._constants = {n: b for n, b in self.buffers.items() if b.numel() > LARGEST_LANE_BUFFER}
        self._versions = {name: buffer._version for name, buffer in self._constants.items()}
        self._contents: dict[str, int] = {}  # checksums by name, until the first shard of a pass
        self._steps = 0
        self._copies = [buffer.detach().clone() for buffer in self._in_lanes]
        self._start = [buffer.detach().clone() for buffer in self._in_lanes]
        self._start_on_host, self._now_on_host = HostCopies(self._start), HostCopies(self._in_lanes)
        self._copying = _Copying(self._in_lanes)
        small = {n: b for n, b in self.buffers.items() if n not in self._constants}
        check_kinds(buffer_kinds, small, self._constants)
        self.buffer_kinds = buffer_kinds
        self.shards = shards
        self._lanes = BufferLanes(small, buffer_kinds, shards)
        self.lanes = self._lanes.count
        self._shard, self._is_last = 0, True
        self._put_back: Callable[[], None] | None = None  # after a pass that recomputes
        self.plain = PlainValues(self.objects, lambda: self._state({}))
        self._flags: list[bool] = []

    def _align(self) -> None:
        """Copy parameters that are not aligned, such as those from a mapped file or a NumPy array.

        Alignment affects the bits of results.
        """
        with torch.no_grad():
            for parameter in self.parameters.values():
                if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                    parameter.data = parameter.data.clone()

    @property
    def kept_buffers(self) -> list[torch.Tensor]:
        """The copies into which `keep_buffers` writes the small buffers; always the same tensors."""
        return self._copies

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The large buffers, which a step must not change, by name."""
        return self._constants

    # --- what is trained -------------------------------------------------------------------------------------

    def look(self, *, whole: bool = True) -> bool:
        """Compare the trained objects with the listing, and adopt changes. Returns True if a parameter was replaced.

        Changes are buffers that were assigned anew, and parameters and modules that were replaced by others of the same
        names, shapes and dtypes. `whole`: check shapes, dtypes and the optimizers' groups too.

        Raises:
            UsageError: a change can't be adopted, because a worker that joins or resumes could not load it.
        """
        self._listing.adopt()
        replaced = False
        if not self._listing.holds():
            then, self._listing = self._listing, self._listing.follow(self._modules)
            replaced = any(p is not then.parameters[name] for name, p in self._listing.parameters.items())
            self.parameters.update(self._listing.parameters)
            self.ids = frozenset(map(id, self.parameters.values()))
            self._in_groups.clear()
            self._grouped.clear()
            self._align()
        if whole:
            self._listing.check_forms(some=True)
            for name, thing in self.objects.items():
                if isinstance(thing, torch.optim.Optimizer):
                    self._look_at_groups(name, thing)
                elif isinstance(thing, WITH_FUNCTIONS) and len(thing.lr_lambdas) != self._functions[name]:
                    raise UsageError(
                        f"{name} ({type(thing).__name__}) has {len(thing.lr_lambdas)} functions and began with "
                        f"{self._functions[name]}: functions can't be sent to a joining worker; begin with one for "
                        f"each group that the optimizer will have, or use a schedule without your own functions"
                    )
        return replaced

    def stays(self) -> None:
        """Compare the trained objects with the listing at the end of an inner loop, which may replace no parameter.

        Raises:
            UsageError: a parameter or module was replaced, added or removed.
        """
        self._listing.adopt()
        if not self._listing.holds():
            then, now = self._listing, self._listing.follow(self._modules)
            new = [name for name, p in now.parameters.items() if p is not then.parameters[name]]
            raise UsageError(
                f"parameter {new[0]} was replaced within a step's inner loop, so some micro-batches have used the "
                f"other one; replace it after the inner loop"
                if new
                else "a module was replaced within a step's inner loop; replace it after the inner loop"
            )

    def _look_at_groups(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        now = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        then = self._in_groups.get(name, ())
        if len(now) == len(then) and all(map(operator.is_, now, then)):
            return
        kind = f"{name} ({type(optimizer).__name__})"
        foreign = [parameter for parameter in now if id(parameter) not in self.ids]
        if foreign:
            raise UsageError(
                f"{kind} has {len(foreign)} parameters that are in none of the replicated modules, the first of shape "
                f"{list(foreign[0].shape)}: they were replaced, or never passed to run.replicate; put the modules' "
                f"parameters into its param_groups"
            )
        stale = [p for p in optimizer.state if all(p is not q for q in now) and hasattr(p, "shape")]
        if stale:
            raise UsageError(
                f"{kind} holds the state of {len(stale)} parameters that are in none of its groups, the first "
                f"{self._name_of(stale[0])}, which torch can't put into its state_dict(): "
                f"call {name}.state.pop(parameter) for each parameter that you remove from a group, or keep it in the "
                f"group with requires_grad=False"
            )
        self._in_groups[name] = now

    def check_forms(self) -> None:
        """Raise UsageError, with the tensor's name, if a shape, dtype or device differs from the beginning."""
        self._listing.check_forms()

    def _name_of(self, parameter: torch.Tensor) -> str:
        names = [name for name, each in self.parameters.items() if each is parameter]
        return names[0] if names else f"of shape {list(parameter.shape)}"

    # --- buffers ---------------------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """Copy the buffers and the plain values that belong to the state of a step that begins.

        Raises:
            UnknownState: a value can't be sent without pickling.
        """
        self._listing.adopt()
        self._steps += 1
        self._mark_constants()
        self.plain.keep((*self.parameters.values(), *self._constants.values()))
        self._flags = [parameter.requires_grad for parameter in self.parameters.values()]
        self._copying.copy(self._copies, self._in_lanes)
        for name, thing in self.objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._keep_groups(name, thing)

    def _keep_groups(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        now = [parameter for group in optimizer.param_groups for parameter in (*group["params"], None)]
        then = self._grouped.get(name, ())
        if len(now) != len(then) or not all(map(operator.is_, now, then)):
            self._grouped[name] = now
            self._kept_groups[name] = self._groups_of(optimizer)

    def begin_shards(self, *, first: bool = True, recompute: bool = False) -> None:
        """Copy the buffers' values with which every shard starts, when the inner loop begins.

        `first`: False if it is another pass over the step's batch, before which the loop body may change everything.
        `recompute`: the shards start with the values of the pass before. After the pass the buffers have the values
        that they have now.

        Raises:
            UsageError: the loop body has changed a large buffer since the step began.
        """
        self._listing.adopt()
        if first:
            self._check_constants("by the loop body between a step's beginning and its inner loop")
        else:
            self._mark_constants()
        self._put_back = self.keep_small_buffers() if recompute else None
        if not recompute:
            self._copying.copy(self._start, self._in_lanes)
            self._lanes.begin(self._start_on_host.fetch())

    def keep_small_buffers(self) -> Callable[[], None]:
        """Return a function that gives the small buffers their present values again."""
        self._listing.adopt()
        copies = [buffer.detach().clone() for buffer in self._in_lanes]

        def put_back() -> None:
            self._copying.copy(self._in_lanes, copies)

        return put_back

    def reset_buffers(self, shard: int = 0, shards: int = 1) -> None:
        """Reset the buffers for shard number `shard` of `shards` in the step."""
        self._listing.adopt()
        self._shard, self._is_last = shard, shard == shards - 1
        self._copying.copy(self._in_lanes, self._start)

    def buffers_to(self, lanes: torch.Tensor) -> None:
        """Fill `lanes`, shape (self.lanes,), the same memory in each call, after a shard.

        Raises:
            UsageError: the shard's forward pass has changed a large buffer, or an integer by too much.
        """
        self._listing.adopt()
        self._check_constants("in a forward pass")
        self._contents = {}
        with torch.no_grad():
            start, now = self._start_on_host.values, self._now_on_host.fetch()
            self._lanes.write(lanes, start, now, shard=self._shard, last=self._is_last)

    def buffers_from(self, lanes: torch.Tensor, shards: int) -> None:
        """Set the buffers from the reduced lanes, shape (self.lanes,), after a pass of `shards` shards.

        After a pass that recomputes, they get the values that they had before it.

        Raises:
            UsageError: the shards' values of a buffer can't be reduced by its kind.
        """
        if self._put_back is not None:
            self._put_back()
            return
        with torch.no_grad():
            self._lanes.read(lanes, self._start_on_host.values, self._now_on_host.values, shards)
            self._now_on_host.put_back()

    def _mark_constants(self) -> None:
        """Record the large buffers as they are, for `_check_constants`."""
        self._versions = {name: buffer._version for name, buffer in self._constants.items()}
        compared = self._constants if self._steps <= COMPARED_STEPS else {}
        self._contents = {name: _checksum(buffer) for name, buffer in compared.items()}

    def _check_constants(self, where: str) -> None:
        for name, buffer in self._constants.items():
            is_changed = buffer._version != self._versions[name]
            if is_changed or (name in self._contents and _checksum(buffer) != self._contents[name]):
                raise UsageError(
                    f"buffer {name} of {buffer.numel()} elements was changed {where}; buffers above "
                    f"{LARGEST_LANE_BUFFER} elements must be constant within a step: change it in the loop body after "
                    f"the inner loop, equally on all workers, or split it"
                )

    # --- state -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state at the last `keep_buffers`, by reference. Within a step its large tensors do not change."""
        state = self._state({id(b): copied for b, copied in zip(self._in_lanes, self._copies, strict=True)})
        self.plain.put_into(state["objects"])
        state["groups"] |= self._kept_groups
        return {**state, "requires_grad": [*self._flags]} if self._flags else state

    def _state(self, copies: dict[int, torch.Tensor]) -> dict[str, Any]:
        """Return the present state. `copies`: copies to use instead of buffers, by the buffer's id."""
        objects: dict[str, Any] = {}
        for name, thing in self.objects.items():
            state = dict(thing.state_dict())
            for path, tensor in self._listing.paths.get(name, {}).items():  # the listed tensors, not the module's
                if path in state:
                    state[path] = copies.get(id(tensor), tensor).detach()
            objects[name] = state
        hidden = [copies.get(id(b), b).detach() for b in self.buffers.values()]
        return {
            "objects": objects,
            "buffers": hidden,  # all buffers again, with those that state_dict() omits
            "requires_grad": [p.requires_grad for p in self.parameters.values()],
            "groups": {n: self._groups_of(o) for n, o in self.objects.items() if isinstance(o, torch.optim.Optimizer)},
        }

    def present(self) -> dict[str, Any]:
        """Return the objects' states by name, as they are now and not at the step's beginning."""
        return {name: thing.state_dict() for name, thing in self.objects.items()}

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of the parameters in each group; an optimizer's own state has only their indices."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]

    def _regroup(self, name: str, optimizer: torch.optim.Optimizer, groups: list[list[str]]) -> None:
        """Set the parameters of the optimizer's groups by name, if the run has changed the groups since its beginning.

        The groups' settings come with the optimizer's own state.
        """
        if groups == self._groups_of(optimizer):
            return
        new_groups = [[self.parameters[each] for each in names] for names in groups]
        present = optimizer.param_groups
        present[len(new_groups) :] = [{**optimizer.defaults, "params": []} for _ in new_groups[len(present) :]]
        for group, parameters in zip(present, new_groups, strict=True):
            group["params"] = parameters
        self._in_groups.pop(name, None)

    @property
    def most_bytes(self) -> int:
        """The bytes that the state may take after some steps, without those of the user's own objects."""
        buffers = 2 * sum(map(_padded, self.buffers.values()))  # the state has them twice
        return sum(map(_padded, self.parameters.values())) + buffers + self.moment_bytes + _OTHER_BYTES

    @property
    def moment_bytes(self) -> int:
        """The bytes that optimizers take from their first step on: Adam's moments, and momentum.

        Those of other optimizers are not included.
        """
        return sum(
            (2 if "betas" in group else 1 if group.get("momentum") else 0) * _padded(parameter)
            for thing in self.objects.values()
            if isinstance(thing, torch.optim.Optimizer)
            for group in thing.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of the same replica from another worker or a checkpoint.

        All tensors are copied, because they may all be views of one tensor.
        """
        self._listing.adopt()
        for name, thing in self.objects.items():
            saved_state = state["objects"][name]
            if isinstance(thing, torch.nn.Module):
                thing.load_state_dict(saved_state)  # it copies
                continue
            if isinstance(thing, torch.optim.Optimizer) and name in state.get("groups", {}):
                self._regroup(name, thing, state["groups"][name])
            thing.load_state_dict(_own(saved_state))
            _put_back(saved_state, thing.state_dict())
        with torch.no_grad():
            for buffer, value in zip(self.buffers.values(), state["buffers"], strict=True):
                buffer.copy_(value)
        for parameter, flag in zip(self.parameters.values(), state["requires_grad"], strict=True):
            parameter.requires_grad_(flag)
        self.keep_buffers()

    def fingerprint(self) -> str:
        """Return the SHA-256 of names, shapes, dtypes and bits of the whole state, as hex."""
        self._listing.adopt()
        digest = hashlib.sha256()
        skeleton, tensors = encode(self._state({}))
        digest.update(skeleton)
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the facts that must be equal on all workers.

        They are the classes of the objects, names, shapes and dtypes of the tensors, and the names of the settings of
        optimizers and schedulers: another version of torch may have more.
        """
        for name, thing in self.objects.items():
            yield f"object {name}", type(thing).__name__
            if isinstance(thing, torch.optim.Optimizer):
                yield f"form of {name}", ", ".join(sorted({key for group in thing.param_groups for key in group}))
            elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
                yield f"form of {name}", ", ".join(sorted(map(str, thing.state_dict())))
        for kind, tensors in (("parameter", self.parameters), ("buffer", self.buffers)):
            for name, tensor in tensors.items():
                yield f"{kind} {name}", f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for pattern, kind in self.buffer_kinds.items():
            yield f"kind of buffers {pattern}", kind


def _refuse_uninitialized(name: str, module: torch.nn.Module) -> None:
    for path, parameter in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(parameter):
            raise UsageError(f"replicate: {name}.{path} has no shape yet; run a forward pass of {name} before it")


def _refuse_synchronized(name: str, module: torch.nn.Module) -> None:
    for path, each in module.named_modules():
        if isinstance(each, torch.nn.SyncBatchNorm):
            raise UsageError(
                f"replicate: {name}.{path} is a SyncBatchNorm, which needs a torch.distributed process group and would "
                f"depend on the workers; use BatchNorm, whose batch is the micro-batch (increase micro=) and whose "
                f"running statistics are the mean over all micro-batches, or GroupNorm"
            )


def _refuse_distributed(name: str, module: torch.nn.Module) -> None:
    for path, each in module.named_modules():
        kind = type(each).__name__
        if isinstance(each, DistributedDataParallel) or kind in ("FullyShardedDataParallel", "FSDPModule"):
            place = f"{name}.{path}" if path else name
            raise UsageError(
                f"replicate: {place} is a {kind}, which exchanges gradients itself; pass the model without it, and "
                f"remove it and torch.distributed from the script: the workers of the run exchange the gradients"
            )


def names_of(objects: Sequence[object], variables: Mapping[str, object]) -> list[str]:
    """Return a name for each of the objects: that of the variable that holds it, else one after its kind."""
    names: list[str] = []
    for thing in objects:
        name = next((name for name, value in variables.items() if value is thing and name.isidentifier()), "")
        name = name or type(thing).__name__.lower()
        names.append(name if name not in names else f"{name}{len(names)}")
    return names


def _own(value: Any) -> Any:
    """Return the nested value with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _own(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in cast("list[Any]", value))
    return value


def _put_back(loaded: Any, now: Any) -> Any:
    """Return `now` with the tensors of `loaded` in place of those of another dtype or shape.

    An optimizer casts the tensors that it loads to the dtype of its parameters; this restores them.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(now, torch.Tensor):
        alike = (loaded.dtype, loaded.shape) == (now.dtype, now.shape)
        return now if alike else loaded.to(now.device, copy=True)
    if isinstance(loaded, dict) and isinstance(now, dict):
        source, target = cast("dict[Any, Any]", loaded), cast("dict[Any, Any]", now)
        for key in [key for key in source if key in target]:
            value = _put_back(source[key], target[key])
            if value is not target[key]:
                target[key] = value
    elif isinstance(loaded, list | tuple) and isinstance(now, list | tuple) and len(loaded) == len(now):
        items = [_put_back(a, b) for a, b in zip(cast("list[Any]", loaded), cast("list[Any]", now), strict=True)]
        if any(a is not b for a, b in zip(items, cast("list[Any]", now), strict=True)):
            if isinstance(now, tuple):
                return tuple(items)
            now[:] = items
    return cast("Any", now)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
