"""A pool of hosts that a scheduler lends: Slurm jobs, Ray actors, pods.

A *unit* is one host that the scheduler's engine gives, and it runs the host's agent (`agent.py`), which connects to the
run by itself. `Units` decides which units are submitted and cancelled; `ClusterPool` carries that out with an `Engine`.

A unit is submitted once under its name and never again, and the engine's list contains the name. So the answer to a
submission may be lost, and `farandole run` may be killed and started again: the list shows which units exist.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from farandole.errors import FarandoleError
from farandole.platform.process import up_to
from farandole.pool.base import (
    Event,
    Events,
    Host,
    HostPreempted,
    HostRebalance,
    HostState,
    PoolContext,
    WorkerStartFailed,
)
from farandole.pool.remote import AgentLink

# --- engine -----------------------------------------------------------------------------------------------------------
#
# What a scheduler must be able to do. Everything else is the same for all schedulers.

PENDING, RUNNING, ENDING, GONE = "pending", "running", "ending", "gone"


@dataclass(frozen=True, kw_only=True)
class ListedUnit:
    """A unit of this pool as the engine lists it.

    Attributes:
        name: the name under which it was submitted.
        id: the engine's name for it.
        state: pending, running, ending (it is being ended, and processes may be left) or gone (no process is left).
        node: the machine that it has, "" for none.
        reason: why it is pending, ending or gone, in the engine's words.
        left_s: the engine ends it in this many seconds; infinite: no limit is known.
        notice_s: the engine has announced that it takes its node back in this many seconds; infinite: it has not.
    """

    name: str
    id: str
    state: str
    node: str = ""
    reason: str = ""
    left_s: float = math.inf
    notice_s: float = math.inf


class EngineError(FarandoleError):
    """The engine refused a request or did not answer.

    `doubt`: it may have carried out the request, or may carry it out later.
    """

    def __init__(self, text: str, *, doubt: bool = False) -> None:
        super().__init__(text)
        self.doubt = doubt


class Engine(Protocol):
    """A scheduler, for the units of one pool of one run. It neither lists nor cancels any other unit.

    Attributes:
        label: the scheduler's name for users, such as Slurm.
        noun: its word for a unit, such as job.
        remedy: the command with which a user ends units, without their ids.
        slots: the number of workers of a unit.
        fixed: the number of units that it has in any case, wanted or not.
        kill_s: a unit that is ending is killed after this many seconds.
    """

    label: str
    noun: str
    remedy: str
    slots: int
    fixed: int
    kill_s: float

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        """Submit a unit, not on the nodes in `avoid`. Returns its id. Raises EngineError."""
        ...

    async def list(self) -> Sequence[ListedUnit]:
        """All units of this pool, in one call. Units that are gone may be missing. Raises EngineError."""
        ...

    async def cancel(self, ids: Sequence[str]) -> None:
        """End these units. No error if one is gone. Raises EngineError."""
        ...


# --- units ------------------------------------------------------------------------------------------------------------
#
# Decides about units. Pure; times are the caller's, in seconds.
#
# Invariants:
# - A name is submitted at most once. A unit is known once, by its name, whichever source names it first: the answer to
#   its submission, the engine's list, its agent, or the workers of an earlier process of this pool.
# - A known unit is a host, is becoming one, or is being ended. The engine is asked to end it until it is gone.
# - Nothing is submitted or ended before the engine has listed what exists and the run has said what it wants.
# - A unit is gone (its workers count as exited) only if the engine says so, or does not list it for `MISSING_S`, and
#   its agent is not connected.
# - A unit with workers is never ended because there are too many units. The run lets workers leave first.
#
# A unit counts as supply unless it is leaving (preempted, at its time limit, failed, on a node that computed wrong
# results), expiring (its time limit is near) or released (no longer needed). If there is less supply than wanted, units
# are submitted; if there is more, the newest that are still pending are released first.
#
# A unit that ends before it was a host, or soon after, is a failure, and so is a refused submission. After a failure
# nothing is submitted for a while, longer each time, until a unit has become a host.

JOIN_S = 300.0  # time from its start on a node to its agent's connection
LOST_S = 120.0  # a unit whose agent is disconnected for longer is cancelled
MISSING_S = 10.0  # a unit that the engine does not list for longer is gone
CLOSING_S = 5.0  # the connection of a unit's agent closes within this time after the unit is gone
DOUBT_S = 30.0  # a submission without an answer may take effect for that long
IDLE_S = 5.0  # a host in excess without workers is released after this time
NODE_S = 10.0  # how long the report of a new host waits for the name of its node
STOOD_S = 60.0  # a unit that was a host for longer did not fail
AGENT_END_S = 10.0  # time for an agent to end before its unit is cancelled
CANCEL_AGAIN_S = 10.0
AVOID_S = 600.0  # how long a node that could not be prepared is not used
FIRST_REST_S, LONGEST_REST_S = 2.0, 300.0
ADVICE_S, NOTICE_S = 600.0, 120.0  # how long before its time limit a unit is replaced, and its workers leave
ADVICE_PART, NOTICE_PART = 1 / 2, 1 / 4  # at most these parts of a time limit
AT_ONCE = 8  # submissions in progress


@dataclass(kw_only=True)
class Unit:
    """One unit. `id` is "" until the engine has named it.

    Attributes:
        seen_at: when the engine listed it last.
        gone_at: since when the engine says that it is gone.
        awaited_since: since when its agent could have connected.
        submitting: the call that submits it is in progress.
        doubt_until: the submission had no answer, and may take effect until then.
        agent: the agent's state: "" before its first report, preparing, ready or failed.
        joined_at: when it became a host; `is_reported`: users know of it.
        expiring: another one is submitted in its place; its workers go on, and it is released when it has none.
        leaving: it takes no new workers, and is released when it has none. `notices`: the reasons that were reported.
        limit_s: the time to its limit when the engine first listed it as running.
        released_at: since when it is no longer needed.
        ends_itself: its agent was ordered to end.
        cancelled_at: when the engine was last asked to end it.
    """

    name: str
    seen_at: float
    awaited_since: float
    gone_at: float = math.inf
    id: str = ""
    state: str = PENDING
    node: str = ""
    reason: str = ""
    submitting: bool = False
    doubt_until: float = math.inf
    connected: bool = False
    agent: str = ""
    joined_at: float = math.inf
    is_reported: bool = False
    workers: int = 0
    idle_since: float = math.inf
    expiring: bool = False
    leaving: bool = False
    notices: set[str] = field(default_factory=set[str])
    limit_s: float = math.inf
    released_at: float = math.inf
    ends_itself: bool = False
    cancelled_at: float = -math.inf

    @property
    def has_ended_itself(self) -> bool:
        """Return True if its agent was ordered to end and has no connection any more: the unit ends with its agent."""
        return self.ends_itself and not self.connected

    @property
    def supply(self) -> bool:
        """Return True if it is a host or becomes one, and stays one for a while."""
        goes = self.leaving or self.expiring
        return not goes and self.released_at == math.inf and self.state in (PENDING, RUNNING)

    @property
    def is_host(self) -> bool:
        """Return True if workers run there or can be started there."""
        needed = self.released_at == math.inf and (bool(self.workers) or (not self.leaving and self.state != GONE))
        return self.connected and self.agent == "ready" and needed


@dataclass(kw_only=True)
class UnitActions:
    """The actions that are due, recorded as done.

    Attributes:
        submit: the names of new units.
        avoid: the nodes that new units must not use.
        cancel: the ids of units to end.
        end_agents: the hosts whose agents must end.
        forget: the hosts that are gone, with all processes.
    """

    submit: list[str] = field(default_factory=list[str])
    avoid: tuple[str, ...] = ()
    cancel: list[str] = field(default_factory=list[str])
    end_agents: list[str] = field(default_factory=list[str])
    forget: list[str] = field(default_factory=list[str])
    events: list[Event] = field(default_factory=list[Event])


def names(session: str) -> Iterator[str]:
    """Names for units; none is ever repeated, in any process, if no other one has this `session`."""
    number = 0
    while True:
        number += 1
        yield f"{session}-{number}"


class Units:
    """The units of a pool. `name`: yields new names. `noun`: the engine's word for a unit.

    `slots`, `fixed`, `kill_s`: see `Engine`.

    Attributes:
        wanted: the number of workers that the run wants; None: not known yet.
    """

    def __init__(
        self, name: Iterator[str], *, noun: str = "unit", slots: int = 1, fixed: int = 0, kill_s: float = 30.0
    ) -> None:
        self.units: dict[str, Unit] = {}
        self.wanted: int | None = None
        self._name, self._noun = name, noun
        self._slots, self._fixed, self._kill_s = slots, fixed, kill_s
        self._is_listed = False
        self._is_closed = False
        self._avoid: dict[str, float] = {}  # the time until which a node is not used
        self._failures, self._rest_until = 0, -math.inf
        self._pending_reasons: set[str] = set()  # those that were reported
        self._actions = UnitActions()

    # --- requests of the pool --------------------------------------------------------------------------------

    def want(self, workers: int, without: Collection[str] = ()) -> None:
        """The run wants that many workers, none of them on the hosts `without`."""
        if not self._is_closed:
            self.wanted = workers
        for name in without:
            if (unit := self.units.get(name)) and not unit.leaving:
                unit.leaving = True
                self._avoid[unit.node] = math.inf

    def over(self) -> None:
        """The run is over: no unit without workers is needed."""
        self.wanted, self._fixed = 0, 0

    def end_all(self, now: float) -> None:
        """No unit is needed, with or without workers, and none will be."""
        self.over()
        self._is_closed = True
        for unit in self.units.values():
            self._release(unit, now)

    def remember(self, name: str, now: float) -> None:
        """Add the host of a worker of an earlier process of this pool."""
        self._add(name, now, state=RUNNING)

    def hosts(self) -> tuple[Host, ...]:
        """The hosts on which workers run or can be started, the oldest first."""
        return tuple(Host(name=unit.name, slots=self._slots) for unit in self.units.values() if unit.is_host)

    # --- answers of the engine -------------------------------------------------------------------------------

    def submitted(self, name: str, id: str, now: float) -> None:
        """The unit exists."""
        unit = self._add(name, now)
        unit.id, unit.submitting, unit.seen_at = unit.id or id, False, max(unit.seen_at, now)

    def refused(self, name: str, now: float) -> None:
        """The submission results in no unit."""
        if self.units.pop(name, None):
            self._fail(now)

    def doubtful(self, name: str, now: float) -> None:
        """The submission had no answer: the list shows if the unit exists."""
        if unit := self.units.get(name):
            unit.submitting, unit.doubt_until = False, now + DOUBT_S

    def listed(self, rows: Sequence[ListedUnit], asked_at: float, now: float) -> None:
        """Process the engine's list of all units, for which it was asked at `asked_at`."""
        self._is_listed = True
        for row in rows:
            unit = self.units.get(row.name)
            if unit is None and row.state == GONE:
                self._actions.forget.append(row.name)
                continue
            self._update(unit or self._add(row.name, now), row, now)
        present = {row.name for row in rows}
        for unit in [unit for unit in self.units.values() if unit.name not in present and not unit.submitting]:
            if unit.id or unit.doubt_until == math.inf:
                if unit.seen_at < asked_at and now - unit.seen_at > MISSING_S:
                    unit.reason = unit.reason if unit.state == ENDING else "it is not listed any more"
                    unit.state, unit.gone_at = GONE, min(unit.gone_at, now)
            elif asked_at > unit.doubt_until:
                del self.units[unit.name]  # the submission did not take effect
                self._fail(now)

    def _add(self, name: str, now: float, state: str = PENDING) -> Unit:
        if name not in self.units:
            self.units[name] = Unit(name=name, seen_at=now, awaited_since=now, state=state)
        return self.units[name]

    def _update(self, unit: Unit, row: ListedUnit, now: float) -> None:
        if unit.state == PENDING and row.state == RUNNING:
            unit.awaited_since = now
        unit.id, unit.state, unit.seen_at = row.id, row.state, now
        unit.gone_at = min(unit.gone_at, now) if row.state == GONE else math.inf
        unit.node, unit.reason = row.node or unit.node, row.reason or unit.reason
        if row.state == PENDING and row.reason and row.reason not in self._pending_reasons:
            self._pending_reasons.add(row.reason)
            self._report(unit.name, "queued", f"{self._noun} {row.id}: {row.reason}")
        if row.state == RUNNING:
            self._check_limit(unit, row.left_s)
            if row.notice_s < math.inf:
                self._notice(unit, row.notice_s, f"its node is taken back: {row.reason}")
        if row.state == ENDING:
            self._notice(unit, min(self._kill_s, row.left_s), f"its {self._noun} is ending: {row.reason}")

    def _check_limit(self, unit: Unit, left_s: float) -> None:
        if unit.limit_s == math.inf:
            unit.limit_s = left_s
        if left_s < min(NOTICE_S, unit.limit_s * NOTICE_PART):
            self._notice(unit, left_s, f"its {self._noun} reaches its time limit")
        elif left_s < min(ADVICE_S, unit.limit_s * ADVICE_PART) and not unit.expiring:
            unit.expiring = True
            reason = f"its {self._noun} reaches its time limit in {left_s:.0f} s"
            self._actions.events.append(HostRebalance(unit.name, reason))

    def _notice(self, unit: Unit, deadline_s: float, reason: str) -> None:
        """The unit is leaving. Each reason is reported once, because a later one may bring a sooner deadline."""
        if reason not in unit.notices and unit.connected and unit.workers:
            self._actions.events.append(HostPreempted(unit.name, deadline_s, reason))
        unit.notices.add(reason)
        unit.leaving = True

    # --- reports of its agent --------------------------------------------------------------------------------

    def agent(self, name: str, *, connected: bool, state: str, reason: str, workers: int, now: float) -> None:
        """Process the agent's state: preparing, ready or failed. `workers`: the number running or ordered."""
        if name not in self.units and not connected:
            return
        unit = self._add(name, now, state=RUNNING)
        if unit.connected and not connected:
            unit.awaited_since = now
        unit.connected, unit.workers = connected, workers
        if not connected:
            return
        unit.agent = state
        if state == "ready" and unit.joined_at == math.inf and unit.released_at == math.inf:
            unit.joined_at = now
            self._failures = 0
            self._pending_reasons.clear()
        elif state == "failed" and not unit.leaving:
            unit.leaving = True
            self._avoid[unit.node] = max(self._avoid.get(unit.node, 0.0), now + AVOID_S)
            self._fail(now)
            self._report(name, "not prepared", f"{self._where(unit)}: {reason}; trying on another node")

    def leaves(self, name: str) -> None:
        """The host has a preemption notice."""
        if unit := self.units.get(name):
            unit.leaving = True

    # --- consequences ----------------------------------------------------------------------------------------

    def _report(self, name: str, state: str, reason: str) -> None:
        self._actions.events.append(HostState(name, state, reason))

    def _where(self, unit: Unit) -> str:
        return f"{self._noun} {unit.id}" + (f" on {unit.node}" if unit.node else "")

    def _fail(self, now: float) -> None:
        if now < self._rest_until:
            return
        self._rest_until = now + min(FIRST_REST_S * 2.0**self._failures, LONGEST_REST_S)
        self._failures += 1

    def _remove(self, unit: Unit, now: float) -> None:
        del self.units[unit.name]
        self._actions.forget.append(unit.name)
        expected = unit.leaving or unit.released_at < math.inf
        if not expected and now - unit.joined_at < STOOD_S:
            self._fail(now)
        if unit.joined_at < math.inf:
            self._report(unit.name, "gone", f"{self._where(unit)}: {unit.reason}")
        elif not expected:
            self._report(unit.name, "failed", f"{self._where(unit)} ended before its agent connected: {unit.reason}")

    def _release(self, unit: Unit, now: float) -> None:
        unit.released_at = min(unit.released_at, now)

    # --- what is due -----------------------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """The number of units that the run needs."""
        return max(-(-(self.wanted or 0) // self._slots), self._fixed)

    def take_actions(self, now: float, *, linked: bool = True) -> UnitActions:
        """The actions that are due now. `linked`: this pool is connected to the coordinator, so that an agent that
        is not connected here is not connected at all.
        """
        for unit in self.units.values():
            if not unit.is_reported and (unit.node or now - unit.joined_at > NODE_S) and unit.joined_at < math.inf:
                unit.is_reported = True
                self._report(unit.name, "joined", self._where(unit))
        for unit in [unit for unit in self.units.values() if unit.state == GONE and not unit.connected]:
            self._remove(unit, now)
        if self._is_closed:
            self.end_all(now)  # units that have appeared since
        elif self._is_listed and self.wanted is not None:
            for unit in self.units.values():
                self._review(unit, now, linked)
            self._submit(now)
            self._shrink(now)
        for unit in self.units.values():
            if unit.released_at < math.inf:
                self._end(unit, now)
        actions, self._actions = self._actions, UnitActions()
        actions.avoid = tuple(sorted(node for node, until in self._avoid.items() if node and until > now))
        return actions

    def _review(self, unit: Unit, now: float, linked: bool) -> None:
        unit.idle_since = math.inf if unit.workers else min(unit.idle_since, now)
        if not linked:
            unit.awaited_since = now
        if now - unit.gone_at > CLOSING_S:  # its agent still runs: the list is wrong, or the engine has lost the unit
            self._notice(unit, self._kill_s, f"its {self._noun} is gone: {unit.reason}")
        if (unit.leaving or unit.expiring) and (not unit.workers or unit.agent == "failed"):
            self._release(unit, now)
        waits = unit.state == RUNNING and not unit.connected and unit.released_at == math.inf
        limit_s = JOIN_S if unit.joined_at == math.inf else LOST_S
        if waits and now - unit.awaited_since > limit_s:
            self._fail(now)
            self._report(unit.name, "failed", f"{self._where(unit)}: its agent is not connected for {limit_s:g} s")
            self._release(unit, now)

    def _submit(self, now: float) -> None:
        missing = self.target - sum(unit.supply for unit in self.units.values())
        if missing <= 0 or now < self._rest_until:
            return
        in_progress = sum(unit.submitting for unit in self.units.values())
        for _ in range(min(missing, AT_ONCE - in_progress)):
            unit = self._add(next(self._name), now)
            unit.submitting = True
            self._actions.submit.append(unit.name)

    def _shrink(self, now: float) -> None:
        """Release the units in excess that have no workers: first those that are no hosts yet, the newest first."""
        supply = [unit for unit in self.units.values() if unit.supply]
        excess = len(supply) - self.target
        idle = [unit for unit in supply if not unit.workers]
        coming = [unit for unit in reversed(idle) if unit.joined_at == math.inf]
        coming.sort(key=lambda unit: unit.state != PENDING)
        hosts = [unit for unit in reversed(idle) if unit.joined_at < math.inf and now - unit.idle_since >= IDLE_S]
        for unit in [*coming, *hosts][: max(excess, 0)]:
            self._release(unit, now)

    def _end(self, unit: Unit, now: float) -> None:
        """End the agent, which ends the unit. A unit that has no agent, or one that does not end, is cancelled."""
        if unit.connected:
            self._actions.end_agents.append(unit.name)
            unit.ends_itself = True
        if unit.ends_itself and now - unit.released_at < AGENT_END_S:
            return
        if unit.id and unit.state in (PENDING, RUNNING) and now - unit.cancelled_at >= CANCEL_AGAIN_S:
            unit.cancelled_at = now
            self._actions.cancel.append(unit.id)


# --- pool -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
TICK_S = 1.0
LONGEST_LOOK_S = 60.0  # the longest interval between two calls to an engine that does not answer
CLOSE_S = 60.0  # time for the engine to report all units as gone


class ClusterPool:
    """A pool of an engine's units. Needs a running event loop. Call `close` in any case.

    `size`: the most workers; None: no limit. `look_s`: the interval at which the engine is asked for its units, in
    seconds.
    """

    def __init__(self, engine: Engine, context: PoolContext, *, size: int | None = None, look_s: float = 5.0) -> None:
        self.name = context.name
        self.claims_size = context.wanted is None and size is not None
        self._engine, self._look_s = engine, look_s
        fixed = engine.fixed if size is None else min(engine.fixed, -(-size // engine.slots))
        self.units = Units(
            names(secrets.token_hex(2)), noun=engine.noun, slots=engine.slots, fixed=fixed, kill_s=engine.kill_s
        )
        self._events = Events()
        self._link = AgentLink(context.ticket, context.name, context.job, context.logs, self._events, self._on_change)
        self._loop = asyncio.get_running_loop()
        self._changed, self._look = asyncio.Event(), asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._reported_errors: dict[str, str] = {}  # the engine's last error, by call
        self._closing: asyncio.Task[None] | None = None
        self._tasks = [
            asyncio.create_task(coroutine)
            for coroutine in (self._link.serve(), self._reconcile_forever(), self._list_forever())
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    # --- the interface of a pool ---------------------------------------------------------------------------

    def list(self) -> Sequence[Host]:
        return self.units.hosts()

    def start(self, worker: str, host: str) -> None:
        if host in self._link.far.hosts:
            self._link.start(worker, host)
            self._on_change(host)
        else:
            self._events.put(WorkerStartFailed(worker, f"{host} is gone"))

    def stop(self, worker: str) -> None:
        self._link.stop(worker)

    def want(self, workers: int, without: Collection[str] = ()) -> None:
        self.units.want(workers, without)
        self._changed.set()

    async def events(self) -> Sequence[Event]:
        """See `Pool`. Raises the error that broke this pool: a bug in farandole, which must end the run."""
        events = await self._events.take()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        return events

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._events.put(HostState("", "broken", str(task.exception())))

    def remember(self, worker: str, host: str) -> None:
        """Add a worker of an earlier process of this pool."""
        self.units.remember(host, self._loop.time())
        self._link.remember(worker, host)

    def dollars(self) -> float:
        return 0.0

    def over(self) -> None:
        """The run is over."""
        self.units.over()
        self._link.run_over()
        self._changed.set()

    # --- the loop ------------------------------------------------------------------------------------------

    def _on_change(self, name: str) -> None:
        """The state of the host's agent has changed."""
        remote = self._link.far.hosts.get(name)
        if remote is None:  # the link has forgotten it: the run is over, and its coordinator gone
            self.units.agent(name, connected=False, state="", reason="", workers=0, now=self._loop.time())
        else:
            known = self.units.units.get(name)
            is_new = remote.connected and (known is None or not known.connected)
            self.units.agent(
                name, connected=remote.connected, state=remote.state, reason=remote.reason, workers=len(remote.workers),
                now=self._loop.time(),
            )  # fmt: skip
            unit = self.units.units.get(name)
            if unit and remote.preempted and not unit.leaving:
                self.units.leaves(name)
                self._look.set()  # the engine may know why, and of a sooner deadline
            if unit and is_new and not unit.node:
                self._look.set()  # users see on which node it is
        self._changed.set()

    async def _reconcile_forever(self) -> None:
        while True:
            self._reconcile()
            await up_to(TICK_S, self._changed)
            self._changed.clear()

    def _reconcile(self) -> None:
        actions = self.units.take_actions(self._loop.time(), linked=self._link.connected)
        for event in actions.events:
            self._events.put(event)
        for host in actions.forget:
            for event in self._link.far.forget(host):
                self._events.put(event)
        for host in actions.end_agents:
            self._link.end(host)
        for name in actions.submit:
            self._start_call(self._submit(name, actions.avoid))
        if actions.cancel:
            self._start_call(self._cancel(actions.cancel))

    def _start_call(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    # --- calls to the engine ---------------------------------------------------------------------------------

    async def _submit(self, name: str, avoid: Sequence[str]) -> None:
        try:
            id = await self._engine.submit(name, avoid)
        except EngineError as error:
            self._report_error("submit", error)
            (self.units.doubtful if error.doubt else self.units.refused)(name, self._loop.time())
        else:
            self._reported_errors.pop("submit", None)
            self.units.submitted(name, id, self._loop.time())
        self._changed.set()

    async def _cancel(self, ids: Sequence[str]) -> None:
        try:
            await self._engine.cancel(ids)
            self._reported_errors.pop("cancel", None)
        except EngineError as error:  # the units repeat it
            self._report_error("cancel", error)

    async def _list_forever(self) -> None:
        pause_s = self._look_s
        while True:
            try:
                await self._list_once()
                pause_s = self._look_s
            except EngineError:
                pause_s = min(2 * pause_s, LONGEST_LOOK_S)
            await up_to(pause_s, self._look)
            self._look.clear()

    async def _list_once(self) -> None:
        """List the units once. Raises EngineError."""
        asked_at = self._loop.time()
        try:
            rows = await self._engine.list()
        except EngineError as error:
            self._report_error("list", error)
            raise
        if self._reported_errors.pop("list", ""):
            self._events.put(HostState("", self._engine.label, "it answers again"))
        self.units.listed(rows, asked_at, self._loop.time())
        self._changed.set()

    def _report_error(self, call: str, error: EngineError) -> None:
        """Report an error of the engine, once as long as it is the same."""
        text = str(error)
        if text not in self._reported_errors.values():
            self._events.put(HostState("", self._engine.label, text))
        self._reported_errors[call] = text

    # --- the end -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the agents, then the units: the run is over or was given up. A second call does nothing."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.units.end_all(self._loop.time())
        self._changed.set()
        for task in self._tasks[1:]:
            task.cancel()
        left = await self._wait_until_gone(self._loop.time() + CLOSE_S)
        for task in (*self._tasks, *self._calls):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)
        if left:
            _log.warning(
                "%s has not reported the end of all that this run has submitted; end it with `%s %s`",
                self._engine.label, self._engine.remedy, " ".join(unit.id or unit.name for unit in left),
            )  # fmt: skip

    async def _wait_until_gone(self, until: float) -> Iterable[Unit]:
        """Wait until the engine lists no unit twice in a row. Returns the units that may remain.

        If the engine does not answer, units that end by themselves need no more waiting.
        """
        clean_lists = 0
        while self._loop.time() < until:
            self._reconcile()
            try:
                await self._list_once()
                clean_lists = 0 if self.units.units or self._calls else clean_lists + 1
                if clean_lists == 2:
                    return ()
            except EngineError:
                if not self._calls and all(unit.has_ended_itself for unit in self.units.units.values()):
                    return ()
            await asyncio.sleep(min(self._look_s, 0.5))
        return tuple(self.units.units.values())
