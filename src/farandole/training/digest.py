"""Digests of the replica: a small one for every step's commit message, and one per value to name differences.

A step's digest covers the replica at the step's beginning. It includes

    (a) all plain values: the settings of parameter groups, the state of schedulers and other objects, and torch's own
        settings that affect bits;
    (b) the start-of-step buffers, all of them;
    (c) a part of parameters, large buffers and optimizers' tensors. Concatenated they are a sequence of lines of
        `LINE_BYTES`; step s takes the lines s mod `ROTATION` and every `ROTATION`th from there.

So a difference in (a), in (b), or over more than `LINE_BYTES * ROTATION` consecutive bytes (256 KiB) is detected in the
next step, and a difference in a single element within `ROTATION` steps. The lines are read in place: views of tensors
in host memory are kept until a tensor moves; lines of an accelerator are gathered there and arrive in one copy.
Elements are taken in their logical order, not in their memory order, so a copy in another memory format is equal.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from farandole.collective.buckets import Layout
from farandole.collective.schedule import Levels
from farandole.collective.state_transfer import encode
from farandole.protocol.messages import MAX_PARTS, PartDigests, fitting
from farandole.protocol.view import View
from farandole.training.replica import Replica

# --- digest -----------------------------------------------------------------------------------------------------------

ROTATION = 512  # steps until every element has been included once
LINE_BYTES = 512
NAME = 256  # most characters of a name


class StepDigest:
    """The step digest of one worker's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._lines: list[TensorLines] = []
        self._buffers = [TensorLines(buffer, 0) for buffer in replica.kept_buffers]

    def at(self, step: int, settings: Mapping[str, str]) -> int:
        """Return the digest at the beginning of `step`: 63 bits, never 0.

        It takes the copies of buffers and plain values that were made for this step.
        """
        replica = self._replica
        digest = hashlib.sha256(step.to_bytes(8, "little"))
        digest.update(encode(dict(settings))[0])
        digest.update(replica.plain.skeleton)
        for tensor in replica.plain.small:
            digest.update(as_bytes(tensor))
        tensors = [*replica.parameters.values(), *replica.constants.values(), *replica.plain.large]
        elsewhere: list[torch.Tensor] = []
        for lines in self._buffers:
            lines.take(0, 1, digest, elsewhere)
        for lines in self._placed(tensors):
            lines.take(step, ROTATION, digest, elsewhere)
        if elsewhere:
            digest.update(as_bytes(torch.cat(elsewhere)))
        return number(digest.digest())

    def _placed(self, tensors: list[torch.Tensor]) -> list[TensorLines]:
        """Return the tensors as lines. The lines of the previous step are reused if no tensor has moved."""
        cached = self._lines
        if len(cached) != len(tensors) or any(k.moved(t) for k, t in zip(cached, tensors, strict=True)):
            self._lines, first = [], 0
            for tensor in tensors:
                self._lines.append(TensorLines(tensor, first))
                first += self._lines[-1].count
        return self._lines


class TensorLines:
    """A tensor as lines of `LINE_BYTES`; the last may be shorter. `first`: index of its first line in the sequence."""

    __slots__ = ("_first", "_flat", "_pointer", "_tail", "_tensor", "_view", "count")

    def __init__(self, tensor: torch.Tensor, first: int) -> None:
        self._tensor, self._pointer, self._first = tensor, tensor.data_ptr(), first
        size = tensor.numel() * tensor.element_size()
        self.count = -(-size // LINE_BYTES)
        whole = size // LINE_BYTES * LINE_BYTES
        self._view: Any = None
        self._tail: Any = None
        if size and tensor.device.type == "cpu" and tensor.is_contiguous():
            flat = _flat(tensor).numpy()
            self._view = flat[:whole].view(f"V{LINE_BYTES}")
            self._tail = flat[whole:] if whole < size else None

    def moved(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is another object, or is at another address."""
        return self._tensor is not tensor or self._pointer != tensor.data_ptr()

    def take(self, step: int, rotation: int, digest: Any, elsewhere: list[torch.Tensor]) -> None:
        """Add the step's lines to `digest`; append them to `elsewhere` if they are on an accelerator."""
        start = (step - self._first) % rotation
        if start >= self.count:
            return
        ends = (self.count - 1 - start) % rotation == 0
        if self._view is not None:
            digest.update(self._view[start::rotation].tobytes())
            if self._tail is not None and ends:
                digest.update(self._tail)
            return
        flat = _flat(self._tensor)
        whole = flat.numel() // LINE_BYTES * LINE_BYTES
        pieces = [flat[:whole].view(-1, LINE_BYTES)[start::rotation].reshape(-1), *([flat[whole:]] if ends else [])]
        if flat.device.type != "cpu":
            elsewhere += pieces
            return
        for piece in pieces:
            digest.update(as_bytes(piece))


def each(replica: Replica, settings: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and digests of torch's settings and the replica's plain values, buffers, parameters and moments.

    If there are too many for a message, the last digest covers all remaining values.
    """
    leaves = [*settings.items(), *leaves_of(replica)]
    names = ["".join(c if c.isprintable() else "?" for c in name[:NAME]) for name, _ in leaves]
    most = fitting(names)
    digests = [hashlib.sha256(content(value)) for _, value in leaves[:most]]
    for _, value in leaves[most:]:
        digests[-1].update(content(value))
    return tuple(names[:most]), tuple(number(digest.digest()) for digest in digests)


def unlike(replica: Replica, state: Mapping[str, Any]) -> list[str]:
    """Return the names of the values in which the replica's objects differ from `state`, which they have loaded."""
    now = dict(_walk("", replica.state()["objects"]))
    return [name for name, value in _walk("", state["objects"]) if name not in now or not _same(value, now[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool((as_bytes(one) == as_bytes(other)).all())
    return encode(one)[0] == encode(other)[0]


def leaves_of(replica: Replica) -> list[tuple[str, Any]]:
    """Return each value and tensor of a replica by name: plain values, buffers, parameters, optimizers' tensors."""
    state = replica.state()
    leaves = dict(_walk("", state["objects"]))
    leaves |= {f"{n}.requires_grad": flag for n, flag in zip(replica.parameters, state["requires_grad"], strict=True)}
    leaves |= dict(zip(replica.buffers, state["buffers"], strict=True))

    def place(name: str) -> int:
        if not isinstance(leaves[name], torch.Tensor):
            return 0
        return 1 if name in replica.buffers else 2 if name in replica.parameters else 3

    return sorted(leaves.items(), key=lambda item: place(item[0]))


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of a nested state. A list of plain values is one value."""
    if isinstance(value, dict):
        for key, inner in cast("dict[Any, Any]", value).items():
            yield from _walk(f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key}]", inner)
    elif isinstance(value, list | tuple) and any(
        isinstance(v, dict | list | tuple | torch.Tensor) for v in cast("Sequence[Any]", value)
    ):
        for index, inner in enumerate(cast("Sequence[Any]", value)):
            yield from _walk(f"{name}[{index}]", inner)
    else:
        yield name, value


def content(value: Any) -> Any:
    """Return the bytes of a value or tensor that go into a digest."""
    return as_bytes(value) if isinstance(value, torch.Tensor) else encode(value)[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in logical order, as bytes; a view if memory has the same order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return the tensor's elements in logical order, as bytes in host memory."""
    return _flat(tensor).cpu().numpy()


def of(value: Any) -> bytes:
    """Return the SHA-256 of a value or tensor."""
    return hashlib.sha256(content(value)).digest()


def number(digest: bytes) -> int:
    """Return 63 bits of a digest, never 0."""
    return int.from_bytes(digest[:8], "little") >> 1 or 1


# --- part digests -----------------------------------------------------------------------------------------------------
#
# Digests of a replica's parts by summing member: they tell whose sums may have caused a difference of replicas.
#
# Each member of a view computes the sums of a part of each bucket, for all members. So its sums have determined the
# elements of parameters in that part, and of the optimizer's tensors of the same shapes, in each step of this view. A
# difference that is detected has occurred within the last `ROTATION` steps: the views of these steps are kept, with
# their buckets. `protocol/coordinator/disputes.py` draws the conclusions from the digests.

Parts = tuple[tuple[PartDigests, ...], int]
UNKNOWN: Parts = ((), 0)


class PartsDigest:
    """The part digests of one worker's replica. `before`: those of the loop before, of the same parameters."""

    def __init__(self, replica: Replica, before: PartsDigest | None = None) -> None:
        self._replica = replica
        # view, buckets, and the last step with them
        self._groups: dict[tuple[int, int], tuple[View, Layout, int]] = before._groups if before else {}

    def updated(self, view: View, layout: Layout, step: int) -> None:
        """Record that the update of `step` uses sums of `view` in the buckets of `layout`."""
        self._groups[view.number, int(layout.sizes[:15], 16)] = view, layout, step
        if len(self._groups) > MAX_PARTS:
            self._groups = {key: group for key, group in self._groups.items() if group[2] >= step - ROTATION}

    def at(self, step: int, settings: Mapping[str, str]) -> Parts:
        """Return the digests at the beginning of `step`, and one digest of everything else.

        Returns `UNKNOWN` if there were too many views, or one in which a member of a host passes on others' sums.
        """
        recent = {key: group for key, group in self._groups.items() if group[2] >= step - ROTATION - 1}
        if not recent or len(recent) > MAX_PARTS or any(_hands_on(view) for view, _, _ in recent.values()):
            return UNKNOWN
        tensors = list(self._tensors())
        parts = [self._digest_group(key, view, layout, tensors) for key, (view, layout, _) in recent.items()]
        inside = {t.data_ptr() for _, layout, _ in recent.values() for each in tensors for i, t in each.items()
                  if i in layout.where and t.numel()}  # fmt: skip
        other_values = hashlib.sha256()
        for name, value in (*settings.items(), *leaves_of(self._replica)):
            if not (isinstance(value, torch.Tensor) and value.data_ptr() in inside):
                other_values.update(name.encode())
                other_values.update(content(value))
        return tuple(parts), number(other_values.digest())

    def _digest_group(
        self, key: tuple[int, int], view: View, layout: Layout, tensors: Sequence[Mapping[int, torch.Tensor]]
    ) -> PartDigests:
        levels, digests = Levels.of(view), [hashlib.sha256() for _ in view.members]
        for bucket in layout.buckets:
            slices_of = [levels.slices(bucket, member) for member in view.members]
            cuts = [[tuple(map(bucket.numbers_before, each)) for each in slices] for slices in slices_of]
            for index, offset in zip(bucket.params, map(bucket.numbers_before, bucket.offsets), strict=True):
                for each in tensors:
                    if index not in each:
                        continue
                    flat = layout.elements(index, each[index])
                    for digest, slices in zip(digests, cuts, strict=True):
                        for start, stop in slices:
                            digest.update(as_bytes(flat[max(start - offset, 0) : max(stop - offset, 0)]))
        return PartDigests(
            view=key[0], cut=key[1], members=view.members, digests=tuple(number(d.digest()) for d in digests)
        )

    def _tensors(self) -> Iterator[dict[int, torch.Tensor]]:
        """Yield tensors by parameter index: the parameters, then the optimizers' tensors of that shape, key by key."""
        parameters = list(self._replica.parameters.values())
        yield dict(enumerate(parameters))
        for thing in self._replica.objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                states: list[Mapping[str, Any]] = [thing.state.get(parameter, {}) for parameter in parameters]
                for key in sorted({key for state in states for key in state}):
                    moments = {index: state.get(key) for index, state in enumerate(states)}
                    yield {
                        index: value
                        for index, value in moments.items()
                        if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape
                    }


def _hands_on(view: View) -> bool:
    """Return True if the sums of a member reach other members through a third one."""
    levels = Levels.of(view)
    return len(levels.hosts) > 1 and (levels.columns > 1 or len(levels.zones) > 1)


# --- module attributes ------------------------------------------------------------------------------------------------
#
# Plain attributes of modules that a script changes while it trains: `dropout.p`, `bn.momentum`, training modes.
#
# state_dict() omits them, and they affect results. Included is every public attribute of a replicated module (one whose
# name doesn't begin with _) whose value is a number, a text, None, or a tuple of those. A value that has not changed
# since the call of `run.steps` is part of the script's initial state and not of the run's state: it may differ between
# workers (a path, a device). A value that has changed since belongs to the run's state, like changed settings of torch:
# joiners and resumed runs get it, and it is in each step's digest, so workers in which it differs are named.
#
# The modules, by name and class, are compared too, and so are functions among the attributes. These can't be sent, so a
# joiner in which they differ is refused with the name, and a resumed run reports it.
#
# A forward pass may change attributes as well (a counter of calls, the last shape). Then each worker has its own value,
# depending on the shards that it has computed. So attributes that change within an inner loop, or an evaluation, are
# not compared from then on, and joiners do not get them. They are logged once, because results may depend on them.
# Checkpoints contain them: a single process continues with them.
#
# Not included: names that begin with _, lists, dicts and tensors that are no buffers, and other objects.
#
# A check takes one call for each module, and a comparison.

_log = logging.getLogger(__name__)
_MISSING = object()


class ModuleAttributes:
    """The attributes of the modules among `objects`: their present values, and those at this object's creation."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._roots = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
        self._own: set[str] = set()
        self._scan()
        self._first = self._by_name()
        self._changed: dict[str, Any] = {}
        self._copies: dict[str, Any] = {}

    # --- in the course of a step -----------------------------------------------------------------------------

    def keep(self) -> None:
        """Copy the changed attributes, which belong to the state of a step that begins."""
        self._look()
        self._copies = dict(sorted(self._changed.items()))

    def shards_begin(self) -> None:
        """Check the attributes when the inner loop begins."""
        self._look()

    def shards_end(self) -> None:
        """Check the attributes when the inner loop has ended: forward passes have made the changes since it began."""
        new = self._look() - self._own
        if new:
            self._own |= new
            _log.warning(
                "forward passes change %s; these attributes differ between workers: if results depend on them, make "
                "them buffers; names that begin with _ are not checked",
                ", ".join(sorted(new)),
            )

    @contextmanager
    def forward_passes(self) -> Generator[None]:
        """Return a context for forward passes that differ between workers."""
        self.shards_begin()
        yield
        self.shards_end()

    # --- the state -------------------------------------------------------------------------------------------

    def compared(self) -> dict[str, str]:
        """Return, as text by name, the attributes that must be equal on all workers at the current step's beginning."""
        return {name: _words(value) for name, value in self._copies.items() if name not in self._own}

    def state(self, *, own: bool) -> dict[str, Any]:
        """Return the attributes in the state of the current step. `own`: with those of this worker alone."""
        attributes = {name: value for name, value in self._copies.items() if own or name not in self._own}
        return {name: [_simple(value)] if _is_plain(value) else _words(value) for name, value in attributes.items()}

    def take(self, state: Mapping[str, Any]) -> list[str]:
        """Load the result of `state`. Returns a text for each attribute that can't be set and differs here."""
        self._look()
        unlike: list[str] = []
        for name in {**self._changed, **state}:
            place, attribute = self._place(name)
            now = _MISSING if place is None else place.get(attribute, _MISSING)
            if name not in state:
                first = self._first.get(name, _MISSING)
                if place is not None and _is_plain(first) and _is_plain(now):
                    place[attribute] = first
            elif isinstance(state[name], list) and place is not None and (now is _MISSING or _is_plain(now)):
                place[attribute] = state[name][0]
            elif state[name] != _words(now):
                unlike.append(f"{name}: {state[name]} then, {_words(now) or 'something else'} now")
        self._look()
        return unlike

    def put_back(self) -> Callable[[], None]:
        """Return a function that restores the present values of all plain attributes."""
        self._look()
        before = self._by_name()

        def put_back() -> None:
            for name, value in before.items():
                place, attribute = self._place(name)
                if place is not None and _is_plain(value):
                    place[attribute] = value
            self._look()

        return put_back

    # --- checks ----------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """List the modules and their attributes anew."""
        self._dicts: dict[str, dict[str, Any]] = {}
        self._children: dict[str, dict[str, Any]] = {}
        self._names: list[str] = []
        self._places: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        for root, module in self._roots.items():
            for path, inner in module.named_modules(prefix=root):
                children = inner.__dict__.get("_modules")  # not a dictionary in a scripted module
                self._dicts[path], self._children[path] = inner.__dict__, children if type(children) is dict else {}
                for place in (self._dicts[path], self._children[path]):
                    if keys := [key for key in place if not key.startswith("_")]:
                        self._names += [f"{path}.{key}" for key in keys]
                        self._places.append((itemgetter(keys[0], *keys), place))
        self._all = [*self._dicts.values(), *self._children.values()]
        self._values = self._read()

    def _read(self) -> list[Any]:
        """Return the values of all attributes, and the number of entries in each dictionary."""
        return [*(get(place) for get, place in self._places), *map(len, self._all)]

    def _by_name(self) -> dict[str, Any]:
        values = chain.from_iterable(values[1:] for values in self._values[: len(self._places)])
        return dict(zip(self._names, values, strict=True))

    def _look(self) -> set[str]:
        """Return the names of the attributes that have changed since the last check."""
        try:
            if self._read() == self._values:
                return set()
        except Exception:  # noqa: BLE001  an attribute is missing, or is a tensor, which can't be compared
            pass
        before = self._by_name()
        self._scan()
        now = self._by_name()
        changed = {name for name in now if _words(before.get(name, _MISSING)) != _words(now[name])}
        for name in (before.keys() - now.keys()) | changed:
            self._changed.pop(name, None)
            if name in now and _words(now[name]) not in ("", _words(self._first.get(name, _MISSING))):
                self._changed[name] = now[name]
        return changed

    def _place(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary of an attribute, existing or not, and its name there."""
        path, _, attribute = name.rpartition(".")
        children = self._children.get(path, {})
        return (children if attribute in children else self._dicts.get(path)), attribute


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, cast("tuple[Any, ...]", value)))
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, float | str | None)


def _simple(value: Any) -> Any:
    """Return the value as an object of the built-in type, without a subclass."""
    if type(value) is tuple:
        return tuple(map(_simple, cast("tuple[Any, ...]", value)))
    kinds = (kind for kind in (bool, int, float, str) if isinstance(value, kind))
    return next(kinds)(value) if value is not None else None


def _words(value: Any) -> str:
    """Return the text by which values are compared; "" for a value that is not compared."""
    if _is_plain(value):
        return repr(_simple(value))
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return f"the function {value.__qualname__}"
    return ""
