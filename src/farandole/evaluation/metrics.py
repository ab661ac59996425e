"""Metrics as lanes: the contribution of a micro-batch to an evaluation's sums, and the result from the sums.

Invariant: the contribution of a micro-batch depends only on the micro-batch. Lanes are float64 and summed in the order
of the tree, so the result has the same bits for any assignment of micro-batches to workers, and for any repetition.

- A function has two lanes, the sum of its values and of their weights; its result is their mean over all samples, or
  over all units that its values are means over, such as tokens.
- A `torchmetrics` metric has lanes for its states (`States`).
- A mapping of names to metrics has the lanes of one metric after the other, from one pass.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, cast

import torch

from farandole.errors import UsageError

# --- metric lists -----------------------------------------------------------------------------------------------------
#
# States of metrics that grow with the samples, such as all scores for an exact AUROC, all boxes for a mean precision.
#
# The number of lanes is known only after every micro-batch, so these states take two rounds. The first one sums the
# count of numbers of each micro-batch, with a lane for each micro-batch, and the worker keeps the numbers. The second
# one has a lane for each number: each micro-batch fills its own lanes, to which all others add zero. A worker that is
# lost in between loses its numbers: the worker that inherits such a micro-batch computes it again.
#
# A list is encoded as float64: the number of its tensors, then the type, shape and values of each. Whole numbers are
# exact up to 2**53. An element that is not a tensor is refused.

LANES = 1 << 24  # 128 MB for one partial sum
EXACT = 1 << 53  # float64 holds every whole number up to here
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Lists:
    """The list states of one metric in one evaluation. `names` are used in error messages."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.states: list[list[torch.Tensor]] = [[] for _ in names]  # over all samples, once `fill` was called
        self._names = names
        self._device = device
        self._contents: dict[int, torch.Tensor] = {}
        self._ends: list[int] = []

    @property
    def length(self) -> int:
        """The count of numbers in all micro-batches; valid after `measure`."""
        return self._ends[-1]

    def keep(self, states: Sequence[Any], shard: int) -> int:
        """Keep the states after one micro-batch. Returns their count of numbers."""
        numbers = [part for name, state in zip(self._names, states, strict=True) for part in _encoded(name, state)]
        self._contents[shard] = torch.cat(numbers)
        return len(self._contents[shard])

    def measure(self, lengths: torch.Tensor) -> None:
        """Set the first round's sums: the count of numbers of each micro-batch, shape (shards,)."""
        self._ends = list(accumulate(int(length) for length in lengths))

    def has(self, shard: int) -> bool:
        return shard in self._contents

    def put(self, shard: int, lanes: torch.Tensor) -> None:
        """Write the kept numbers of one micro-batch into zeroed lanes."""
        if (numbers := self._contents.get(shard)) is not None:  # None if all its samples were bad
            stop = self._ends[shard]
            lanes[stop - len(numbers) : stop] = numbers

    def fill(self, sums: torch.Tensor) -> None:
        """Decode `states` from the second round's sums."""
        at = 0
        while at < len(sums):  # one micro-batch per iteration
            for state in self.states:
                count, at = int(sums[at]), at + 1
                for _ in range(count):
                    tensor, at = self._read(sums, at)
                    state.append(tensor)

    def _read(self, sums: torch.Tensor, at: int) -> tuple[torch.Tensor, int]:
        dtype, dimensions = _DTYPES[int(sums[at])], int(sums[at + 1])
        start = at + 2 + dimensions
        shape = [int(size) for size in sums[at + 2 : start]]
        stop = start + torch.Size(shape).numel()
        return sums[start:stop].reshape(shape).to(self._device, dtype), stop


class ListContents:
    """The second round, which sums the numbers themselves. Raises `UsageError` if there are too many."""

    def __init__(self, lists: Sequence[Lists], kind: str) -> None:
        self._lists = lists
        self._sizes = [one.length for one in lists]
        self.lanes = sum(self._sizes)
        if self.lanes > LANES:
            raise UsageError(
                f"run.evaluate: the list states of {kind} have {self.lanes:,} numbers, but at most {LANES:,} can be "
                f"gathered; use a metric of a fixed size, such as AUROC(thresholds=200)"
            )

    def has(self, shard: int) -> bool:
        return all(one.has(shard) for one in self._lists)

    def put(self, shard: int, lanes: torch.Tensor) -> None:
        for one, place in zip(self._lists, lanes.split(self._sizes), strict=True):
            one.put(shard, place)

    def fill(self, sums: torch.Tensor) -> None:
        for one, place in zip(self._lists, sums[: self.lanes].split(self._sizes), strict=True):
            one.fill(place)


def _encoded(name: str, state: Any) -> Iterator[torch.Tensor]:
    """Yield the float64 encoding of a list state. Raises UsageError if it has a value that can't be encoded."""
    tensors = [state] if isinstance(state, torch.Tensor) else state
    yield torch.tensor([len(tensors)], dtype=torch.float64)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UsageError(
                f"run.evaluate: {name} holds a {kind}, which can't be gathered; use lists of real tensors, or a "
                f"function with one value per sample"
            )
        values = tensor.detach().to("cpu")
        most = max(int(values.max()), -int(values.min())) if values.dtype == torch.int64 and values.numel() else 0
        if most > EXACT:
            raise UsageError(
                f"run.evaluate: {name} holds {most}, but whole numbers are exact only up to 2**53 = {EXACT}; "
                f"use a floating-point type"
            )
        head = [_DTYPES.index(values.dtype), values.dim(), *values.shape]
        yield torch.tensor(head, dtype=torch.float64)
        yield values.reshape(-1).double()


# --- torchmetric ------------------------------------------------------------------------------------------------------
#
# A metric of torchmetrics as lanes: its states, and the result from their sums.
#
# Each micro-batch updates the metric from its initial state, as if each were a process of a distributed job. States
# that are summed over processes are lanes without a change; counts are exact up to 2**53. For other states (max, min,
# mean, or none, as in Pearson's) each micro-batch has its own lanes, to which all others add zero, and the metric's own
# reduction follows at the end. Lists of tensors take a second round (`Lists`). A metric that guesses from a batch's
# values whether they are logits does so for each micro-batch: pass probabilities to it.
#
# This module never imports torchmetrics: if the metric belongs to it, the script has imported it.


def is_torchmetric(metric: Any) -> bool:
    """Return True for a metric or a collection of torchmetrics."""
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(metric, (library.Metric, library.MetricCollection))


@dataclass(frozen=True, kw_only=True)
class _State:
    """One state of one metric. `owner`: the index of its metric among those that a metric consists of."""

    owner: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    summed: bool
    reduction: Callable[[torch.Tensor], torch.Tensor] | None
    numel: int


class States:
    """A metric of torchmetrics, or a collection. Copies do the work, and the user's object does not change."""

    def __init__(self, metric: Any, shards: int, device: torch.device) -> None:
        self._shards = shards
        self._device = device
        self._fresh = metric.clone().to(device)
        self._fresh.reset()
        owners = _owners(self._fresh)
        self._states = [state for place, owner in enumerate(owners) for state in _states(place, owner)]
        self._sizes = [state.numel * (1 if state.summed else shards) for state in self._states]
        self._listed = [  # the states that are lists
            (place, name)
            for place, owner in enumerate(owners)
            for name, value in owner.metric_state.items()
            if isinstance(value, list)
        ]
        names = [f"{type(owners[place]).__name__}'s state {name!r}" for place, name in self._listed]
        self._lists = Lists(names, device)
        if self._listed:
            self._sizes.append(shards)  # the lengths of each micro-batch's lists
        self.lanes = sum(self._sizes)

    def put(self, arguments: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        del samples
        working = self._fresh.clone()  # not `reset`: other values that an update leaves must not reach the next one
        collection = isinstance(working, sys.modules["torchmetrics"].MetricCollection)
        for each in working.values(copy_state=False) if collection else (working,):
            # separately: a collection shares states that are nearly equal after one micro-batch
            each.update(*arguments)
        owners = _owners(working)
        places = lanes.split(self._sizes)
        if self._listed:
            places[-1][shard] = self._lists.keep([getattr(owners[at], name) for at, name in self._listed], shard)
        for state, place in zip(self._states, places, strict=False):
            value = getattr(owners[state.owner], state.name)
            if value.numel() != state.numel:
                raise UsageError(
                    f"run.evaluate: an update changed the shape of {type(owners[state.owner]).__name__}'s state "
                    f"{state.name!r} from {state.shape} to {tuple(value.shape)}, so it can't be summed; "
                    f"pass the number of outputs or classes to the metric"
                )
            (place if state.summed else place.view(self._shards, -1)[shard]).copy_(value.detach().reshape(-1))

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        if not self._listed:
            return []
        self._lists.measure(sums[-self._shards :])
        return [self._lists]

    def result(self, sums: torch.Tensor, samples: int) -> Any:
        del samples
        final = self._fresh.clone()
        owners = _owners(final)
        for (at, name), tensors in zip(self._listed, self._lists.states, strict=True):
            setattr(owners[at], name, tensors)
        for state, place in zip(self._states, sums.split(self._sizes), strict=False):
            value = self._typed(state, place, type(owners[state.owner]).__name__)
            if state.summed or self._shards == 1:
                value = value.reshape(state.shape)
            else:
                value = value.reshape(self._shards, *state.shape)
                value = state.reduction(value) if state.reduction else value
            setattr(owners[state.owner], state.name, value)
        for owner in owners:
            owner._update_count = self._shards  # prevents a warning that the metric was never updated
        return final.compute()

    def _typed(self, state: _State, place: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the sums in the state's own type; for an integer type, sums with fractions stay floating point."""
        if state.dtype.is_floating_point:
            return place.to(self._device, state.dtype)
        if not torch.equal(place, place.round()) or place.isinf().any():
            return place.to(self._device, torch.get_default_dtype())
        if place.abs().max() > EXACT:
            raise UsageError(
                f"run.evaluate: {kind}'s state {state.name!r} is {place.abs().max():.0f}, but whole numbers are exact "
                f"only up to 2**53 = {EXACT}; use a floating-point type"
            )
        return place.to(self._device, state.dtype)


def _states(place: int, owner: Any) -> Iterator[_State]:
    total = sys.modules["torchmetrics"].utilities.dim_zero_sum
    for name, value in owner.metric_state.items():
        if isinstance(value, list):
            continue
        if not isinstance(value, torch.Tensor) or value.is_complex():
            raise UsageError(
                f"run.evaluate: {type(owner).__name__} can't be summed over workers: its state {name!r} is complex; "
                f"use a function with one value per sample"
            )
        reduction = owner._reductions[name]
        yield _State(
            owner=place, name=name, shape=tuple(value.shape), dtype=value.dtype, summed=reduction is total,
            reduction=reduction, numel=value.numel(),
        )  # fmt: skip


def _owners(metric: Any) -> list[Any]:
    """Return the metrics that hold the states: the metric itself, a collection's members, wrapped metrics."""
    kind = sys.modules["torchmetrics"].Metric
    owners = (module for module in metric.modules() if isinstance(module, kind))
    return list(
        {id(owner._defaults): owner for owner in owners}.values()
    )  # some wrappers show the wrapped one's states


# --- metric -----------------------------------------------------------------------------------------------------------


class Tally(Protocol):
    """A metric in one evaluation. `lanes`: its number of lanes, equal on all workers."""

    lanes: int

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        """Return the list states, with the lengths from the lanes' sums. Fill them before the call of `result`."""
        ...

    def put(self, arguments: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        """Write the values of one micro-batch of `samples` into zeroed lanes. `arguments`: the metric's arguments."""
        ...

    def result(self, sums: torch.Tensor, samples: int) -> Any:
        """Return the metric over all `samples`, from the lanes' sums over all micro-batches. See function `result`."""
        ...


def tally(metric: Any, shards: int, device: torch.device) -> Tally:
    """Return the tally of `metric` for an evaluation of `shards` micro-batches on `device`.

    Raises:
        UsageError: `metric` is no metric, or its states can't be summed or are too large.
    """
    if is_torchmetric(metric):
        chosen = States(metric, shards, device)
    elif isinstance(metric, Mapping) and metric:
        named = cast("Mapping[str, Any]", metric)
        chosen = _Several({name: tally(one, shards, device) for name, one in named.items()})
    elif callable(metric):
        chosen = _Mean(metric)
    else:
        raise UsageError(
            f"run.evaluate(metric={metric!r}): pass a function of (outputs, targets), a torchmetrics.Metric or "
            f"MetricCollection, or a mapping of names to these"
        )
    if chosen.lanes > LANES:
        raise UsageError(
            f"run.evaluate: {type(metric).__name__} has {chosen.lanes:,} numbers to sum over {shards} micro-batches, "
            f"but the limit is {LANES:,}; use a larger micro=, or a coarser metric"
        )
    return chosen


def contents(tally: Tally, sums: torch.Tensor, metric: Any) -> ListContents | None:
    """Return the contents for a second round; None if there is none.

    Raises:
        UsageError: there are too many numbers.
    """
    lists = tally.lists(sums)
    return ListContents(lists, type(metric).__name__) if lists else None


def result(tally: Tally, sums: torch.Tensor, samples: int) -> Any:
    """Return the metric over all `samples`: single numbers as Python numbers, tensors on the CPU."""
    return _plain(tally.result(sums, samples))


def number(name: str, value: Any) -> bool | int | float | str:
    """Return `value` as a Python number or text, for a line of metrics. Raises UsageError if it is something else."""
    value = _plain(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UsageError(f"run.log({name}={type(value).__name__}): log one number or text per name")


class _Mean:
    """The mean of a function's values over all samples, or over the units that the function returns as weights."""

    lanes = 2

    def __init__(self, metric: Callable[..., Any]) -> None:
        self._metric = metric

    def _check_takes(self, arguments: tuple[Any, ...]) -> None:
        """Raise UsageError if the metric does not take these arguments."""
        try:
            signature = inspect.signature(self._metric)
        except (ValueError, TypeError):  # a function of C may have none
            return
        try:
            signature.bind(*arguments)
        except TypeError as error:
            name = getattr(self._metric, "__name__", type(self._metric).__name__)
            raise UsageError(
                f"run.evaluate calls metric(outputs, targets), where outputs = model(inputs), but the metric is "
                f"{name}{signature} ({error}); change its parameters, or pass predict=lambda model, batch: (...), "
                f"which returns the metric's arguments"
            ) from None

    def put(self, arguments: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        del shard
        self._check_takes(arguments)
        values: Any = self._metric(*arguments)
        weights: Any = None
        if isinstance(values, tuple) and len(values) == 2:  # pyright: ignore[reportUnknownArgumentType]
            values, weights = cast("tuple[Any, Any]", values)
        if not isinstance(values, torch.Tensor) or values.numel() not in (1, samples):
            form = tuple(values.shape) if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise UsageError(
                f"run.evaluate: the metric returned {form} for {samples} samples; it must return one value per sample, "
                f"or their mean as one number, in a tensor; or a tuple of these values and their weights"
            )
        values = values.detach().to("cpu").double().reshape(-1)
        if weights is None:
            lanes[0], lanes[1] = values.sum() * (samples / values.numel()), samples
            return
        units = torch.as_tensor(weights).detach().to("cpu").double().reshape(-1)
        if units.numel() != values.numel() or not bool(((units >= 0) & units.isfinite()).all()):
            raise UsageError(
                f"run.evaluate: the metric returned {values.numel()} values, {units.numel()} weights; it must return a "
                f"weight for each value, finite and 0 or more: the number of tokens that the value is the mean over"
            )
        lanes[0], lanes[1] = torch.where(units > 0, values * units, 0.0).sum(), units.sum()

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        del sums
        return []

    def result(self, sums: torch.Tensor, samples: int) -> float:
        del samples
        return float(sums[0]) / float(sums[1]) if sums[1] else math.nan


class _Several:
    """Metrics by name, each with its own lanes."""

    def __init__(self, tallies: dict[str, Tally]) -> None:
        self._tallies = tallies
        self._sizes = [one.lanes for one in tallies.values()]
        self.lanes = sum(self._sizes)

    def put(self, arguments: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        for one, place in zip(self._tallies.values(), lanes.split(self._sizes), strict=True):
            one.put(arguments, shard, samples, place)

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        places = zip(self._tallies.values(), sums.split(self._sizes), strict=True)
        return [each for one, place in places for each in one.lists(place)]

    def result(self, sums: torch.Tensor, samples: int) -> dict[str, Any]:
        places = zip(self._tallies.items(), sums.split(self._sizes), strict=True)
        return {name: one.result(place, samples) for (name, one), place in places}


def _plain(value: Any) -> Any:
    """Return single numbers of torch and NumPy as Python numbers, also within a mapping; tensors on the CPU."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value.cpu() if isinstance(value, torch.Tensor) else value
