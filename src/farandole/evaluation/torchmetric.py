"""A metric of torchmetrics as lanes: its states, and what they come to.

It is updated from its initial state by each micro-batch, as if each were a process of a distributed job. States that
are summed over processes are lanes as they are; counts stay exact up to 2**53. Of other states (max, min, mean, or
none, as Pearson's) each micro-batch has lanes of its own, to which all others add zero, and the metric's own reduction
follows at the end. Lists of tensors take a second round (`evaluation/metric_lists.py`). What guesses from a batch's
values whether they are logits guesses for each micro-batch: give it probabilities.

torchmetrics is never imported here: if a metric is one of its, it has been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from farandole.errors import UsageError
from farandole.evaluation.metric_lists import EXACT, Lists


def is_torchmetric(metric: Any) -> bool:
    library = sys.modules.get("torchmetrics")
    return library is not None and isinstance(metric, (library.Metric, library.MetricCollection))


@dataclass(frozen=True, kw_only=True)
class _State:
    """One state of one metric: `owner` is its place among the metrics that a metric is made of."""

    owner: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    summed: bool
    reduction: Callable[[torch.Tensor], torch.Tensor] | None
    numel: int


class States:
    """A metric of torchmetrics, or a collection. The user's object stays as it is; copies of it do the work."""

    def __init__(self, metric: Any, shards: int, device: torch.device) -> None:
        self._shards = shards
        self._device = device
        self._fresh = metric.clone().to(device)
        self._fresh.reset()
        owners = _owners(self._fresh)
        self._states = [state for place, owner in enumerate(owners) for state in _states(place, owner)]
        self._sizes = [state.numel * (1 if state.summed else shards) for state in self._states]
        self._listed = [  # the same of states that are lists
            (place, name)
            for place, owner in enumerate(owners)
            for name, value in owner.metric_state.items()
            if isinstance(value, list)
        ]
        names = [f"{type(owners[place]).__name__}'s state {name!r}" for place, name in self._listed]
        self._lists = Lists(names, device)
        if self._listed:
            self._sizes.append(shards)  # how long each micro-batch's are
        self.lanes = sum(self._sizes)

    def put(self, given: tuple[Any, ...], shard: int, samples: int, lanes: torch.Tensor) -> None:
        del samples
        working = self._fresh.clone()  # `reset` is not enough: what else an update leaves must not reach the next one
        collection = isinstance(working, sys.modules["torchmetrics"].MetricCollection)
        for each in working.values(copy_state=False) if collection else (working,):
            each.update(*given)  # one by one: a collection shares states that are nearly equal after one micro-batch
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
                    f"tell the metric its number of outputs or classes"
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
        for (at, name), found in zip(self._listed, self._lists.states, strict=True):
            setattr(owners[at], name, found)
        for state, place in zip(self._states, sums.split(self._sizes), strict=False):
            value = self._typed(state, place, type(owners[state.owner]).__name__)
            if state.summed or self._shards == 1:
                value = value.reshape(state.shape)
            else:
                value = value.reshape(self._shards, *state.shape)
                value = state.reduction(value) if state.reduction else value
            setattr(owners[state.owner], state.name, value)
        for owner in owners:
            owner._update_count = self._shards  # else it warns that it was never updated
        return final.compute()

    def _typed(self, state: _State, place: torch.Tensor, kind: str) -> torch.Tensor:
        """In the state's own type; of whole numbers, sums that have become fractions stay such."""
        if state.dtype.is_floating_point:
            return place.to(self._device, state.dtype)
        if not torch.equal(place, place.round()) or place.isinf().any():
            return place.to(self._device, torch.get_default_dtype())
        if place.abs().max() > EXACT:
            raise UsageError(
                f"run.evaluate: {kind}'s state {state.name!r} has come to {place.abs().max():.0f}, and whole numbers "
                f"are exact up to 2**53 = {EXACT}; keep it in a floating-point type"
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
                f"use a function with a value a sample"
            )
        reduction = owner._reductions[name]
        yield _State(
            owner=place, name=name, shape=tuple(value.shape), dtype=value.dtype, summed=reduction is total,
            reduction=reduction, numel=value.numel(),
        )  # fmt: skip


def _owners(metric: Any) -> list[Any]:
    """The metrics that hold the states: the metric itself, a collection's members, what wrappers wrap."""
    kind = sys.modules["torchmetrics"].Metric
    owners = (module for module in metric.modules() if isinstance(module, kind))
    return list(
        {id(owner._defaults): owner for owner in owners}.values()
    )  # some wrappers show the wrapped one's states
