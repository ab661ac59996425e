"""Values over a step's batch, such as the accuracy: what each micro-batch gives, and the result over all of them.

They travel in the float64 lanes of the step's round, beside its loss (`gradients.py`). So they cost no message of their
own, every worker gets the same result, and a micro-batch of a lost worker counts once. The lanes must be there before a
script names its first value: `SLOTS` values have room, and each slot carries its name, since a worker may compute no
micro-batch of a step and still asks for the value.

    slot    the sum of values times weights | the sum of the weights | the name, 4 bytes in each lane
    maxima  for each of `MAXIMA` values a lane for each micro-batch | a lane for each micro-batch: 1 if it gives any

Lanes are only ever added, so a maximum needs a lane for each micro-batch, to which all others add zero.

All micro-batches must give the same names in the same order: then the sum of the names' lanes over the micro-batches is
a multiple of the name's own. A step whose sums are no such multiple fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farandole.errors import StepAbandoned, UsageError
from farandole.platform.output import is_name

SLOTS = 16  # values of one step
MAXIMA = 4  # maxima among them
MOST_SHARDS = 256  # micro-batches of a step with maxima: there are as many lanes as that, in each micro-batch
NAME_BYTES = 40  # of a name and its kind
_BYTES = 4  # of a name in one lane: its sum over two million micro-batches is still exact in float64
_NAME_LANES = NAME_BYTES // _BYTES
_SLOT = 2 + _NAME_LANES
_KINDS = {"mean": b"m", "sum": b"s", "max": b"x"}  # the first byte of a name's lanes


def count_lanes(shards: int) -> int:
    """Return the number of lanes for steps of at most `shards` micro-batches; 0: their number is not known."""
    return SLOTS * _SLOT + (MAXIMA + 1) * _with_maxima(shards)


def _with_maxima(shards: int) -> int:
    return shards if shards <= MOST_SHARDS else 0


def amount(call: str, value: Any) -> float:
    """Return `value`, a number or a tensor with one element, as a float. `call` names it in the error."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(f"{call} has shape {tuple(value.shape)}: pass one number")
        return float(value.detach())
    if not hasattr(value, "__float__"):
        raise UsageError(f"{call} is a {type(value).__name__}: pass one number")
    return float(value)


class BatchValues:
    """The values that the micro-batches of one pass give, and their results.

    `before`: the values of the pass before over the same batch, whose results stay under other names.
    `lanes`: this worker's lanes of the open micro-batch, shape (count_lanes(shards),), float64.
    """

    def __init__(self, lanes: torch.Tensor, shards: int, before: BatchValues | None = None) -> None:
        self._before = before._results if before else None
        self._numbers: npt.NDArray[np.float64] = lanes.numpy()  # the same memory: setting one is faster so
        self._shards = _with_maxima(shards)
        self._shard = 0
        self._maxima = 0  # of the open micro-batch
        self._slots: dict[bytes, int] = {}  # of the open micro-batch
        self._computes = False  # this worker has begun a micro-batch of the step
        self._results: dict[str, dict[str, float]] | None = None

    def open(self, shard: int) -> None:
        """Begin micro-batch `shard`, which has given nothing yet."""
        self._numbers.fill(0.0)
        self._slots.clear()
        self._computes = True
        self._shard, self._maxima = shard, 0

    def add(self, kind: str, values: Mapping[str, Any], samples: int, weight: float | None) -> None:
        """Add `values` of the open micro-batch of `samples` samples: one number each, or one for each sample.

        Raises:
            UsageError: a name or a value is not possible, the micro-batch has given it before, there are too many, or
                a maximum is given and the number of micro-batches is not known.
        """
        for name, value in values.items():
            call = f"step.{kind}({name}=...)"
            code = _code(kind, name)
            if not code:
                raise UsageError(f"{call}: a name has at most {NAME_BYTES - 1} bytes, all characters visible")
            if code in self._slots:
                raise UsageError(f"{call}: this micro-batch has given {name!r} before; use another name")
            if len(self._slots) == SLOTS:
                raise UsageError(f"{call}: a step has at most {SLOTS} values")
            many = isinstance(value, torch.Tensor) and value.numel() == samples != 1
            if many:
                number = float(getattr(value.detach().to("cpu", torch.float64), kind)())
            else:
                number = amount(call, value)
            if kind == "max":
                self._add_maximum(call, number)
            units = (float(samples) if weight is None else weight) if kind == "mean" else 1.0
            slot = self._slots[code] = len(self._slots)
            place = self._numbers[slot * _SLOT : (slot + 1) * _SLOT]
            place[0] = number * units if units else 0.0  # a mean over nothing is NaN
            place[1] = units
            place[2:] = _name_lanes(code)

    def _add_maximum(self, call: str, number: float) -> None:
        if not self._shards:
            raise UsageError(
                f"{call}: it needs a constant batch, farandole.GlobalBatch, of at most {MOST_SHARDS} micro-batches"
            )
        if self._maxima == MAXIMA:
            raise UsageError(f"{call}: a step has at most {MAXIMA} maxima")
        first = SLOTS * _SLOT
        self._numbers[first + self._maxima * self._shards + self._shard] = number
        self._numbers[first + MAXIMA * self._shards + self._shard] = 1.0
        self._maxima += 1

    def end(self, sums: torch.Tensor, shards: int, step: int) -> None:
        """Take the `sums` of the lanes over the `shards` micro-batches of `step` that have samples.

        Raises:
            UsageError: the micro-batches have given different names.
        """
        self._results = {kind: {**(self._before or {}).get(kind, {})} for kind in _KINDS}
        lanes = sums.tolist() if shards else []
        lanes, maxima = lanes[: SLOTS * _SLOT], lanes[SLOTS * _SLOT :]
        slots = [lanes[at : at + _SLOT] for at in range(0, len(lanes), _SLOT)]
        given = [slot for slot in slots if any(slot[2:])]
        number = 0  # of the next maximum
        names = [*self._slots] if self._computes else None  # of the newest micro-batch here
        for slot, (total, units, *name) in enumerate(given):
            kind, text = _decoded(tuple(name), shards)
            if not kind or (names is not None and [_code(kind, text)] != names[slot : slot + 1]):
                raise _names_differ(step)
            if kind == "mean":
                total = total / units if units else math.nan
            elif kind == "max":
                total = self._maximum(maxima, number)
                number += 1
            self._results[kind][text] = total

    def _maximum(self, lanes: list[float], number: int) -> float:
        """Return the maximum `number` over the micro-batches; NaN if one is."""
        values, given = lanes[number * self._shards :], lanes[MAXIMA * self._shards :]
        there = [value for value, is_given in zip(values[: self._shards], given, strict=True) if is_given]
        return math.nan if any(map(math.isnan, there)) else max(there)

    def of(self, kind: str, step: int) -> Mapping[str, float]:
        """Return the results of a kind, by name. Raises StepAbandoned before `end` of the first pass."""
        results = self._results or self._before
        if results is None:
            raise StepAbandoned(f"step {step}: its values are known after the inner loop has ended, not within it")
        return _Results(results[kind], kind, step)


class _Results(Mapping[str, float]):
    """Values by name; a name that is not there is an error that tells which are."""

    def __init__(self, values: dict[str, float], kind: str, step: int) -> None:
        self._values, self._kind, self._step = values, kind, step

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            there = ", ".join(self._values) or "none"
            raise KeyError(f"step {self._step} has no value {name!r} of step.{self._kind}(...); it has: {there}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return repr(self._values)


@lru_cache(maxsize=2 * SLOTS)
def _code(kind: str, name: str) -> bytes:
    """Return the bytes of a name; none if it is not possible."""
    code = _KINDS[kind] + name.encode(errors="replace")
    return code if is_name(name) and len(code) <= NAME_BYTES else b""


@lru_cache(maxsize=2 * SLOTS)
def _name_lanes(code: bytes) -> npt.NDArray[np.float64]:
    padded = code.ljust(NAME_BYTES, b"\0")
    return np.frombuffer(padded, dtype=f"<u{_BYTES}").astype(np.float64)


@lru_cache(maxsize=2 * SLOTS)
def _decoded(name: tuple[float, ...], shards: int) -> tuple[str, str]:
    """Return the kind and the name of a slot, from the sums of its lanes; empty texts if the names differ."""
    code = b""
    for lane in name:
        if not lane.is_integer() or int(lane) % shards or not 0 <= int(lane) // shards < 256**_BYTES:
            return "", ""
        code += (int(lane) // shards).to_bytes(_BYTES, "little")
    code = code.rstrip(b"\0")
    kind = next((kind for kind, letter in _KINDS.items() if letter == code[:1]), None)
    try:
        text = code[1:].decode()
    except UnicodeDecodeError:
        text = ""
    return (kind, text) if kind is not None and is_name(text) else ("", "")


def _names_differ(step: int) -> UsageError:
    return UsageError(
        f"step {step}: its micro-batches have given different names; call step.mean and step.sum with the same names "
        f"in the same order in each micro-batch, and with weight=0 where a mean does not count"
    )
