"""Plain attributes of modules that a script changes while it trains: `dropout.p`, `bn.momentum`, training modes.

state_dict() leaves them out, and they decide what is computed. What counts is every public attribute of a replicated
module (one whose name doesn't begin with _) whose value is a number, a text, None, or a tuple of those. A value that
is the same as when the worker asked for steps is the script's own beginning and belongs to nobody's state: it may
differ by worker (a path, a device). A value that has changed since belongs to the run's state, as changed settings of
torch do: joiners and resumed runs get it, and it is in each step's digest, so workers in which it differs are named.

Which modules there are, by name and class, is looked at too, and so are functions among the attributes: those can't be
handed over, so a joiner in which they differ is refused by name, and a resumed run says it.

A forward pass may change attributes as well (a counter of calls, the last shape). Then each worker has its own, by the
shards that it has computed. So what changes within an inner loop, or an evaluation, is compared with nobody from then
on and goes to no joiner. It is told once, since what is computed may depend on it. Checkpoints hold it: a world of one
goes on with it.

Left out: names that begin with _, lists, dicts and tensors that are no buffers, and other objects.

A look takes a call for each module, and compares.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

from torch import nn

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
                children = cast("dict[str, Any]", inner._modules)  # of a scripted module it is no dictionary
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
