"""A place of checkpoints as a user or a setting names it: a store, or one checkpoint in it.

Loads no torch: the command line looks here before anything is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from farandole.checkpoint.store import MANIFEST, PAYLOAD, DamagedError, Entry, Manifest, RunIdentity, Store, first_line
from farandole.errors import FarandoleError, UsageError


def look(place: str, run: RunIdentity | None = None) -> tuple[Store, list[Entry] | None]:
    """The store at `place`, of `run` alone if it is given; with the one entry, if it names a file.

    Raises:
        UsageError: the file is no checkpoint's, or of what a failed script left between two steps.
    """
    if not place.endswith(PAYLOAD):
        return Store(place, run), None
    folder, _, name = place.rpartition("/")
    store, stem = Store(folder or "."), name.removesuffix(PAYLOAD)
    for entry in store.entries():
        if entry.stem == stem:
            if not entry.whole:
                why = "saved where the script failed between two steps, so its update may be done by half"
                raise UsageError(f"{place}: {why}; resume from a step-... beside it")
            return store, [entry]
    raise UsageError(f"{place}: no checkpoint there with its manifest {stem}{MANIFEST} beside it")


@contextlib.contextmanager
def reaching(place: str) -> Generator[None]:
    """Whatever a store's client raises within, as an error of ours.

    Raises:
        FarandoleError: the place can't be read.
    """
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:
        raise FarandoleError(
            f"checkpoints at {place} can't be read ({type(error).__name__}: {first_line(error)}); see that the place "
            f"can be reached, and start the run again"
        ) from error


def newest(place: str, run: RunIdentity | None = None) -> Manifest | None:
    """The newest manifest at `place` that can be read, of `run` alone if it is given."""
    store, entries = look(place, run)
    for entry in entries or store.entries():
        with contextlib.suppress(DamagedError):
            if entry.whole:
                return store.manifest(entry.stem)
    return None


def incomplete(place: str, *, after: int = -1, run: RunIdentity | None = None) -> str:
    """A word on the states at `place` of a later step than `after` that are there without their manifest: nothing goes
    on from them. "" for none. Nobody may be writing there. Of `run` alone, if it is given.
    """
    store, one = look(place, run)
    left = [] if one else [entry for entry in store.unfinished() if entry.step > after]
    if not left:
        return ""
    more = f" and {len(left) - 1} more like it" if len(left) > 1 else ""
    return (
        f"{store.place(left[0].stem)} is incomplete{more}: its writer was killed, and nothing can go on from it; "
        f"remove it, or leave it to the next checkpoints"
    )


def incomplete_here(place: str, *, after: int = -1) -> str:
    """The same of a place on this machine's disk that can be read, "" of any other: a store may take its time."""
    if "://" in place:
        return ""
    try:
        return incomplete(place, after=after)
    except (OSError, FarandoleError):
        return ""
