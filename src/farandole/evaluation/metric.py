"""Metrics as lanes: what one micro-batch adds to an evaluation's sums, and what the sums say at the end.

Invariant: what a micro-batch puts into the lanes depends on nothing but the micro-batch. Lanes are float64 and added in
the order of the tree, so the result has the same bits whoever computed which micro-batch, and however often.

- A function is one lane, the sum of its values; its result is their mean over all samples.
- A `torchmetrics` metric has lanes for its states (`evaluation/torchmetric.py`).
- A mapping of names to metrics is one after the other, from one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch

from farandole.errors import UsageError
from farandole.evaluation.metric_lists import LANES, Contents, Lists
from farandole.evaluation.torchmetric import States, is_torchmetric


class Tally(Protocol):
    """A metric over one evaluation. `lanes`: how many it needs, equal on all workers; `lists`: what needs more, once it
    is known how many."""

    lanes: int

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        """The list states, told by the lanes' sums how long they are; `result` is for after they were filled."""
        ...

    def put(self, given: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        """Into zeroed lanes, what one micro-batch of `samples` says; `given` are the metric's arguments."""
        ...

    def result(self, sums: torch.Tensor, samples: int) -> Any:
        """The metric over all `samples`, from the lanes' sums over all micro-batches. See the function."""
        ...


def tally(metric: Any, shards: int, device: torch.device) -> Tally:
    """The tally of `metric` for an evaluation of `shards` micro-batches on `device`.

    Raises:
        UsageError: no metric, or one whose states can't be summed, or too large ones.
    """
    if is_torchmetric(metric):
        made = States(metric, shards, device)
    elif isinstance(metric, Mapping) and metric:
        named = cast("Mapping[str, Any]", metric)
        made = _Several({name: tally(one, shards, device) for name, one in named.items()})
    elif callable(metric):
        made = _Mean(metric)
    else:
        raise UsageError(
            f"run.evaluate(metric={metric!r}): give a function of (outputs, targets), a torchmetrics.Metric or "
            f"MetricCollection, or a mapping of names to such"
        )
    if made.lanes > LANES:
        raise UsageError(
            f"run.evaluate: {type(metric).__name__} has {made.lanes:,} numbers to sum over {shards} micro-batches, at "
            f"most {LANES:,} can be; use a larger micro=, or a coarser metric"
        )
    return made


def contents(tally: Tally, sums: torch.Tensor, metric: Any) -> Contents | None:
    """What a second round has to sum, if anything.

    Raises:
        UsageError: it is too much.
    """
    lists = tally.lists(sums)
    return Contents(lists, type(metric).__name__) if lists else None


def result(tally: Tally, sums: torch.Tensor, samples: int) -> Any:
    """The metric over all `samples`: single numbers as Python's own, tensors on the CPU."""
    return _plain(tally.result(sums, samples))


def number(name: str, value: Any) -> bool | int | float | str:
    """What a line of metrics can hold: numbers of torch and NumPy as Python's own."""
    value = _plain(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise UsageError(f"run.log({name}={type(value).__name__}): log one number or text a name")


class _Mean:
    """The mean of a function's values over all samples."""

    lanes = 1

    def __init__(self, metric: Callable[..., Any]) -> None:
        self._metric = metric

    def put(self, given: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        del shard
        values: Any = self._metric(*given)
        if not isinstance(values, torch.Tensor) or values.numel() not in (1, samples):
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise UsageError(
                f"run.evaluate: the metric gave {found} for {samples} samples; "
                f"it must give one value a sample, or their mean as one number, in a tensor"
            )
        lanes[0] = values.detach().to("cpu").double().sum() * (samples / values.numel())

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        del sums
        return []

    def result(self, sums: torch.Tensor, samples: int) -> float:
        return sums.item() / samples if samples else math.nan


class _Several:
    """Metrics by name, each with lanes of its own."""

    def __init__(self, tallies: dict[str, Tally]) -> None:
        self._tallies = tallies
        self._sizes = [one.lanes for one in tallies.values()]
        self.lanes = sum(self._sizes)

    def put(self, given: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        for one, place in zip(self._tallies.values(), lanes.split(self._sizes), strict=True):
            one.put(given, shard, samples, place)

    def lists(self, sums: torch.Tensor) -> list[Lists]:
        places = zip(self._tallies.values(), sums.split(self._sizes), strict=True)
        return [each for one, place in places for each in one.lists(place)]

    def result(self, sums: torch.Tensor, samples: int) -> dict[str, Any]:
        places = zip(self._tallies.items(), sums.split(self._sizes), strict=True)
        return {name: one.result(place, samples) for (name, one), place in places}


def _plain(value: Any) -> Any:
    """Single numbers of torch and NumPy as Python's own, also within a mapping; tensors on the CPU."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in cast("Mapping[str, Any]", value).items()}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value.cpu() if isinstance(value, torch.Tensor) else value
