"""`run.state`: plain values of a script that belong to the run's state, such as the best accuracy so far.

    run.replicate(model=model, optimizer=optimizer, best=0.0)
    ...
    run.state.best = max(run.state.best, accuracy)

They go to joiners and into checkpoints like the state of any other object, and workers compare them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farandole.collective.state_transfer import encode
from farandole.errors import UnknownState, UsageError

PLAIN = (bool, int, float, str, bytes, list, tuple, dict, type(None))
NAME = "state"  # of the object among those that are replicated


class PlainState:
    """The values, as attributes. Only those that `run.replicate` was given exist."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict[str, Any]())
        for name, value in values.items():
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(f"run.replicate({name}={value!r:.40}): a value of run.state can't have this name")
            self._values[name] = _checked(name, value)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(_unknown(name, values))
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(_unknown(name, self._values))
        self._values[name] = _checked(name, value)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        return f"PlainState({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the values of another worker or of a checkpoint; names that it does not have keep their values."""
        self._values.update({name: value for name, value in state.items() if name in self._values})


def split(objects: Mapping[str, object]) -> tuple[dict[str, object], PlainState | None]:
    """Return the objects with a state of their own, and `run.state` for the plain values; None if there are none.

    Raises:
        UsageError: there are plain values, and an object is called as `run.state` is.
    """
    plain = {name: value for name, value in objects.items() if isinstance(value, PLAIN)}
    others = {name: value for name, value in objects.items() if name not in plain}
    if not plain:
        return others, None
    if NAME in objects:
        raise UsageError(
            f"run.replicate({NAME}=...): with plain values ({', '.join(plain)}) this name stands for run.state, which "
            f"holds them; choose another one"
        )
    state = PlainState(plain)
    return {**others, NAME: state}, state


def _checked(name: str, value: Any) -> Any:
    """Return the value, of a tensor or an array with one number the number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, PLAIN):
        raise UsageError(
            f"run.state.{name} = {type(value).__name__}: it takes numbers, text, None, and lists and dicts of these; "
            f"pass an object with state_dict() and load_state_dict() to run.replicate"
        )
    try:
        encode(value)
    except UnknownState as error:
        raise UsageError(f"run.state.{name} = {type(value).__name__}: {error}") from error
    return value


def _unknown(name: str, values: Mapping[str, Any]) -> str:
    there = ", ".join(values) or "none"
    return f"run.state has no {name}: pass its first value, run.replicate(..., {name}=...). It has: {there}"
