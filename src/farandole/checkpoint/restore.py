"""Finds the checkpoint from which a run resumes, and checks that it fits the run.

The newest checkpoint that verifies is taken; skipped ones are always reported. A difference that makes it a checkpoint
of another job is an error. A difference that only changes the bits of results is reported.
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
ORDER, UNSHUFFLED = "order of the samples", "the data's own"  # a fact's name, and its value with shuffle=False


@dataclass
class RestoredState:
    """The state from which the run resumes. `path` is "" if there is no checkpoint, and the run begins anew."""

    path: str = ""
    position: Position = field(default_factory=Position)
    state: Any = None
    manifest: Manifest | None = None
    damaged: list[str] = field(default_factory=list[str])
    differences: list[str] = field(default_factory=list[str])
    last_finite: str = ""  # the path of the newest finite checkpoint, if this one is not finite


def find(places: Sequence[str], run: RunIdentity | None = None) -> RestoredState:
    """Return the newest checkpoint that verifies, at the first of `places` that has any checkpoint.

    Each place is a store or one .pt file. At the first place, the run's own store, only checkpoints of `run` count, if
    it is given.

    Raises:
        FarandoleError: there are checkpoints but none verifies. To begin anew would lose them without a message.
        OSError: a place can't be reached.
    """
    restored = RestoredState()
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
                restored.manifest = store.manifest(entry.stem)
                with store.open_verified(entry.stem, restored.manifest) as file:
                    restored.position, restored.state = content.load(file, entry.stem)
            except DamagedError as error:
                restored.damaged.append(str(error))
                continue
            restored.path = store.place(entry.stem)
            if not restored.manifest.finite and (spared := store.newest_finite(entries)):
                restored.last_finite = store.place(spared.stem)
            restored.damaged += [f"{u.stem + PAYLOAD} was never finished" for u in unfinished if u.step > entry.step]
            restored.damaged += [_between(store, each) for each in between if each.step >= entry.step]
            return restored
        if entries:
            raise FarandoleError(
                f"{place}: none of the {len(entries)} checkpoints verifies ({restored.damaged[0]}); repair one, or "
                f"start a new run with another --folder"
            )
        restored.damaged += [_between(store, each) for each in between]
    return restored


def _between(store: Store, entry: CheckpointName) -> str:
    reason = "was saved between two steps, so its update may be incomplete: no run resumes from it automatically"
    return f"{store.place(entry.stem)} {reason}"


def compare(manifest: Manifest, facts: Facts, seed: int, path: str) -> list[str]:
    """Return, as text, the differences between the checkpoint's run and this one that may change the bits.

    Raises:
        UsageError: the checkpoint belongs to another job.
    """
    then, now = dict(manifest.facts), dict(facts)
    differences = list(numeric_facts.unlike_then(manifest.facts, facts).words(numeric_facts.SINCE_THEN))
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
                f"{path}: {name}: the checkpoint has {old}, this script has {new}; use the script and data that wrote "
                f"it, or start a new run with another --folder"
            )
        differences.append(f"{name}: {old} then, {new} now")
    differences += [f"{name} has changed" for name in other_code(manifest.facts, facts)]
    if manifest.seed != seed:
        if manifest.offset and then.get(ORDER) != UNSHUFFLED:
            raise _other_order(path, "seed", str(manifest.seed), str(seed), manifest.offset)
        differences.append(f"seed: {manifest.seed} then, {seed} now")
    return differences


def _other_order(path: str, name: str, old: str, new: str, offset: int) -> UsageError:
    """Return the error for another order of samples, which in an epoch's middle repeats some and omits others."""
    return UsageError(
        f"{path}: {name}: the checkpoint has {old}, this script has {new}, and {offset} samples of the epoch are done: "
        f"in another order some would count twice and some never; use {old}, or resume from a checkpoint at an epoch's "
        f"end"
    )
