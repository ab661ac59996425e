"""`set_epoch`, the way in which a dataset may change, and the detection of changes that loader processes don't see.

Loader processes are started once, with the dataset as it is then. A later change by the script is seen only with
`num_workers=0`, and by workers that start later: they would silently read other samples than the rest. One rule holds
for any number of processes: a dataset changes by its `set_epoch(epoch)` alone, which is called here.

1. `set_epoch` is called in each process that reads samples, before the first sample of that epoch, and again if an
   earlier epoch is read again. A request carries its epoch, so samples that are prefetched across the border of an
   epoch have theirs. In the training process it is called before the step's body, so that the script sees it as well.
   A worker that joins in the middle of an epoch calls it with that epoch first. An evaluation reads epoch 0, so that it
   reads the same each time.
2. The objects that have `set_epoch` may be the dataset, one that it wraps (`Subset`, `ConcatDataset`, an attribute of a
   user's own wrapper), a transform, or the collate function. An object with the method is responsible for those that it
   wraps.
3. In the training process the attributes of all of these are compared when a step begins, and whenever a micro-batch
   is fetched. A change since farandole's last own read or `set_epoch` call was made by the script. It is an error that
   names the attribute, also with `num_workers=0`: there the change would take effect at that moment, whatever epoch and
   step that is. A change that `set_epoch` makes as well is no error: a script may call it by itself, with the epoch
   that is due.

The comparison covers values (numbers, texts, small containers and arrays), the identity of the object that an attribute
holds, a tensor's version, and the content of a `multiprocessing.Value`. These are not taken for a change: another
object that is equal; a private attribute, and everything within it, unless it is a value that becomes another value;
and an attribute that was None and becomes an object that is not callable, like a file that is opened with the first
sample. The comparison takes 1 us an attribute or less.

4. A number or text that changes *while* samples are made (a counter of calls) is different in each process, and depends
   on how many samples that process has made. It may be harmless, so it is a warning, in the first micro-batches of a
   process.

Left out: changes within other objects, large containers and arrays (a list of file names that grows is detected by its
length); the modules of a network that has parameters; changes by another thread; variables of a module.
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

# id of an object with `set_epoch` -> a reference to it, and its epoch in this process; several loaders may read it
_epochs: dict[int, tuple[Callable[[], Any], int]] = {}
_states: weakref.WeakSet[DatasetState] = weakref.WeakSet()


class Epochs:
    """The objects with `set_epoch` within a dataset; sent to loader processes with the dataset."""

    def __init__(self, *roots: Any) -> None:
        self._entering = [each for root in roots for each in _with_set_epoch(root)]

    def enter(self, epoch: int, *, call_all: bool = False) -> bool:
        """Calls `set_epoch(epoch)` of all objects that are in another epoch, in this process.

        `again=True` calls all of them, since the script may have called `set_epoch`. Returns True if any was called.
        """
        called = False
        for each in self._entering:
            previous = _epochs.get(id(each))
            if call_all or previous is None or previous[0]() is not each or previous[1] != epoch:
                _epochs.pop(id(each), None)
                each.set_epoch(epoch)
                _epochs[id(each)] = _reference(each), epoch
                called = True
        return called


class DatasetState:
    """The state of the objects that one loader reads, in the training process."""

    def __init__(self, epochs: Epochs, *roots: Any) -> None:
        self._epochs = epochs
        self._roots = tuple(root for root in roots if root is not None)
        self._snapshot: _Snapshot | None = None  # None until the first epoch has begun
        self._epoch = -1
        _states.add(self)

    def enter(self, epoch: int) -> None:
        """Checks for changes, and puts the objects into `epoch`, before samples of it are read.

        Raises:
            UsageError: the script has changed one of the objects.
        """
        snapshot = self._snapshot
        if (
            snapshot is not None
            and not snapshot.holds()
            and (changed := _difference(snapshot, current := _Snapshot(self._roots)))
        ):
            if not (self._is_again(snapshot, self._epoch) and self._is_again(current, epoch)):
                path, before, after = changed
                raise UsageError(
                    f"{path} was {before} and is {after} now: the script has changed the dataset since its loader "
                    f"began to read, which loader processes and later workers don't see; give it a method "
                    f"set_epoch(epoch), which is called for each epoch in each process that reads samples, and change "
                    f"it there; for an evaluation pass another dataset"
                )
            self.settle()
        if self._epochs.enter(epoch) or snapshot is None:
            self.settle()
        self._epoch = epoch

    def _is_again(self, state: _Snapshot, epoch: int) -> bool:
        """Returns True if `set_epoch(epoch)` leads to `state`: then the script may have called just that."""
        return self._epochs.enter(epoch, call_all=True) and not _difference(state, _Snapshot(self._roots))

    def settle(self) -> None:
        """Accepts all changes until now as farandole's own, for other loaders of the same objects as well."""
        for each in tuple(_states):
            if each is self or (each._snapshot is not None and self._shares(each._snapshot)):
                each._take()

    def _take(self) -> None:
        if self._snapshot is None or not self._snapshot.holds():
            self._snapshot = _Snapshot(self._roots)

    def _shares(self, other: _Snapshot) -> bool:
        return self._snapshot is not None and not self._snapshot.parts.keys().isdisjoint(other.parts)


@contextmanager
def warn_of_own_changes(*roots: Any) -> Generator[None]:
    """Warns of numbers and texts within `roots` that the code in this context changes; wrap the making of samples."""
    present = tuple(root for root in roots if root is not None)
    before = _Snapshot(present).values
    yield
    after = _Snapshot(present).values
    both = [(path, old, after[path]) for path, old in before.items() if path in after]
    changed = [path for path, old, new in both if old[1] != new[1] and _is_value(old[0]) and _is_value(new[0])]
    if changed:
        message = (
            f"making samples changes {', '.join(sorted(changed))}: each process and each worker has its own value, so "
            f"samples that depend on it differ with other workers; make them depend on their index and epoch only"
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
    visited_ids: set[int] = set()
    waiting: list[Any] = [root]
    while waiting and len(visited_ids) < _MOST:
        value = waiting.pop()
        if id(value) in visited_ids:
            continue
        visited_ids.add(id(value))
        if not isinstance(value, _NO_STATE) and callable(getattr(value, "set_epoch", None)):
            yield value
        else:
            waiting += _parts(value)


def _parts(value: Any) -> list[Any]:
    """Returns the objects within `value` that affect samples: datasets, transforms, containers of these."""
    if isinstance(value, Mapping):
        inner: Any = cast("Mapping[Any, Any]", value).values()
        return [each for each in inner if _affects_samples(each)] if len(inner) <= _SMALL else []
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        return [each for each in items if _affects_samples(each)] if len(items) <= _SMALL else []
    return [each for each in _attributes(value).values() if _affects_samples(each)]


def _affects_samples(value: Any) -> bool:
    if isinstance(value, (Dataset, list, tuple, dict)):
        return True
    if isinstance(value, (*_NO_STATE, *_PLAIN)):
        return False
    if isinstance(value, torch.nn.Module):
        return next(value.parameters(), None) is None  # a transform; a network's modes change by `eval()`
    return callable(value) or callable(getattr(value, "set_epoch", None))


def _attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of `value` and the plain ones of its class; without private ones for our own classes."""
    kind = type(value)
    slots, plain = _of_class(kind)
    if not slots and not plain and not _hides(kind):
        return getattr(value, "__dict__", {})
    attributes: dict[str, Any] = {name: each for name in plain if isinstance(each := getattr(kind, name, None), _PLAIN)}
    attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return {name: each for name, each in attributes.items() if not name.startswith("_" if _hides(kind) else "__")}


def _hides(kind: type) -> bool:
    return kind.__module__.startswith("farandole.")


@functools.lru_cache(maxsize=256)
def _of_class(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the slots of a class, and of its plain class attributes."""
    slots: list[str] = []
    plain: list[str] = []
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in ("builtins", "typing", "torch", "torchvision", "farandole"):
            names = vars(each).get("__slots__", ())
            slots += [names] if isinstance(names, str) else names
            plain += [n for n, inner in vars(each).items() if isinstance(inner, _PLAIN) and not n.startswith("_")]
    return tuple(slots), tuple(plain)


class _Snapshot:
    """The compared attributes of the objects within `roots`, at one moment."""

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.values: dict[str, tuple[Any, Any]] = {}  # by path: the value, and its state for comparison
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
        """Records one attribute, and yields the objects within it that must be recorded too."""
        state = _state(value)
        self.values[path] = value, state
        if not isinstance(value, _PLAIN) and type(state) is not _Same:
            self._mutable.append((value, state))
        if path.rpartition(".")[2].startswith("_") and not isinstance(value, Dataset):
            return  # private to its class
        if isinstance(value, (list, tuple)):
            yield from ((f"{path}[{n}]", item) for n, item in enumerate(_parts(value)))
        elif isinstance(value, dict):
            entries = cast("dict[Any, Any]", value)
            few = entries.items() if len(entries) <= _SMALL else ()
            yield from ((f"{path}[{key!r}]", item) for key, item in few if _affects_samples(item))
        elif _affects_samples(value):
            yield path, value

    def holds(self) -> bool:
        """Returns True if nothing has changed. Fast; returns False also if an object was replaced by an equal one."""
        same = all(list(map(id, _attributes(value).values())) == ids for value, ids in self.parts.values())
        return same and all(_state(value) == state for value, state in self._mutable)


def _state(value: Any) -> Any:
    """Returns the state of a value for comparison; equal states stand for the same samples."""
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
    """A wrapper that is equal to the wrapper of the same object, or of one that compares equal to it."""

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
        except Exception:  # noqa: BLE001  objects whose comparison raises count as different
            return False


def _difference(earlier: _Snapshot, later: _Snapshot) -> tuple[str, str, str] | None:
    """Returns the first attribute that differs: its path, its earlier and its present value; None if none does."""
    for path in dict.fromkeys((*earlier.values, *later.values)):
        before, after = earlier.values.get(path, (_MISSING, None)), later.values.get(path, (_MISSING, None))
        if _changed(path, before, after):
            return path, _shown(before[0]), _shown(after[0])
    return None


def _changed(path: str, before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    previous, current = before[0], after[0]
    if before[1] == after[1] and (previous is _MISSING) == (current is _MISSING):
        return False
    if path.rpartition(".")[2].startswith("_"):
        return all(isinstance(each, _PLAIN) and each is not None for each in (previous, current))
    opened = previous is None or previous is _MISSING
    return not (opened and not isinstance(current, _PLAIN) and not callable(current))


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "not there"
    return repr(value)[:100] if isinstance(value, (*_PLAIN, list, tuple, dict, set)) else f"a {type(value).__name__}"
