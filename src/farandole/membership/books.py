"""The coordinator's books: who there is, what is outstanding, and the few ways to write in them.

`planned`, `unplanned` and `ending` are functions over the books; `coordinator` holds them and feeds them. Every change
leaves through `actions`, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from farandole.membership import events, preference
from farandole.membership import messages as m
from farandole.membership.difference import Difference, Finish
from farandole.membership.issued import Issued
from farandole.membership.movement import Movement
from farandole.membership.rate_limit import RateLimit
from farandole.membership.records import (
    Action,
    Claim,
    Close,
    Departed,
    Ending,
    Losses,
    Record,
    RunSettings,
    Send,
    Stopping,
    Strike,
    Told,
    Tracing,
    Worker,
)
from farandole.membership.silence import Silences
from farandole.membership.speeds import Speeds
from farandole.membership.values import Call
from farandole.membership.view import View

EVICTED = 3  # the exit code of workers that were
UNFED = 6  # ... of those whose host could not get them the data
BARRED = 5  # ... because of what they did: a guest comes back after an eviction, but not after this
KEPT = 1000
BENEFITS, BENEFIT_S = 3, 600.0
RETURNS, RETURN_S = 60, 1.0


class Books:
    """At most one of {a proposed view, a stop, a checkpoint being saved} is outstanding at any time.

    Attributes:
        early: guests that asked in before the run's first own worker, which they are to be compared with.
        view: the newest view in force for anyone.
        began: the step with which it began; `proved`: the newest view in which a step is known to have ended.
        wrong_hosts: whose workers were found to compute wrong.
        drifted: the newest step that was told to have begun with replicas that differ, where that is allowed.
        applied: the round in which it took effect, as far as that is known; `switches`: what each has said of that;
            `beyond`: who was heard to be further before it.
        claims: what one says that others should have seen too. See `testimony`.
        previous: the view before it, while some of its members may not have switched yet.
        proposed: a view on its way, until it is in force for everyone concerned.
        issued: the views that a worker may be in, or enter, with what was said of them. See `issued`.
        unswitched: who has not reported yet that it goes on in `proposed`, once anybody has.
        unsynced: joiners of `view` that do not hold the state yet.
        savers: who may still write the last checkpoint, the best first; nobody trains any more.
        between: those of them whose state is only that between two steps.
        deadline: when those who have not finished are no longer waited for, while others hold the final state.
        not_finite: the newest step that was told to have a loss that is not finite.
        unpromised: the step after which no bits are promised, -1 for the beginning; None: they are.
        altered: the step and value of the newest change of each setting that was told; `alterations`: how many were.
        asked, digests: of whom the replica's digests are wanted, and those that have come.
        departed: who was let go by a decision, the newest `KEPT`.
        begun: of the newest rounds, the first who was heard to have begun it, and what it has called.
        finish: the first who was heard to have ended its script.
        barred: who broke the protocol, or is to stay out for another reason, the newest `KEPT`.
        noticed: of workers that have not come yet, why they are to leave at once: their host goes; the newest `KEPT`.
        gone: who makes no progress any more, for certain: its process has ended, or its lease.
        newest: the newest checkpoint that is known to be in the run's store.
        founder: with whose state the first view has begun.
        saver: who writes checkpoints while the run trains; "" where nobody can. See `saving`.
        failed: who could not, and in which try, by number; `tries` and `succeeded` number them too.
        ending_at: when its stop was asked for.
        over: set once, at the very end.
        unfed: how many in a row could not be fed before there was a view.
        unrecorded: how many events the journal could not take.
        wants: how many workers the run wants of a pool, by its mark (see `names`), where that is fixed.
        shared: how many of the other pools together, None: all that they can have. `can`: what they have said of that;
            `gather`: whose hosts are on their way; `targets`: what they were last asked for. See `preference`.
        benefits, returns: what each worker may still have of them. See `suspicion`, 4 and 6.
        reached: the furthest step that is known to have begun since the state was last lost; `steps` that each was in.
        clock: when the coordinator last ticked.
        told_times: what workers have told of theirs, by id; at `times_due` it is written down. See `accounting`.
        tracing: the newest trace that was asked for, and what has come of it.
        last_line: the newest line of metrics that went to the file, as (step, index).
        recorded: the newest step whose line went there, -1: none.
        waiting: those that are still to go there, by who sent them. See `metric_lines`.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.wants = {} if settings.pools else {"": settings.wanted or 0}
        self.shared = settings.wanted
        self.can: dict[str, int] = {}
        self.gather: frozenset[str] = frozenset()
        self.targets: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.departed: dict[str, Departed] = {}
        self.barred: dict[str, None] = {}
        self.gone: dict[str, str] = {}  # in order; what its pool has said of its end
        self.noticed: dict[str, str] = {}
        self.guests = 0
        self.pools = [pool.name for pool in settings.pools] or (
            [settings.pool.pool] if settings.pool else []
        )  # in the order in which they came
        self.signature: m.Signature | None = None
        self.early: dict[str, m.Ready] = {}
        self.altered: dict[str, tuple[int, str]] = {}
        self.alterations = 0
        self.view: View | None = None
        self.began = 0
        self.proved = 0
        self.wrong_hosts: set[str] = set()
        self.drifted = -1
        self.applied = -1
        self.switches: dict[str, int] = {}
        self.beyond: dict[str, set[str]] = {}
        self.previous: View | None = None
        self.proposed: View | None = None
        self.issued: list[Issued] = []
        self.proposed_at = 0.0
        self.cause = ""
        self.regroup_at = 0.0  # not earlier
        self.strangers = 0  # of the newest proposals in a row, those that were given up for one
        self.meet_at = 0.0  # no new connections earlier
        self.unswitched: set[str] = set()
        self.unsynced: set[str] = set()
        self.stopping: Stopping | None = None
        self.stops = 0
        self.ending: Ending | None = None
        self.ending_at = 0.0
        self.savers: list[str] = []
        self.between: list[str] = []
        self.deadline: float | None = None
        self.not_finite = -1
        self.unpromised: int | None = None
        self.claims: dict[str, Claim] = {}
        self.asked: set[str] = set()
        self.digests: dict[str, m.Digests] = {}
        self.over: Ending | None = None
        self.newest = settings.newest
        self.saver = self.founder = ""
        self.failed: dict[str, int] = {}
        self.tries = self.succeeded = 0
        self.told: set[type[events.Event]] = set()  # events that are said once
        self.unknown_operators: set[str] = set()  # that were told of
        self.startup_failures: dict[str, int] = {}  # in a row, by the mark of their pool
        self.unfed = 0
        self.begun: dict[int, tuple[str, Call]] = {}
        self.finish: Finish | None = None
        self.losses = Losses()
        self.strike = self.joiner_strike = Strike()  # the last that counted
        self.unrecorded = 0
        self.benefits, self.returns = RateLimit(BENEFITS, BENEFIT_S), RateLimit(RETURNS, RETURN_S)
        self.reached = -1
        self.steps: dict[str, int] = {}
        self.clock = self.times_due = 0.0
        self.told_times: dict[str, Told] = {}
        self.tracing: Tracing | None = None
        self.last_line: tuple[int, int] = (-1, 0)
        self.recorded = -1
        self.waiting: dict[str, deque[m.Line]] = {}
        self.actions: list[Action] = []
        self.number = 0
        self.speeds = Speeds()
        self.movement = Movement()
        self.silences = Silences(settings.heartbeat_s, settings.heartbeat_timeout_s)

    # --- reading ---------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """How many workers the run wants of all pools."""
        if not self.settings.pools:
            return sum(self.wants.values())
        return preference.wanted(self.shared, self.targets, self.wants)

    def views(self) -> list[View]:
        """The views that workers may be in, the oldest first."""
        return [view for view in (self.previous, self.view, self.proposed) if view]

    def participants(self) -> list[str]:
        """Everyone alive who is in the view, in the proposed one, or still in the one before."""
        return [w for w in dict.fromkeys(w for view in self.views() for w in view.members) if w in self.workers]

    def has_part(self, worker: str) -> bool:
        """Whether the others may have to wait for it: it is in a view, is to answer a stop, or to save."""
        stopping = self.stopping
        asked = stopping is not None and (worker in stopping.waiting or worker in stopping.reports)
        return asked or worker in self.savers or any(worker in view.members for view in self.views())

    def has_met(self, worker: str) -> bool:
        """Whether a process of that id is there, or was."""
        return worker in self.workers or worker in self.departed

    def let_in(self, worker: str) -> bool:
        """Whether the worker has, or has had, a part in the training."""
        return self.workers[worker].state in ("member", "finished") and worker not in self.unsynced

    def stands_alone(self, worker: Worker) -> bool:
        """Whether what its script does is its own affair: it was not let in, and the run does not wait for it."""
        return not self.let_in(worker.id) and (self.view is not None or not worker.pool)

    def everyone_finished(self) -> bool:
        members = self.members()
        return bool(members) and all(self.workers[w].state == "finished" for w in members)

    def members(self) -> list[str]:
        """Of the view in force, those who are there, in rank order."""
        return [w for w in (self.view.members if self.view else ()) if w in self.workers]

    def hosts_of(self, workers: Iterable[str]) -> tuple[str, ...]:
        """Where those who are there run, as they said when they first came."""
        return tuple(self.workers[w].host for w in workers)

    # --- writing ---------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def send(self, worker: str, message: m.Message) -> None:
        self.actions.append(Send(worker, message))

    def record(self, event: events.Event) -> None:
        self.actions.append(Record(event))

    def dismiss(self, worker: str, reason: str, code: int = 0) -> None:
        """The worker's part is done: it exits by itself."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record(events.Left(worker=worker, host=gone.host, reason=reason))
        self.depart(gone, reason, code, started=started)

    def evict(self, worker: str, reason: str) -> None:
        """Take out a worker that may still be alive: its connection is closed, its pool is told to kill it."""
        started = self.let_in(worker)
        gone = self.workers.pop(worker)
        self.record(events.Lost(worker=worker, host=gone.host, reason=reason))
        self.depart(gone, f"evicted: {reason}", self.eviction(worker), started=started)
        self.actions.append(Close(worker))

    def turn_out(self, worker: str, reason: str) -> None:
        """Tell it to go, and close its connection."""
        self.send(worker, m.Goodbye(reason=f"evicted: {reason}", code=self.eviction(worker)))
        self.actions.append(Close(worker))

    def differ(self, difference: Difference) -> None:
        """Two scripts go different ways, which ends the run; one on its way out keeps its own reason and code."""
        if self.ending is None or not self.ending.failed:
            self.record(events.CallsDiffer(workers=difference.workers, reason=difference.reason))
        self.ending = self.ending or Ending(code=1, reason=difference.reason, failed=True)
        self.ending.failed = True

    def depart(self, gone: Worker, reason: str, code: int, *, started: bool, refused: bool = False) -> None:
        """It exits with `code`; it is told again should it come back without having heard it."""
        put_out = gone.connected or (self.stopping is not None and gone.id in self.stopping.expelled)
        for rate_limit in (self.benefits, self.returns):
            rate_limit.forget(gone.id)
        self.departed[gone.id] = Departed(
            session=gone.session,
            reason=reason,
            code=code,
            started=started,
            refused=refused,
            pool=gone.pool,
            entered=-1 if put_out else gone.entered,
        )
        _trim(self.departed)
        self.send(gone.id, m.Goodbye(reason=reason, code=code))

    def bar(self, worker: str) -> None:
        """When it is evicted now, it must not come back."""
        self.barred[worker] = None
        _trim(self.barred)

    def eviction(self, worker: str) -> int:
        """The exit code of `worker`, should it be evicted."""
        return BARRED if worker in self.barred else EVICTED

    def expect(self, worker: str, reason: str) -> None:
        """When it comes now, it is to leave."""
        self.noticed[worker] = reason
        _trim(self.noticed)

    def forget(self, worker: str, reason: str = "") -> None:
        """It makes no progress any more, for certain."""
        self.gone[worker] = reason
        _trim(self.gone)


def _trim(kept: dict[str, Any]) -> None:
    for oldest in list(kept)[:-KEPT]:
        del kept[oldest]
