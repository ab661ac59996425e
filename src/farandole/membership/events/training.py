"""Views, what goes wrong in the training, and its end."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from farandole.membership.events.base import Names, Recorded, Step
from farandole.membership.values import Count, Seconds, Share

Code = Annotated[int, msgspec.Meta(ge=-255, le=255)]  # that a process exits with

# --- views -----------------------------------------------------------------------------------------------------


class Proposed(Recorded, frozen=True, kw_only=True):
    view: Count
    members: Names
    cause: str


class View(Recorded, frozen=True, kw_only=True):
    """It is in force from `step` on. `outcome` is that of the step's exchange, where the view before was stopped."""

    view: Count
    members: Names
    round: Count
    step: Step
    cause: str
    outcome: Literal["", "commit", "redo"] = ""


class Shares(Recorded, frozen=True, kw_only=True):
    """How shards are dealt in `view`: per mille of the fastest worker's."""

    view: Count
    step: Step
    shares: dict[str, Share]
    reason: str


class OutOfReach(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class CoordinatorBack(Recorded, frozen=True, kw_only=True):
    """Another process has taken over, and waits for `workers`."""

    workers: Names


class StateLost(Recorded, frozen=True, kw_only=True):
    reason: str


class StrangerInGroup(Recorded, frozen=True, kw_only=True):
    """Who has come between `worker` and `peer`; where they are one, before all others."""

    worker: str
    peer: str
    address: str
    view: Count
    again_s: Seconds


# --- what goes wrong in the training ---------------------------------------------------------------------------


class Failed(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    traceback: str


class CallsDiffer(Recorded, frozen=True, kw_only=True):
    workers: Names
    reason: str


class ReplicasDiffer(Recorded, frozen=True, kw_only=True):
    """`first`: the first tensor or value that does, "" while that is not known. `suspects`: each worker that could have
    caused it alone, where that is known.
    """

    workers: Names
    first: str
    reason: str
    suspects: Names = ()


class ComputesWrong(Recorded, frozen=True, kw_only=True):
    """Two others have found the same of one shard, and it another. It leaves, and its host is not asked for again."""

    worker: str
    host: str
    reason: str


class Drifting(Recorded, frozen=True, kw_only=True):
    """Under `--bits any`: the replicas of `workers` are unlike the others', in `step` for the `times`-th time."""

    workers: Names
    step: Step
    times: Count


class Undecided(Recorded, frozen=True, kw_only=True):
    """`workers` have found different things of one shard, and nobody can tell who is right."""

    workers: Names
    reason: str


class NotFinite(Recorded, frozen=True, kw_only=True):
    worker: str
    step: Step
    loss: str


class Stalled(Recorded, frozen=True, kw_only=True):
    """The training has not moved for `seconds`; `workers` do not say that they wait for others."""

    step: Step
    seconds: Seconds
    workers: Names
    reason: str


class LoaderReplaced(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class LedgerIncomplete(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


# --- the end ---------------------------------------------------------------------------------------------------


class Stopping(Recorded, frozen=True, kw_only=True):
    reason: str


class CutShort(Recorded, frozen=True, kw_only=True):
    """The stop does not wait for `workers` any more."""

    step: Step
    workers: Names
    reason: str


class Hung(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Finished(Recorded, frozen=True, kw_only=True):
    """The script has run to its end everywhere; where the states are not `equal`, `fingerprint` has all of theirs.

    `seconds` and its parts: from the end of the last step to the script's, see `StepTime`.
    """

    fingerprint: str
    equal: bool
    seconds: Seconds = 0.0
    evaluation_s: Seconds = 0.0
    once_s: Seconds = 0.0
    pause_s: Seconds = 0.0


class Over(Recorded, frozen=True, kw_only=True):
    code: Code
    reason: str
