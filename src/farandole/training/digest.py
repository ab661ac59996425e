"""Digests of the replica: a small one for every step's control word, and one of each value and tensor to tell what
differs.

A step's digest is of the replica as the step begins. In it are

    (a) all plain values: the settings of parameter groups, what schedulers and other objects hold, and torch's own
        settings that bear on bits;
    (b) the start-of-step buffers, all of them;
    (c) a part of parameters, large buffers and optimizers' tensors. Put one after the other they are a run of lines of
        `LINE_BYTES`; step s takes the lines s mod `ROTATION` and every `ROTATION`th from there.

So what differs in (a), in (b), or over more than `LINE_BYTES * ROTATION` bytes (256 KiB) in a row shows in the next
step, and a single element within `ROTATION` steps. The lines are read in place: views of tensors in the host's memory
are kept for as long as the tensors stay where they are; those of an accelerator are gathered there and come in one
copy. Elements count in their order, not as they lie in memory, so a copy in another memory format is equal.
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

ROTATION = 512  # steps until every element has been looked at
LINE_BYTES = 512
NAME = 256  # characters


class StepDigest:
    """Of one worker's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._lines: list[TensorLines] = []
        self._buffers = [TensorLines(buffer, 0) for buffer in replica.kept_buffers]

    def at(self, step: int, settings: Mapping[str, str]) -> int:
        """The digest, 63 bits and not 0, where `step` begins. Its buffers and plain values are those kept for it."""
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
        """The tensors as lines: those of the step before, where nothing has moved."""
        known = self._lines
        if len(known) != len(tensors) or any(k.moved(t) for k, t in zip(known, tensors, strict=True)):
            self._lines, first = [], 0
            for tensor in tensors:
                self._lines.append(TensorLines(tensor, first))
                first += self._lines[-1].count
        return self._lines


class TensorLines:
    """A tensor as lines of `LINE_BYTES`, the last one perhaps shorter. `first`: the first one's place in the run."""

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
        return self._tensor is not tensor or self._pointer != tensor.data_ptr()

    def take(self, step: int, rotation: int, digest: Any, elsewhere: list[torch.Tensor]) -> None:
        """The step's lines into `digest`; where they are on an accelerator, into `elsewhere`."""
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
    """Names and digests of everything: torch's settings, then of the replica plain values, buffers, parameters, and
    optimizers' tensors.

    If there are too many for a message, the last is of all that are left.
    """
    leaves = [*settings.items(), *leaves_of(replica)]
    names = ["".join(c if c.isprintable() else "?" for c in name[:NAME]) for name, _ in leaves]
    most = fitting(names)
    digests = [hashlib.sha256(content(value)) for _, value in leaves[:most]]
    for _, value in leaves[most:]:
        digests[-1].update(content(value))
    return tuple(names[:most]), tuple(number(digest.digest()) for digest in digests)


def unlike(replica: Replica, state: Mapping[str, Any]) -> list[str]:
    """The names of what the replica's objects have otherwise than `state`, which they have just loaded."""
    now = dict(_walk("", replica.state()["objects"]))
    return [name for name, value in _walk("", state["objects"]) if name not in now or not _same(value, now[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return bool((as_bytes(one) == as_bytes(other)).all())
    return encode(one)[0] == encode(other)[0]


def leaves_of(replica: Replica) -> list[tuple[str, Any]]:
    """Each value and tensor of a replica by name: plain values, buffers, parameters, then optimizers' tensors."""
    state = replica.state()
    found = dict(_walk("", state["objects"]))
    found |= {f"{n}.requires_grad": flag for n, flag in zip(replica.parameters, state["requires_grad"], strict=True)}
    found |= dict(zip(replica.buffers, state["buffers"], strict=True))

    def place(name: str) -> int:
        if not isinstance(found[name], torch.Tensor):
            return 0
        return 1 if name in replica.buffers else 2 if name in replica.parameters else 3

    return sorted(found.items(), key=lambda item: place(item[0]))


def _walk(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a nested state, with paths as one would write them; a list of plain values is one."""
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
    """What of a value or tensor goes into a digest."""
    return as_bytes(value) if isinstance(value, torch.Tensor) else encode(value)[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order, as bytes; a view where they lie so."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Any:
    """A tensor's elements in order, as bytes in the host's memory."""
    return _flat(tensor).cpu().numpy()


def number(digest: bytes) -> int:
    """63 bits of a digest, and not 0."""
    return int.from_bytes(digest[:8], "little") >> 1 or 1


# --- part digests -----------------------------------------------------------------------------------------------------
#
# Digests of a replica by who made the sums: which member's sums a difference of the replicas may come from.
#
# A member of a view makes the sums of a part of each bucket, for all. So the elements of parameters in that part, and
# of the optimizer's tensors of the same shapes, have got their values by its sums, in each step that this view has
# made. What may be found to differ has come about within the last `ROTATION` steps (`training/digest.py`): the views
# that have made those are kept, with the buckets that they had. `protocol/coordinator/disputes.py` says what follows
# from the digests.

Parts = tuple[tuple[PartDigests, ...], int]
UNKNOWN: Parts = ((), 0)


class PartsDigest:
    """Of one worker's replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._made: dict[tuple[int, int], tuple[View, Layout, int]] = {}  # with the last step

    def updated(self, view: View, layout: Layout, step: int) -> None:
        """The update of `step` is made from sums of `view` in the buckets of `layout`."""
        self._made[view.number, int(layout.sizes[:15], 16)] = view, layout, step
        if len(self._made) > MAX_PARTS:
            self._made = {key: made for key, made in self._made.items() if made[2] >= step - ROTATION}

    def at(self, step: int, settings: Mapping[str, str]) -> Parts:
        """The digests where `step` begins, and that of everything else; `UNKNOWN` if there were too many views, or one
        in which members of a host hand on what others have summed up.
        """
        recent = {key: made for key, made in self._made.items() if made[2] >= step - ROTATION - 1}
        if not recent or len(recent) > MAX_PARTS or any(_hands_on(view) for view, _, _ in recent.values()):
            return UNKNOWN
        tensors = list(self._tensors())
        parts = [self._of(key, view, layout, tensors) for key, (view, layout, _) in recent.items()]
        inside = {t.data_ptr() for _, layout, _ in recent.values() for each in tensors for i, t in each.items()
                  if i in layout.where and t.numel()}  # fmt: skip
        rest = hashlib.sha256()
        for name, value in (*settings.items(), *leaves_of(self._replica)):
            if not (isinstance(value, torch.Tensor) and value.data_ptr() in inside):
                rest.update(name.encode())
                rest.update(content(value))
        return tuple(parts), number(rest.digest())

    def _of(
        self, key: tuple[int, int], view: View, layout: Layout, tensors: Sequence[Mapping[int, torch.Tensor]]
    ) -> PartDigests:
        levels, digests = Levels.of(view), [hashlib.sha256() for _ in view.members]
        for bucket in layout.buckets:
            cuts = [levels.slices(bucket, member) for member in view.members]
            for index, offset in zip(bucket.params, bucket.offsets, strict=True):
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
        """By the parameters' numbers: the parameters, then what each optimizer has of that shape, by its keys."""
        parameters = list(self._replica.parameters.values())
        yield dict(enumerate(parameters))
        for thing in self._replica.objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                states: list[Mapping[str, Any]] = [thing.state.get(parameter, {}) for parameter in parameters]
                for key in sorted({key for state in states for key in state}):
                    found = {index: state.get(key) for index, state in enumerate(states)}
                    yield {
                        index: value
                        for index, value in found.items()
                        if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape
                    }


def _hands_on(view: View) -> bool:
    """Whether what one member has summed up reaches others by way of a third."""
    hosts = Levels.of(view).hosts
    return len(hosts) > 1 and any(len(workers) > 1 for workers in hosts)


# --- module attributes ------------------------------------------------------------------------------------------------
#
# Plain attributes of modules that a script changes while it trains: `dropout.p`, `bn.momentum`, training modes.
#
# state_dict() leaves them out, and they decide what is computed. What counts is every public attribute of a replicated
# module (one whose name doesn't begin with _) whose value is a number, a text, None, or a tuple of those. A value that
# is the same as when the worker asked for steps is the script's own beginning and belongs to nobody's state: it may
# differ by worker (a path, a device). A value that has changed since belongs to the run's state, as changed settings of
# torch do: joiners and resumed runs get it, and it is in each step's digest, so workers in which it differs are named.
#
# Which modules there are, by name and class, is looked at too, and so are functions among the attributes: those can't
# be handed over, so a joiner in which they differ is refused by name, and a resumed run says it.
#
# A forward pass may change attributes as well (a counter of calls, the last shape). Then each worker has its own, by
# the shards that it has computed. So what changes within an inner loop, or an evaluation, is compared with nobody
# from then on and goes to no joiner. It is told once, since what is computed may depend on it. Checkpoints hold it: a
# world of one goes on with it.
#
# Left out: names that begin with _, lists, dicts and tensors that are no buffers, and other objects.
#
# A look takes a call for each module, and compares.

_log = logging.getLogger(__name__)
_GONE = object()


class ModuleAttributes:
    """Attributes of the modules among `objects`, as they are now and as they were when this was made."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._roots = {name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)}
        self._own: set[str] = set()
        self._scan()
        self._first = self._by_name()
        self._changed: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}

    # --- in the course of a step -----------------------------------------------------------------------------

    def keep(self) -> None:
        """A step begins: what has changed by now belongs to its state."""
        self._look()
        self._kept = dict(sorted(self._changed.items()))

    def shards_begin(self) -> None:
        """The inner loop begins."""
        self._look()

    def shards_end(self) -> None:
        """It has ended: what has changed since it began was changed by forward passes."""
        new = self._look() - self._own
        if new:
            self._own |= new
            _log.warning(
                "forward passes change %s, attributes of which each worker has its own: if what is computed depends on "
                "them, make them buffers; names that begin with _ are not looked at",
                ", ".join(sorted(new)),
            )

    @contextmanager
    def forward_passes(self) -> Generator[None]:
        """Around forward passes that each worker makes of its own."""
        self.shards_begin()
        yield
        self.shards_end()

    # --- the state -------------------------------------------------------------------------------------------

    def compared(self) -> dict[str, str]:
        """By name, in words, what is to be equal on all workers as the step in hand began."""
        return {name: _words(value) for name, value in self._kept.items() if name not in self._own}

    def state(self, *, own: bool) -> dict[str, Any]:
        """What belongs to the state of the step in hand; with what is this worker's `own`, or without."""
        kept = {name: value for name, value in self._kept.items() if own or name not in self._own}
        return {name: [_simple(value)] if _is_plain(value) else _words(value) for name, value in kept.items()}

    def take(self, state: Mapping[str, Any]) -> list[str]:
        """Take over such a state. Returns in words what can't be taken over, and is another here."""
        self._look()
        unlike: list[str] = []
        for name in {**self._changed, **state}:
            place, attribute = self._place(name)
            now = _GONE if place is None else place.get(attribute, _GONE)
            if name not in state:
                first = self._first.get(name, _GONE)
                if place is not None and _is_plain(first) and _is_plain(now):
                    place[attribute] = first
            elif isinstance(state[name], list) and place is not None and (now is _GONE or _is_plain(now)):
                place[attribute] = state[name][0]
            elif state[name] != _words(now):
                unlike.append(f"{name}: {state[name]} then, {_words(now) or 'something else'} now")
        self._look()
        return unlike

    def put_back(self) -> Callable[[], None]:
        """Returns what puts all plain attributes back to what they are now."""
        self._look()
        before = self._by_name()

        def put_back() -> None:
            for name, value in before.items():
                place, attribute = self._place(name)
                if place is not None and _is_plain(value):
                    place[attribute] = value
            self._look()

        return put_back

    # --- looking ---------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        """List the modules and their attributes anew."""
        self._dicts: dict[str, dict[str, Any]] = {}
        self._children: dict[str, dict[str, Any]] = {}
        self._names: list[str] = []
        self._places: list[tuple[Callable[[Any], Any], dict[str, Any]]] = []
        for root, module in self._roots.items():
            for path, inner in module.named_modules(prefix=root):
                children = inner.__dict__.get("_modules")  # of a scripted module it is no dictionary
                self._dicts[path], self._children[path] = inner.__dict__, children if type(children) is dict else {}
                for place in (self._dicts[path], self._children[path]):
                    if keys := [key for key in place if not key.startswith("_")]:
                        self._names += [f"{path}.{key}" for key in keys]
                        self._places.append((itemgetter(keys[0], *keys), place))
        self._all = [*self._dicts.values(), *self._children.values()]
        self._values = self._read()

    def _read(self) -> list[Any]:
        """The values of all attributes, and how many there are in each place."""
        return [*(get(place) for get, place in self._places), *map(len, self._all)]

    def _by_name(self) -> dict[str, Any]:
        found = chain.from_iterable(values[1:] for values in self._values[: len(self._places)])
        return dict(zip(self._names, found, strict=True))

    def _look(self) -> set[str]:
        """Returns the names of what has changed since the last look."""
        try:
            if self._read() == self._values:
                return set()
        except Exception:  # noqa: BLE001  an attribute is gone, or is of a kind that can't be compared: a tensor
            pass
        before = self._by_name()
        self._scan()
        now = self._by_name()
        found = {name for name in now if _words(before.get(name, _GONE)) != _words(now[name])}
        for name in (before.keys() - now.keys()) | found:
            self._changed.pop(name, None)
            if name in now and _words(now[name]) not in ("", _words(self._first.get(name, _GONE))):
                self._changed[name] = now[name]
        return found

    def _place(self, name: str) -> tuple[dict[str, Any] | None, str]:
        """The dictionary in which an attribute lies, or would, and its name there."""
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
    """The plain value without what a subclass makes of it: what is handed over is a plain number."""
    if type(value) is tuple:
        return tuple(map(_simple, cast("tuple[Any, ...]", value)))
    kinds = (kind for kind in (bool, int, float, str) if isinstance(value, kind))
    return next(kinds)(value) if value is not None else None


def _words(value: Any) -> str:
    """What is compared of a value; "" for one that is not looked at."""
    if _is_plain(value):
        return repr(_simple(value))
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, FunctionType | BuiltinFunctionType | type):
        return f"the function {value.__qualname__}"
    return ""
