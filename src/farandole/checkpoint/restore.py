"""Finds the checkpoint from which a run goes on, and judges whether it may.

The newest one that verifies is taken; what was passed over is told, never kept quiet. What makes it a checkpoint of
another job is an error; what only makes the bits others than they would have been is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.checkpoint import content
from farandole.checkpoint.store import PAYLOAD, CheckpointName, DamagedError, Manifest, RunIdentity, Store, look
from farandole.errors import FarandoleError, UsageError
from farandole.plan.shards import Position
from farandole.protocol import numeric_facts
from farandole.protocol.difference import Facts, of_code, other_code

_OF_THE_JOB = ("object ", "parameter ", "buffer ", "samples in the data")
ORDER, UNSHUFFLED = "order of the samples", "the data's own"  # a fact, and what it is with shuffle=False


@dataclass
class RestoredState:
    """The state to go on from. `path` is "" if there was none, and the run begins."""

    path: str = ""
    position: Position = field(default_factory=Position)
    state: Any = None
    manifest: Manifest | None = None
    damaged: list[str] = field(default_factory=list[str])
    differences: list[str] = field(default_factory=list[str])
    last_finite: str = ""  # the newest that is, where this one is not


def find(places: Sequence[str], run: RunIdentity | None = None) -> RestoredState:
    """The newest checkpoint that verifies at the first of `places` that has any; each is a store or one .pt file.
    At the first, the run's own, only those of `run` count, if it is given.

    Raises:
        FarandoleError: there are checkpoints and none of them verifies: to begin again would be to lose them quietly.
        OSError: a place can't be reached.
    """
    found = RestoredState()
    for number, place in enumerate(places):
        unfinished: list[CheckpointName] = []
        between: list[CheckpointName] = []
        store, entries = look(place, None if number else run)
        if entries is None:
            everything = store.entries()
            entries = [entry for entry in everything if entry.whole]
            between = [entry for entry in everything if not entry.whole]
            unfinished = store.unfinished()
        for entry in entries:
            try:
                found.manifest = store.manifest(entry.stem)
                with store.open_verified(entry.stem, found.manifest) as file:
                    found.position, found.state = content.load(file, entry.stem)
            except DamagedError as error:
                found.damaged.append(str(error))
                continue
            found.path = store.place(entry.stem)
            if not found.manifest.finite and (spared := store.newest_finite(entries)):
                found.last_finite = store.place(spared.stem)
            found.damaged += [f"{u.stem + PAYLOAD} was never finished" for u in unfinished if u.step > entry.step]
            found.damaged += [_between(store, each) for each in between if each.step >= entry.step]
            return found
        if entries:
            raise FarandoleError(
                f"{place}: none of the {len(entries)} checkpoints verifies ({found.damaged[0]}); mend one, or begin "
                f"again with another --folder"
            )
        found.damaged += [_between(store, each) for each in between]
    return found


def _between(store: Store, entry: CheckpointName) -> str:
    why = "was saved between two steps, where its update may be done by half: nothing goes on from it by itself"
    return f"{store.place(entry.stem)} {why}"


def compare(manifest: Manifest, facts: Facts, seed: int, path: str) -> list[str]:
    """The differences between the run that wrote the checkpoint and this one that may change the bits, in words.

    Raises:
        UsageError: the checkpoint is of another job.
    """
    then, now = dict(manifest.facts), dict(facts)
    told = list(numeric_facts.unlike_then(manifest.facts, facts).words(numeric_facts.SINCE_THEN))
    for name in dict.fromkeys((*then, *now)):
        if of_code(name) or numeric_facts.of_numerics(name):
            continue
        old, new = then.get(name, "none"), now.get(name, "none")
        if old == new:
            continue
        if name == ORDER and manifest.offset:
            raise _other_order(path, name, old, new, manifest.offset)
        if name.startswith(_OF_THE_JOB):
            raise UsageError(
                f"{path}: {name}: the checkpoint has {old}, this script has {new}; run the script and data that it "
                f"was made with, or begin again with another --folder"
            )
        told.append(f"{name}: {old} then, {new} now")
    told += [f"{name} is another now" for name in other_code(manifest.facts, facts)]
    if manifest.seed != seed:
        if manifest.offset and then.get(ORDER) != UNSHUFFLED:
            raise _other_order(path, "seed", str(manifest.seed), str(seed), manifest.offset)
        told.append(f"seed: {manifest.seed} then, {seed} now")
    return told


def _other_order(path: str, name: str, old: str, new: str, offset: int) -> UsageError:
    """In the middle of an epoch another order takes some samples twice, and others never."""
    return UsageError(
        f"{path}: {name}: the checkpoint has {old}, this script has {new}, and {offset} samples of the epoch are done: "
        f"in another order some would count twice and some never; go on with {old}, or from a checkpoint at an epoch's "
        f"end"
    )
