"""What is replicated: the user's modules, optimizers and schedulers, seen as one state.

Every worker holds the same replica bit for bit between two steps. This file knows its parameters and buffers, takes
and restores its state, names its differences, and computes its fingerprint. It knows nothing of views.

Buffers: a forward pass may change them (running statistics), and what a shard computes must not depend on who
computed which shards before. So they are put back before each shard to what they were when the inner loop began, and
after the step they get one value from those of the shards, carried in the exchange's float64 lanes
(`training/buffer_lanes.py`): the mean, or what the script has asked for.

The loop body may set buffers before the inner loop (a temperature that falls), and so there are two values of each:
that of the step's beginning, which is the state, and that of the inner loop's. A joiner, or a run that is resumed,
begins with the step and runs the loop body itself: with the second value it would do `buffer.mul_(0.9)` twice.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import torch

from farandole.collective.buckets import ALIGNMENT
from farandole.collective.state_transfer import encode
from farandole.errors import UsageError
from farandole.training.buffer_lanes import BufferLanes, check_kinds
from farandole.training.plain_values import PlainValues
from farandole.training.tensor_listing import TensorListing

_OTHER_BYTES = 1 << 20  # steps that optimizers count, and the like
WITH_FUNCTIONS = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.MultiplicativeLR)
LARGEST_LANE_BUFFER = 1 << 16  # elements; larger buffers are constants (masks, tables), or an error


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Replica:
    """The objects handed to `run.replicate`, by name.

    `buffer_kinds`: see `BufferLanes`; `shards`: the most that a step has, 0 if nobody knows.

    Raises:
        UsageError: an object without state_dict() and load_state_dict(), no module with parameters at all, a
            SyncBatchNorm, or kinds of buffers that do not fit.
    """

    def __init__(
        self, objects: Mapping[str, object], buffer_kinds: Mapping[str, str] = MappingProxyType({}), *, shards: int = 1
    ) -> None:
        for name, thing in objects.items():
            if not isinstance(thing, Stateful):
                raise UsageError(
                    f"replicate({name}={type(thing).__name__}): it has no state_dict() and load_state_dict(); "
                    f"only what has both can be handed to a joining worker"
                )
        self.objects = cast("dict[str, Stateful]", dict(objects))
        self._modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        for name, module in self._modules.items():
            _refuse_uninitialized(name, module)
            _refuse_synchronized(name, module)
        self._listing = TensorListing(self._modules)
        self.parameters = dict(self._listing.parameters)
        self.buffers = self._listing.buffers
        if not self.parameters:
            raise UsageError(f"replicate({', '.join(objects) or 'nothing'}): no module with parameters is among them")
        self.ids = frozenset(map(id, self.parameters.values()))
        for name, thing in objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                foreign = sum(id(p) not in self.ids for group in thing.param_groups for p in group["params"])
                if foreign:
                    raise UsageError(
                        f"replicate({name}={type(thing).__name__}): {foreign} of its parameters are in none of the "
                        f"modules, so their gradients would stay each worker's own; hand in the module that has them"
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
        self._kept = [buffer.detach().clone() for buffer in self._in_lanes]
        self._start = [buffer.detach().clone() for buffer in self._in_lanes]
        small = {n: b for n, b in self.buffers.items() if n not in self._constants}
        check_kinds(buffer_kinds, small, self._constants)
        self.buffer_kinds = buffer_kinds
        self._lanes = BufferLanes(small, buffer_kinds, shards)
        self.lanes = self._lanes.count
        self._shard, self._is_last = 0, True
        self.plain = PlainValues(self.objects, lambda: self._state({}))
        self._flags: list[bool] = []

    def _align(self) -> None:
        """Alignment is part of numerics: a parameter made from a mapped file or a NumPy array moves once, here."""
        with torch.no_grad():
            for parameter in self.parameters.values():
                if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                    parameter.data = parameter.data.clone()

    @property
    def kept_buffers(self) -> list[torch.Tensor]:
        """The copies in which `keep_buffers` keeps what changes, always the same ones."""
        return self._kept

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """The buffers that are too large to change."""
        return self._constants

    # --- what is trained -------------------------------------------------------------------------------------

    def look(self, *, whole: bool = True) -> bool:
        """Compare what is trained with what was listed, and follow it: buffers that were assigned anew, and parameters
        and modules that were replaced by others of the same names, shapes and dtypes. True if a parameter was replaced.

        `whole`: look at shapes, dtypes and the optimizers' groups too.

        Raises:
            UsageError: what can't be followed, because whoever joins or resumes could not take it over.
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
                        f"{self._functions[name]}: functions can't be handed to a joining worker; begin with one for "
                        f"each group that the optimizer will have, or use a schedule without functions of yours"
                    )
        return replaced

    def stays(self) -> None:
        """Compare what is trained with what was listed where an inner loop ends, in which no parameter may be replaced.

        Raises:
            UsageError: a parameter or module was replaced, came or went.
        """
        self._listing.adopt()
        if not self._listing.holds():
            then, now = self._listing, self._listing.follow(self._modules)
            new = [name for name, p in now.parameters.items() if p is not then.parameters[name]]
            raise UsageError(
                f"parameter {new[0]} was replaced within a step's inner loop, so that some micro-batches have trained "
                f"another one; replace it after the inner loop"
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
                f"{list(foreign[0].shape)}: they were replaced, or never handed in; put those of the modules into its "
                f"param_groups"
            )
        stale = [p for p in optimizer.state if all(p is not q for q in now) and hasattr(p, "shape")]
        if stale:
            raise UsageError(
                f"{kind} holds the state of {len(stale)} parameters that are in none of its groups, the first "
                f"{self._name_of(stale[0])}, which torch can't put into its state_dict(): "
                f"call {name}.state.pop(parameter) for those that you take out of a group, or switch their "
                f"requires_grad off and leave them in it"
            )
        self._in_groups[name] = now

    def check_forms(self) -> None:
        """Raises UsageError if a tensor has another shape, dtype or device than at the beginning; names it."""
        self._listing.check_forms()

    def _name_of(self, parameter: torch.Tensor) -> str:
        names = [name for name, each in self.parameters.items() if each is parameter]
        return names[0] if names else f"of shape {list(parameter.shape)}"

    # --- buffers ---------------------------------------------------------------------------------------------

    def keep_buffers(self) -> None:
        """A step begins: these are the values of buffers, and the plain values, that belong to the state.

        Raises:
            UnknownState: a value can't be sent without pickling.
        """
        self._listing.adopt()
        self._versions = {name: buffer._version for name, buffer in self._constants.items()}
        self.plain.keep((*self.parameters.values(), *self._constants.values()))
        self._flags = [parameter.requires_grad for parameter in self.parameters.values()]
        for kept, buffer in zip(self._kept, self._in_lanes, strict=True):
            kept.copy_(buffer.detach())
        for name, thing in self.objects.items():
            if isinstance(thing, torch.optim.Optimizer):
                self._keep_groups(name, thing)

    def _keep_groups(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        now = [parameter for group in optimizer.param_groups for parameter in (*group["params"], None)]
        then = self._grouped.get(name, ())
        if len(now) != len(then) or not all(map(operator.is_, now, then)):
            self._grouped[name] = now
            self._kept_groups[name] = self._groups_of(optimizer)

    def begin_shards(self) -> None:
        """The inner loop begins: these are the values that every shard starts from.

        Raises:
            UsageError: the loop body has changed a large buffer since the step began.
        """
        self._listing.adopt()
        self._check_constants("by the loop body between a step's beginning and its inner loop")
        for start, buffer in zip(self._start, self._in_lanes, strict=True):
            start.copy_(buffer.detach())
        self._lanes.begin(self._start)

    def reset_buffers(self, shard: int = 0, shards: int = 1) -> None:
        """The shard of that number, of so many in the step, begins."""
        self._listing.adopt()
        self._shard, self._is_last = shard, shard == shards - 1
        with torch.no_grad():
            for start, buffer in zip(self._start, self._in_lanes, strict=True):
                buffer.copy_(start)

    def buffers_to(self, lanes: torch.Tensor) -> None:
        """After a shard: fill `lanes`, shape (self.lanes,), the same memory each time.

        Raises:
            UsageError: the shard's forward pass has changed a large buffer, or an integer by too much.
        """
        self._listing.adopt()
        self._check_constants("in a forward pass")
        with torch.no_grad():
            self._lanes.write(lanes, self._start, self._in_lanes, shard=self._shard, last=self._is_last)

    def buffers_from(self, lanes: torch.Tensor, shards: int) -> None:
        """After a step of so many shards: the buffers' values from the reduced lanes, shape (self.lanes,).

        Raises:
            UsageError: what the shards have made of a buffer does not fit together.
        """
        with torch.no_grad():
            self._lanes.read(lanes, self._start, self._in_lanes, shards)

    def _check_constants(self, where: str) -> None:
        for name, buffer in self._constants.items():
            if buffer._version != self._versions[name]:
                raise UsageError(
                    f"buffer {name} of {buffer.numel()} elements was changed {where}; buffers above "
                    f"{LARGEST_LANE_BUFFER} elements are taken for constants within a step: change it in the loop body "
                    f"after the inner loop, on all workers alike, or split it"
                )

    # --- state -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state by reference, as it was at the last `keep_buffers`: within a step nothing else changes."""
        state = self._state({id(b): kept for b, kept in zip(self._in_lanes, self._kept, strict=True)})
        self.plain.put_into(state["objects"])
        state["groups"] |= self._kept_groups
        return {**state, "requires_grad": [*self._flags]} if self._flags else state

    def _state(self, kept: dict[int, torch.Tensor]) -> dict[str, Any]:
        """`kept`: what to give instead of a buffer, by its id."""
        objects: dict[str, Any] = {}
        for name, thing in self.objects.items():
            state = dict(thing.state_dict())
            for path, tensor in self._listing.paths.get(name, {}).items():  # as listed, whatever is there by now
                if path in state:
                    state[path] = kept.get(id(tensor), tensor).detach()
            objects[name] = state
        hidden = [kept.get(id(b), b).detach() for b in self.buffers.values()]
        return {
            "objects": objects,
            "buffers": hidden,  # once more, with those that state_dict() leaves out
            "requires_grad": [p.requires_grad for p in self.parameters.values()],
            "groups": {n: self._groups_of(o) for n, o in self.objects.items() if isinstance(o, torch.optim.Optimizer)},
        }

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of the parameters in each group: an optimizer's own state knows them by their places only."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]

    def _regroup(self, name: str, optimizer: torch.optim.Optimizer, groups: list[list[str]]) -> None:
        """Give the optimizer groups of these parameters: the script has changed them since its beginning.

        Their settings come with the optimizer's own state.
        """
        if groups == self._groups_of(optimizer):
            return
        wanted = [[self.parameters[each] for each in names] for names in groups]
        present = optimizer.param_groups
        present[len(wanted) :] = [{**optimizer.defaults, "params": []} for _ in wanted[len(present) :]]
        for group, parameters in zip(present, wanted, strict=True):
            group["params"] = parameters
        self._in_groups.pop(name, None)

    @property
    def most_bytes(self) -> int:
        """That the state may take after some steps. What an object of the user's has comes on top."""
        buffers = 2 * sum(map(_padded, self.buffers.values()))  # of an object, and once more
        return sum(map(_padded, self.parameters.values())) + buffers + self.moment_bytes + _OTHER_BYTES

    @property
    def moment_bytes(self) -> int:
        """That optimizers take from their first step on: the moments of Adam's kind, and momentum. Those of others come
        on top.
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
        """Take over a state of the same replica elsewhere. None of its tensors is kept: it may all be views of one."""
        self._listing.adopt()
        for name, thing in self.objects.items():
            given = state["objects"][name]
            if isinstance(thing, torch.nn.Module):
                thing.load_state_dict(given)  # it copies
                continue
            if isinstance(thing, torch.optim.Optimizer) and name in state.get("groups", {}):
                self._regroup(name, thing, state["groups"][name])
            thing.load_state_dict(_own(given))
            _put_back(given, thing.state_dict())
        with torch.no_grad():
            for buffer, value in zip(self.buffers.values(), state["buffers"], strict=True):
                buffer.copy_(value)
        for parameter, flag in zip(self.parameters.values(), state["requires_grad"], strict=True):
            parameter.requires_grad_(flag)
        self.keep_buffers()

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bits of the whole state, as hex."""
        self._listing.adopt()
        digest = hashlib.sha256()
        skeleton, tensors = encode(self._state({}))
        digest.update(skeleton)
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def facts(self) -> Iterator[tuple[str, str]]:
        """What must be equal in all workers: the classes of the objects, names, shapes and dtypes of the tensors, and
        what optimizers and schedulers have settings for: another version of torch may have more.
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
                f"depend on the workers; use BatchNorm, whose batch is the micro-batch (a larger micro=) and whose "
                f"running statistics are the mean over all micro-batches, or GroupNorm"
            )


def _own(value: Any) -> Any:
    """The nested value with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _own(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return type(value)(_own(item) for item in cast("list[Any]", value))
    return value


def _put_back(given: Any, now: Any) -> Any:
    """What is to be in the place of `now`: itself, with the tensors of `given` for those of another dtype or shape. An
    optimizer casts what it loads to the dtype of its parameters.
    """
    if isinstance(given, torch.Tensor) and isinstance(now, torch.Tensor):
        alike = (given.dtype, given.shape) == (now.dtype, now.shape)
        return now if alike else given.to(now.device, copy=True)
    if isinstance(given, dict) and isinstance(now, dict):
        known, into = cast("dict[Any, Any]", given), cast("dict[Any, Any]", now)
        for key in [key for key in known if key in into]:
            value = _put_back(known[key], into[key])
            if value is not into[key]:
                into[key] = value
    elif isinstance(given, list | tuple) and isinstance(now, list | tuple) and len(given) == len(now):
        items = [_put_back(a, b) for a, b in zip(cast("list[Any]", given), cast("list[Any]", now), strict=True)]
        if any(a is not b for a, b in zip(items, cast("list[Any]", now), strict=True)):
            if isinstance(now, tuple):
                return tuple(items)
            now[:] = items
    return cast("Any", now)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
