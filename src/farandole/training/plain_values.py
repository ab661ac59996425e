"""Plain values of the replica as a step begins: everything in its state that is no large tensor.

A loop body may step a scheduler before the inner loop. A joiner or a resumed run begins with the step and runs that
body itself, so the state must hold the rate from before: with the later one it would step twice. So everything plain
is kept as it is when a step begins, and the state is put together from that: rates and other settings of parameter
groups, numbers in optimizers' states, all that schedulers and other objects give, what modules have as extra state;
and small tensors among those (a rate may be one). Parameters and moments are too large to be kept. A change of them in
a loop body before its inner loop is seen by their version counters (`changed`), and then the state is called what it
is: not a step's beginning. Not seen: what a script writes through `.data` or NumPy, which PyTorch doesn't count.

It is kept as `encode` makes it, so a value that can't be handed to a joiner or written to a checkpoint is an error at
the beginning of the first step that has it. The same bytes are the plain part of the step's digest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, cast

import torch
from torch.optim import Optimizer

from farandole.collective.state_transfer import decode, encode
from farandole.errors import UnknownState

WHOLE_BYTES = 4096  # a tensor among plain values is one of them up to here

_version = attrgetter("_version")


class PlainValues:
    """Plain values of `objects`. `state()`: the whole state, to name by its path what can't be sent.

    Attributes:
        skeleton: the plain values as `encode` makes it.
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
        """A step begins: these are the values that belong to its state. `parameters`: and large buffers.

        Raises:
            UnknownState: a value can't be sent without pickling; names its path.
        """
        values, tensors = self._collect()
        try:
            self.skeleton, found = encode(values)
            if not _same(tensors, self._of_optimizers):
                encode(tensors)
        except UnknownState:
            self.skeleton = b""
            encode(self._state())  # names it by its path
            raise
        self._parameters, self._of_optimizers = [*parameters], tensors
        self._in_skeleton = [t if _is_large(t) else t.clone() for t in found]
        self.small = [t for t in self._in_skeleton if not _is_large(t)]
        self.large = [*tensors, *(t for t in found if _is_large(t))]
        self._versions = self._current_versions()

    def changed(self) -> bool:
        """Returns True if a tensor that is not kept was changed or replaced since the last `keep`."""
        modules = [thing for thing in self._objects.values() if isinstance(thing, torch.nn.Module)]
        kept = set(map(id, self._parameters))
        return (
            self._versions != self._current_versions()
            or not _same(self._collect()[1], self._of_optimizers)
            or any(id(parameter) not in kept for module in modules for parameter in module.parameters())
        )

    def put_into(self, objects: dict[str, Any]) -> None:
        """Replace the plain values in the state_dicts of all objects by those that were kept."""
        if not self.skeleton:
            return
        kept = decode(self.skeleton, self._in_skeleton)
        for name, thing in self._objects.items():
            if isinstance(thing, torch.nn.Module):
                objects[name].update(kept[name])
            elif _is_usual(thing):
                _put_into_optimizer(objects[name], *kept[name])
            else:
                objects[name] = kept[name]

    def _current_versions(self) -> list[int]:
        return [*map(_version, self._parameters), *map(_version, self.large)]

    def _collect(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The plain values by object, and the tensors in optimizers' states."""
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
                found, numbers = _in_states(thing.state)
                tensors += found
                values[name] = (groups, numbers)
            else:
                values[name] = thing.state_dict()
        return values, tensors


def _in_states(states: Mapping[Any, Any]) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """The tensors in an optimizer's states, and everything else there by the place of its state."""
    if set(map(type, states.values())) <= {dict}:
        values = list(chain.from_iterable(map(dict.values, states.values())))
        if set(map(type, values)) <= {torch.Tensor}:
            return values, {}  # as it is with torch's own, of which a large model has thousands
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
    """Returns True for an optimizer whose state_dict() gives its `state` and `param_groups`, and nothing else."""
    return isinstance(thing, Optimizer) and type(thing).state_dict is Optimizer.state_dict


def _extra_keys(thing: Any) -> tuple[str, ...]:
    """The keys of a module's state_dict() that are neither parameters nor buffers."""
    if not isinstance(thing, torch.nn.Module):
        return ()
    named = {name for name, _ in thing.named_parameters(remove_duplicate=False)}
    named |= {name for name, _ in thing.named_buffers(remove_duplicate=False)}
    return tuple(key for key in thing.state_dict() if key not in named)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() > WHOLE_BYTES
