"""Finds the state that a script keeps outside of what is replicated, as digests by name.

The search begins at the variables of the frames that run the script, its dataset and its modules, and goes a few levels
down: containers, objects of classes that the script's folder defines, datasets, and what functions have captured. Found
are random generators, objects with a `state_dict()`, tensors and arrays, and plain values. Classes are not searched.

A variable that the loop's body assigns before it reads it (`loss`, `images`) carries nothing from one step to the next,
and is left out. The order of the first access is read from the bytecode.
"""

from __future__ import annotations

import dis
import hashlib
import os
import random
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from farandole.check.records import DATASET, Kind, Leaves

DEPTH = 5  # levels below a variable
MOST = 2000  # values
LONGEST = 64  # elements of a container that are looked at, half of them at each end
SAMPLED = 4096  # elements of a tensor that its digest covers
_OF_MODULES = frozenset(nn.Module().__dict__)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ACCESS = re.compile("(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF|CLOSURE)")
Plain = bool | int | float | complex | str | bytes | None


class ScriptState:
    """The state of one process's script. `replicated`: the objects that `run.replicate` has received, by name."""

    def __init__(self, replicated: Mapping[str, object], dataset: object) -> None:
        self._replicated, self._dataset = dict(replicated), dataset
        self._folder = os.path.dirname(os.path.abspath(sys.argv[0])) + os.sep
        self._loop: tuple[CodeType, frozenset[str]] | None = None  # the code with the loop over the steps

    def enter(self) -> None:
        """Note which frame has the loop over the steps. Call it where that loop asks for a step."""
        frame = next(self._frames(), None)
        self._loop = frame and (frame.f_code, assigned_first(frame.f_code, frame.f_lasti))

    def leaves(self) -> Leaves:
        """Return the state as it is now, for a caller within the script's loop."""
        walk = _Walk(self._folder, self._replicated)
        walk.take(DATASET, self._dataset)
        for frame in self._frames():
            for name, value in _variables(frame, self._loop).items():
                walk.take(name, value)
            if frame.f_globals is not frame.f_locals:
                for name, value in frame.f_globals.items():
                    walk.take(name, value)
        for name, thing in self._replicated.items():
            walk.take(name, thing)
        return walk.leaves

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the script's own code, the innermost first."""
        frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if _is_own(self._folder, frame.f_code.co_filename, str(frame.f_globals.get("__name__"))):
                yield frame
            frame = frame.f_back


def assigned_first(code: CodeType, at: int) -> frozenset[str]:
    """Return the variables that the loop of `code` whose FOR_ITER is at offset `at` assigns before it reads them.

    Empty if there is another instruction at `at`.
    """
    first: dict[str, bool] = {}
    end = -1
    for each in dis.get_instructions(code):
        if each.offset == at and each.opname == "FOR_ITER":
            end = each.argval
        elif at < each.offset < end:
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)  # from Python 3.13 two at once
            for access, name in zip(_ACCESS.findall(each.opname), names, strict=False):
                first.setdefault(name, access == "STORE")
    return frozenset(name for name, assigned in first.items() if assigned)


def _variables(frame: FrameType, loop: tuple[CodeType, frozenset[str]] | None) -> dict[str, Any]:
    """Return the frame's variables, without those that its loop assigns before it reads them."""
    code = frame.f_code
    transient = loop[1] if loop and loop[0] is code else assigned_first(code, frame.f_lasti)
    return {name: value for name, value in frame.f_locals.items() if name not in transient}


def _is_own(folder: str, file: str, module: str) -> bool:
    """Return True if a file or module is the script's, and not of an installed package or of Python itself."""
    installed = "site-packages" in file or module.partition(".")[0] in ("farandole", "torch", "numpy")
    if file.startswith("<"):  # such as <frozen importlib._bootstrap>, which holds the script's variables as arguments
        return False
    return os.path.abspath(file).startswith(folder) and not installed


class _Walk:
    """One walk. `leaves` grows with each `take`."""

    def __init__(self, folder: str, replicated: Mapping[str, object]) -> None:
        self.leaves: Leaves = {}
        self._folder = folder
        self._replicated = {id(thing) for thing in replicated.values()}
        modules = [thing for thing in replicated.values() if isinstance(thing, nn.Module)]
        self._modules = {id(inner) for thing in modules for inner in thing.modules()}
        self._seen: set[int] = {id(tensor) for m in modules for tensor in (*m.parameters(), *m.buffers())}

    def take(self, name: str, value: Any, depth: int = 0) -> None:
        """Add what is at `name`: a value, or an object with values in it."""
        if name.startswith("__") or depth > DEPTH or len(self.leaves) >= MOST:
            return
        if isinstance(value, Plain):
            self._add(name, "value", repr(value)[:SAMPLED].encode())
            return
        if id(value) in self._seen or _is_ours(value):
            return
        self._seen.add(id(value))
        if isinstance(value, _GENERATORS):
            self._add(name, "generator", _state_of(value))
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._add(name, "tensor", _sampled(cast("Any", value)))
        elif isinstance(value, dict | list | tuple | set | frozenset | deque):
            self._take_container(name, value, depth)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, FunctionType | MethodType):
            self._take_function(name, value, depth)
        elif isinstance(value, ModuleType):
            if _is_own(self._folder, getattr(value, "__file__", None) or "", value.__name__):
                self._take_variables(name, vars(value), depth)
        elif not isinstance(value, type):
            self._take_object(name, value, depth)

    def _take_object(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self._modules:
            attributes = {n: v for n, v in vars(value).items() if n not in _OF_MODULES}
            self._take_variables(name, attributes, depth)
            self._take_variables(name, dict(value.named_children()), depth - 1)  # a deep model is one level
        elif id(value) in self._replicated:
            return
        elif callable(getattr(value, "state_dict", None)) and not _is_dataset(value):
            self._add(name, "object", _state_of(value))
        elif _is_dataset(value) or self._is_own_object(value):
            self._take_variables(name, getattr(value, "__dict__", {}), depth)
            slots = getattr(type(value), "__slots__", ())
            self._take_variables(
                name, {slot: getattr(value, slot, None) for slot in slots if slot != "__dict__"}, depth
            )

    def _take_container(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, dict):
            items = [(f"{name}[{key!r}]", each) for key, each in list(cast("dict[Any, Any]", value).items())[:LONGEST]]
        else:
            elements = list(value)
            if len(elements) > LONGEST:
                elements = [len(elements), *elements[: LONGEST // 2], *elements[-LONGEST // 2 :]]
            if isinstance(value, set | frozenset):
                elements = sorted(elements, key=repr)
            items = [(f"{name}[{index}]", each) for index, each in enumerate(elements)]
        if all(isinstance(each, Plain) for _, each in items):
            self._add(name, "value", repr(items).encode())
            return
        for inner, each in items:
            self.take(inner, each, depth + 1)

    def _take_function(self, name: str, function: FunctionType | MethodType, depth: int) -> None:
        if isinstance(function, MethodType):
            self.take(name, function.__self__, depth)
            function = cast("FunctionType", function.__func__)
        if _is_own(self._folder, function.__code__.co_filename, function.__module__ or ""):
            for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                try:
                    self.take(cell_name, cell.cell_contents, depth + 1)
                except ValueError:  # it is not assigned yet
                    continue

    def _take_variables(self, name: str, variables: Mapping[str, Any], depth: int) -> None:
        for key, value in variables.items():
            self.take(f"{name}.{key}", value, depth + 1)

    def _is_own_object(self, value: Any) -> bool:
        module = sys.modules.get(type(value).__module__)
        return _is_own(self._folder, getattr(module, "__file__", None) or "", type(value).__module__)

    def _add(self, name: str, kind: Kind, content: bytes) -> None:
        self.leaves.setdefault(name, (kind, hashlib.sha256(content).hexdigest()[:16]))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "farandole"


def _is_dataset(value: Any) -> bool:
    return type(value).__module__.startswith("torch.utils.data")


def _state_of(value: Any) -> bytes:
    """Return the state of a generator, or of an object with a `state_dict()`."""
    if isinstance(value, torch.Generator):
        return _sampled(value.get_state(), most=1 << 20)
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        return b"".join(_sampled(np.asarray(part), most=1 << 20) for part in list(value.get_state(legacy=True))[1:])
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    try:
        return b"".join(_flattened(value.state_dict()))
    except Exception:  # noqa: BLE001  an object of the script whose state can't be taken now
        return b""


def _flattened(state: Any) -> Iterator[bytes]:
    if isinstance(state, Mapping):
        for key, value in cast("Mapping[Any, Any]", state).items():
            yield repr(key).encode()
            yield from _flattened(value)
    elif isinstance(state, list | tuple):
        for value in cast("list[Any]", state):
            yield from _flattened(value)
    elif isinstance(state, torch.Tensor | np.ndarray):
        yield _sampled(cast("Any", state))
    elif isinstance(state, Plain):
        yield repr(state).encode()


def _sampled(tensor: Any, most: int = SAMPLED) -> bytes:
    """Return the shape of a tensor or array, and at most `most` of its elements."""
    shape = repr(tuple(tensor.shape)).encode()
    if isinstance(tensor, torch.Tensor):
        if tensor.layout != torch.strided or tensor.is_meta:
            return shape
        flat = tensor.detach().reshape(-1)
        flat = flat[:: max(1, flat.numel() // most)].contiguous()
        return shape + flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else shape
    flat = tensor.reshape(-1)
    return shape + (repr(flat[:8]).encode() if tensor.dtype.hasobject else flat[:: max(1, flat.size // most)].tobytes())
