"""All bugs that the schedules must catch, by name: what makes one, and the kind of schedules in which it shows.

python -m tests.protocol.bugs     for each the first seed that catches it, as `caught_by.py` has them
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from farandole.protocol.worker import state_machine
from farandole.simulate.witness import Violation
from tests.protocol.checking_bugs import CHECKING
from tests.protocol.decisions import PATCHES
from tests.protocol.driver_bugs import DRIVER
from tests.protocol.mutants import MUTANTS
from tests.protocol.planted_bugs import PLANTED
from tests.protocol.schedule import simulate
from tests.protocol.unfed_bugs import UNFED_BUGS
from tests.support.planted import planted

WITHIN = 1500  # schedules
SOON = 3  # where a search from 0 on is short


@dataclass(frozen=True)
class Bug:
    """`options`: of the schedules. `made`: within that it is there."""

    options: dict[str, Any]
    made: Callable[[], AbstractContextManager[None]]

    def caught(self, first: int = 0) -> int | None:
        """The first seed, from `first` on, with which the schedules find it; a crash of the machines comes out as a
        Violation too.
        """
        with self.made():
            return next((seed for seed in range(first, first + WITHIN) if violates(seed, **self.options)), None)


def violates(seed: int, **world: Any) -> bool:
    try:
        simulate(seed, **world)
    except Violation as violation:
        if "positional argument" in str(violation) or "keyword argument" in str(violation):
            raise  # a mutant that is called in another way now: it proves nothing
        return True
    return False


@contextmanager
def replaced(place: Any, name: str, mutate: Callable[[Any], Any]) -> Iterator[None]:
    sound = getattr(place, name)
    setattr(place, name, mutate(sound))
    try:
        yield
    finally:
        setattr(place, name, sound)


def _bugs() -> Iterator[tuple[str, Bug]]:
    for mutant in MUTANTS:
        yield next(iter(mutant.values())).__name__, Bug(mutant, nullcontext)
    for place, name, mutate, options in PATCHES:
        yield mutate.__name__, Bug(options, partial(replaced, place, name, mutate))
    for module, place, by, options in (*PLANTED, *DRIVER, *CHECKING, *UNFED_BUGS):
        text = " > ".join(" ".join(part.split())[:30] for part in (place, by))
        yield f"{module.__name__.rpartition('.')[2]}: {text}", Bug(options, partial(planted, module, place, by))


def _named() -> dict[str, Bug]:
    bugs: dict[str, Bug] = {}
    for name, bug in _bugs():
        bugs[f"{name} ({sum(other.startswith(name) for other in bugs) + 1})" if name in bugs else name] = bug
    return bugs


BUGS = _named()


def _find(name: str) -> tuple[str, int | None]:
    state_machine.EVERY = 2
    return name, BUGS[name].caught()


def main() -> None:
    with multiprocessing.get_context("fork").Pool() as pool:
        for name, seed in pool.imap(_find, BUGS):
            if seed is None or seed >= SOON:
                print(f"    {name!r}: {seed},", flush=True)


if __name__ == "__main__":
    main()
