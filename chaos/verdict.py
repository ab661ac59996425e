"""What a run has left, against what it promised: complaints in words, none if all is as it should be.

1. It ended by itself, with exit code 0.
2. All workers held the same state, with the fingerprint of the undisturbed job.
3. By the ledgers, every sample of every epoch was used exactly once.
4. No process of it is left.
5. Nobody is said to compute wrong: all machines here are sound.
6. Every worker's time is accounted for, from the beginning of its process until the run let it go, and adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.data.ledger import count
from farandole.errors import LedgerError, LedgerIncomplete
from farandole.observe.text import describe as in_words
from farandole.protocol.coordinator.account import account
from farandole.protocol.events import (
    ComputesWrongEvent,
    FinishedEvent,
    LeftEvent,
    LostEvent,
    OverEvent,
    RunStartedEvent,
    StartingEvent,
    UndecidedEvent,
)
from farandole.protocol.metrics import Line, as_written

SHOWN = 5  # samples named in a complaint
NEAR_S, BEFORE_S = 2.0, 60.0  # between two clocks; of a process before it has come


@dataclass(frozen=True)
class Reference:
    """The undisturbed job: the fingerprint of its final state, and how often it used each (epoch, sample)."""

    fingerprint: str
    counts: Counter[tuple[int, int]]


def complaints(code: int | None, lines: Sequence[Line], ledger: Path, left: dict[int, list[str]],
               reference: Reference, *, full: bool = False) -> list[str]:  # fmt: skip
    """`code`: the run's exit code, None if it had to be killed. `left`: its processes that are still alive. `full`: the
    disk has been, so that the ledger may say of itself that it is incomplete.
    """
    found: list[str] = []
    if code != 0:
        found.append("it did not end" if code is None else f"exit code {code}")
    found += _bits(lines, reference)
    found += _samples(ledger, reference, full)
    found += [in_words(line) for line in lines if isinstance(line, ComputesWrongEvent | UndecidedEvent)]
    found += _times(lines)
    found += [f"process {pid} is left: {' '.join(command)}" for pid, command in left.items()]
    return found


def _bits(lines: Sequence[Line], reference: Reference) -> list[str]:
    finished = [line for line in lines if isinstance(line, FinishedEvent)]
    if len(finished) != 1:
        return [f"{len(finished)} finished events, not one"]
    [end] = finished
    if not end.equal:
        return [f"the workers' states differ: {end.fingerprint}"]
    if end.fingerprint != reference.fingerprint:
        return [f"fingerprint {end.fingerprint}, undisturbed it is {reference.fingerprint}"]
    return []


def _samples(ledger: Path, reference: Reference, full: bool) -> list[str]:
    try:
        counts = count(ledger)
    except LedgerError as error:
        if full and isinstance(error, LedgerIncomplete):
            return []
        return [f"the ledgers contradict each other: {error}"]
    missing, surplus = reference.counts - counts, counts - reference.counts
    found: list[str] = []
    if missing:
        found.append(f"{missing.total()} samples missing: {_some(missing)}")
    if surplus:
        found.append(f"{surplus.total()} samples too many: {_some(surplus)}")
    return found


def _times(lines: Sequence[Line]) -> list[str]:
    """A worker's time against when it came and went, by the clock of the wall: what it took before it came is more."""
    found, unknown = account("", map(as_written, lines)), set[str]()
    came, gone = dict[str, float](), dict[str, float]()
    for line in lines:
        match line:
            case StartingEvent(worker=worker):
                came[worker] = line.time
            case LostEvent(worker=worker) | LeftEvent(worker=worker):
                gone[worker] = line.time
            case RunStartedEvent():  # no line says when the workers of a killed coordinator went
                unknown |= came.keys() - gone.keys()
            case OverEvent():
                gone = {**dict.fromkeys(came, line.time), **gone}
            case _:
                pass
    wrong = [f"{found.doubtful} sums of workers' time can't be"] if found.doubtful else []
    for each in found.workers:
        if not each.ended or each.worker in unknown or each.worker not in came or each.worker not in gone:
            continue
        more_s = each.total_s - (gone[each.worker] - came[each.worker])
        if not -NEAR_S <= more_s <= BEFORE_S or abs(sum(each.seconds.values()) - each.total_s) > 1e-3:
            wrong.append(f"{each.worker}'s time is off by {more_s:.1f} s: {each.seconds}")
    return wrong


def _some(samples: Counter[tuple[int, int]]) -> str:
    named = [f"sample {sample} of epoch {epoch}" for epoch, sample in sorted(samples)]
    return ", ".join(named[:SHOWN]) + (" ..." if len(named) > SHOWN else "")
