"""The epoch that a data set is in, and changes to it that its loader processes would never see.

Loader processes are started once, with the data set as it is then. What the script changes later is seen with
`num_workers=0` only, and by workers that start later: other samples than the others', without a word. One rule holds
for any number of processes: a data set changes by its `set_epoch(epoch)` alone, which is called here.

1. `set_epoch` is called wherever samples are read, before the first sample of that epoch, and again where an earlier
   epoch is gone back to. A request carries its epoch, so samples that are read ahead of the border have theirs. In the
   training process it is called before the step's body, so that the script sees it as well. Who comes in the middle of
   an epoch is told that one first. An evaluation is of epoch 0: what it reads is the same each time.
2. What has `set_epoch` may be the data set, one that it wraps (`Subset`, `ConcatDataset`, an attribute of a wrapper of
   the user's own), a transform, or the collate function. Who has the method answers for what it wraps.
3. In the training process the attributes of all of these are looked at when a step begins, and whenever a micro-batch
   is asked for. What has changed since farandole's own reading and telling ended is the script's doing, and an error
   that names it, also with `num_workers=0`: there it would hold from that moment on, whatever epoch and step that is.
   No error is what `set_epoch` does as well: a script may call it by itself, with the epoch that is due.

Looked at are values (numbers, texts, small containers and arrays), which object an attribute is, a tensor's version,
and what `multiprocessing.Value` holds. Not taken for a change: another object that is equal; a private attribute,
unless it is a value that becomes another one, and what is within it; and an attribute that was None and becomes an
object that is not callable, as a file does that is opened with the first sample. 1 us an attribute or less.

4. A number or text that changes *while* samples are made (a counter of calls) is each process's own, and depends on how
   many samples that process has made. It may be harmless, so it is a warning, in the first micro-batches of a process.

Left out: what changes within other objects, large containers and arrays (a list of file names that grows is seen by its
length); the modules of a network that has parameters; what another thread changes; variables of a module.
"""

from __future__ import annotations

import enum
import functools
import logging
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from farandole.errors import UsageError
from farandole.platform import output

_log = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, PurePath, torch.dtype, torch.device, torch.Size)
_SMALL = 64  # entries of a container
_SMALL_BYTES = 4096  # of an array
_MOST = 256  # objects
_MISSING = object()
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.Tensor, np.ndarray)

# what has `set_epoch`, by its id, and the epoch that it is in, in this process; several loaders may read it
_epochs: dict[int, tuple[Callable[[], Any], int]] = {}
_states: weakref.WeakSet[DatasetState] = weakref.WeakSet()


class Epochs:
    """What is to be told which epoch it is in; goes to loader processes with the data set."""

    def __init__(self, *roots: Any) -> None:
        self._entering = [each for root in roots for each in _with_set_epoch(root)]

    def enter(self, epoch: int, *, again: bool = False) -> bool:
        """All of it is in `epoch` from now on, in this process; False if nothing was called. `again`: somebody else may
        have called `set_epoch`.
        """
        called = False
        for each in self._entering:
            known = _epochs.get(id(each))
            if again or known is None or known[0]() is not each or known[1] != epoch:
                _epochs.pop(id(each), None)
                each.set_epoch(epoch)
                _epochs[id(each)] = _reference(each), epoch
                called = True
        return called


class DatasetState:
    """Of what one loader reads, as the training process has it."""

    def __init__(self, epochs: Epochs, *roots: Any) -> None:
        self._epochs = epochs
        self._roots = tuple(root for root in roots if root is not None)
        self._known: _Snapshot | None = None  # until the first epoch has begun
        self._epoch = -1
        _states.add(self)

    def enter(self, epoch: int) -> None:
        """Samples of `epoch` are to be read.

        Raises:
            UsageError: the script has changed what is read.
        """
        known = self._known
        if known is not None and not known.holds() and (changed := _difference(known, now := _Snapshot(self._roots))):
            if not (self._is_again(known, self._epoch) and self._is_again(now, epoch)):
                path, before, after = changed
                raise UsageError(
                    f"{path} was {before} and is {after} now: the script has changed the data set since its loader "
                    f"began to read, which loader processes and later workers don't see; give it a method "
                    f"set_epoch(epoch), which is called for each epoch wherever samples are read, and change it there; "
                    f"for an evaluation hand in another data set"
                )
            self.settle()
        if self._epochs.enter(epoch) or known is None:
            self.settle()
        self._epoch = epoch

    def _is_again(self, state: _Snapshot, epoch: int) -> bool:
        """`set_epoch(epoch)` leads to `state`: whatever the script has changed, it can have done by that."""
        return self._epochs.enter(epoch, again=True) and not _difference(state, _Snapshot(self._roots))

    def settle(self) -> None:
        """What has changed until now was farandole's own doing, for other loaders of the same objects as well."""
        for each in tuple(_states):
            if each is self or (each._known is not None and self._shares(each._known)):
                each._take()

    def _take(self) -> None:
        if self._known is None or not self._known.holds():
            self._known = _Snapshot(self._roots)

    def _shares(self, other: _Snapshot) -> bool:
        return self._known is not None and not self._known.parts.keys().isdisjoint(other.parts)


@contextmanager
def warn_of_own_changes(*roots: Any) -> Generator[None]:
    """Around the making of samples: warn of numbers and texts of `roots` that this changes."""
    present = tuple(root for root in roots if root is not None)
    before = _Snapshot(present).values
    yield
    after = _Snapshot(present).values
    both = [(path, was, after[path]) for path, was in before.items() if path in after]
    changed = [path for path, was, now in both if was[1] != now[1] and _is_value(was[0]) and _is_value(now[0])]
    if changed:
        message = (
            f"making samples changes {', '.join(sorted(changed))}: each process and each worker has its own value, so "
            f"if samples depend on it, they are others with other workers; let them depend on their index and epoch"
        )
        output.warn_once(_log, message)


def _is_value(value: Any) -> bool:
    return isinstance(value, _PLAIN) and value is not None


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _with_set_epoch(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, _NO_STATE) and callable(getattr(value, "set_epoch", None)):
            yield value
        else:
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    """The objects within `value` that bear on samples: data sets, transforms, containers of these."""
    if isinstance(value, Mapping):
        inner: Any = cast("Mapping[Any, Any]", value).values()
        return [each for each in inner if _bears(each)] if len(inner) <= _SMALL else []
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [each for each in items if _bears(each)] if len(items) <= _SMALL else []
    return [each for each in _attributes(value).values() if _bears(each)]


def _bears(value: Any) -> bool:
    if isinstance(value, (Dataset, list, tuple, dict)):
        return True
    if isinstance(value, (*_NO_STATE, *_PLAIN)):
        return False
    if isinstance(value, torch.nn.Module):
        return next(value.parameters(), None) is None  # a transform; a network's modes change by `eval()`
    return callable(value) or callable(getattr(value, "set_epoch", None))


def _attributes(value: Any) -> dict[str, Any]:
    """Its own, and the plain ones of its class; of a class of this package those of the user."""
    kind = type(value)
    slots, plain = _of_class(kind)
    if not slots and not plain and not _hides(kind):
        return getattr(value, "__dict__", {})
    found: dict[str, Any] = {name: each for name in plain if isinstance(each := getattr(kind, name, None), _PLAIN)}
    found |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {name: each for name, each in found.items() if not name.startswith("_" if _hides(kind) else "__")}


def _hides(kind: type) -> bool:
    return kind.__module__.startswith("farandole.")


@functools.lru_cache(maxsize=256)
def _of_class(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of its slots, and of what is plain in it."""
    slots: list[str] = []
    plain: list[str] = []
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in ("builtins", "typing", "torch", "torchvision", "farandole"):
            names = vars(each).get("__slots__", ())
            slots += [names] if isinstance(names, str) else names
            plain += [n for n, inner in vars(each).items() if isinstance(inner, _PLAIN) and not n.startswith("_")]
    return tuple(slots), tuple(plain)


class _Snapshot:
    """All that is looked at, at one moment."""

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.values: dict[str, tuple[Any, Any]] = {}  # by path: the value, and what stands for it in a comparison
        self.parts: dict[int, tuple[Any, list[int]]] = {}  # each object by its id, with the ids of its attributes
        self._mutable: list[tuple[Any, Any]] = []
        waiting = [(type(root).__name__, root) for root in reversed(roots)]
        while waiting and len(self.parts) < _MOST:
            path, value = waiting.pop()
            if id(value) in self.parts or isinstance(value, _NO_STATE):
                continue
            attributes = _attributes(value)
            self.parts[id(value)] = value, list(map(id, attributes.values()))
            for name, each in attributes.items():
                waiting += self._look(f"{path}.{name}", each)

    def _look(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Take one attribute, and give the objects in it that are to be looked at."""
        state = _state(value)
        self.values[path] = value, state
        if not isinstance(value, _PLAIN) and type(state) is not _Same:
            self._mutable.append((value, state))
        if path.rpartition(".")[2].startswith("_") and not isinstance(value, Dataset):
            return  # the class's own affair
        if isinstance(value, (list, tuple)):
            yield from ((f"{path}[{n}]", item) for n, item in enumerate(_parts(value)))
        elif isinstance(value, dict):
            entries = cast("dict[Any, Any]", value)
            few = entries.items() if len(entries) <= _SMALL else ()
            yield from ((f"{path}[{key!r}]", item) for key, item in few if _bears(item))
        elif _bears(value):
            yield path, value

    def holds(self) -> bool:
        """All of it is as it was; quickly, and only if nothing was replaced by an equal object."""
        same = all(list(map(id, _attributes(value).values())) == ids for value, ids in self.parts.values())
        return same and all(_state(value) == state for value, state in self._mutable)


def _state(value: Any) -> Any:
    """What is compared of a value; two that are equal stand for the same samples."""
    if isinstance(value, _PLAIN):
        return value if value == value else repr(value)
    if isinstance(value, torch.Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject
        return (value.tobytes(), value.shape, value.dtype.str) if small else _Same(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = cast("list[Any]", value)
        return tuple(map(_item, items)) if len(items) <= _SMALL else (_Same(value), len(items))
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        small = len(entries) <= _SMALL
        return tuple((key, _item(item)) for key, item in entries.items()) if small else (_Same(value), len(entries))
    if type(value).__module__ == "multiprocessing.sharedctypes":
        return repr(getattr(value, "value", None))
    return _Same(value)


def _item(value: Any) -> Any:
    return _state(value) if isinstance(value, _PLAIN) else _Same(value)


class _Same:
    """Equal to what stands for the same object, or for one that says it is equal."""

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        one, two = self._value, other._value
        if one is two:
            return True
        try:
            equal: Any = type(one) is type(two) and one == two
            return bool(equal.all()) if isinstance(equal, (torch.Tensor, np.ndarray)) else bool(equal)
        except Exception:  # noqa: BLE001  what it raises is its own affair: it is another object
            return False


def _difference(known: _Snapshot, now: _Snapshot) -> tuple[str, str, str] | None:
    """The first attribute that is another one: its path, what it was, and what it is."""
    for path in dict.fromkeys((*known.values, *now.values)):
        before, after = known.values.get(path, (_MISSING, None)), now.values.get(path, (_MISSING, None))
        if _changed(path, before, after):
            return path, _shown(before[0]), _shown(after[0])
    return None


def _changed(path: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    was, now = before[0], after[0]
    if before[1] == after[1] and (was is _MISSING) == (now is _MISSING):
        return False
    if path.rpartition(".")[2].startswith("_"):
        return all(isinstance(each, _PLAIN) and each is not None for each in (was, now))
    opened = was is None or was is _MISSING
    return not (opened and not isinstance(now, _PLAIN) and not callable(now))


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "not there"
    return repr(value)[:100] if isinstance(value, (*_PLAIN, list, tuple, dict, set)) else f"a {type(value).__name__}"
