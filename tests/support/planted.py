"""A bug planted in a shipped file: its source with one place changed, compiled, and put into the functions that run.

Every function of the module whose code has changed gets the changed code, in place, so that whoever has imported it or
its class runs the bug; leaving the context mends it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


@contextlib.contextmanager
def planted(module: ModuleType, place: str, by: str) -> Iterator[None]:
    """Run with `by` instead of `place`, which stands in the module's source exactly once, within a function.

    The functions with the changed place must close over as many names as before.
    """
    path = Path(module.__file__ or "")
    source = path.read_text()
    assert source.count(place) == 1, f"{path.name} has {place!r} {source.count(place)} times: plant another bug"
    changed = ModuleType(module.__name__)
    changed.__file__ = module.__file__
    sys.modules[module.__name__] = changed  # dataclasses look there
    try:
        exec(compile(source.replace(place, by), str(path), "exec"), changed.__dict__)
    finally:
        sys.modules[module.__name__] = module
    bugs = _functions(changed, module.__name__)
    functions = _functions(module, module.__name__)
    sound = {name: (f.__code__, f.__defaults__, f.__kwdefaults__) for name, f in functions.items()}
    hit = [name for name, function in functions.items() if _differs(function, bugs[name])]
    assert hit, f"{by!r} changes no function of {path.name}"
    try:
        for name in hit:
            bug = bugs[name]
            _put(functions[name], bug.__code__, bug.__defaults__, bug.__kwdefaults__)
        yield
    finally:
        for name in hit:
            _put(functions[name], *sound[name])


def _functions(holder: Any, module: str, prefix: str = "") -> dict[str, FunctionType]:
    """The functions that are defined in `module`, by qualified name: methods and properties of its classes too."""
    found: dict[str, FunctionType] = {}
    for name, value in vars(holder).items():
        value = getattr(value, "__func__", value)  # of static and class methods
        if isinstance(value, type) and value.__module__ == module:
            found |= _functions(value, module, f"{prefix}{name}.")
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "func", value),)
        for part in parts:
            part = getattr(part, "__wrapped__", part)  # of a context manager
            if isinstance(part, FunctionType) and part.__module__ == module:
                found[f"{prefix}{name}.{part.__name__}"] = part
    return found


def _differs(a: FunctionType, b: FunctionType) -> bool:
    defaults = (a.__defaults__, a.__kwdefaults__) != (b.__defaults__, b.__kwdefaults__)
    return a.__code__ != b.__code__ or defaults


def _put(function: FunctionType, code: Any, defaults: Any, named: Any) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named
