"""What becomes of instances, requests for such, and starts that wait for one: pure; times are the caller's, in s.

Invariant: an instance is known by its id, once, whoever tells of it first: the answer to a request, the list of all
that bear the run's tag, or its agent. One that is living is a host, on its way to be one, or being ended; and AWS is
told to end it until it says that it has.

- The answer to a request may be lost. It is asked again with the same token, for which AWS launches nothing twice; and
  its instances bear the token as a tag. Until that is settled, what it asked for counts as coming.
- AWS may not list an instance yet, or not any more: it has gone only when it was missing for `MISSING_S`. One that was
  once listed as terminated stays so.
- A start waits for a slot of any instance that is coming, before another one is asked for. Where nothing is coming any
  more for a start, it has failed, or there was no capacity.
- What nobody waits for and nobody works on is in excess, and ended after `IDLE_S`, if this pool has launched it. What
  somebody else has launched (an auto scaling group, a person) is a host like any other, until the run is over.
- An instance without the run's tag is released: its workers leave, then its agent ends, and it with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from farandole.pool.base import Event, Host, NoCapacity, Notice, Seen, StartFailed
from farandole.pool.ec2.instances import Due, Instance, Request, Row
from farandole.pool.ec2.market import SPOT, Market

ANOTHER = "another instance"  # the host that stands for one which is not there yet
JOIN_S = 480.0  # from its launch to its agent
MISSING_S = 120.0
IDLE_S = 60.0
AGAIN_S = 20.0  # between two tries to end one
DOUBT_S = 120.0  # for instances to show of a request whose answer was lost
LEAVE_S = 3600.0
UNTAGGED = "the run's tag was taken from it"


class Fleet:
    """`slots`: of each type. `keep_failed_s`: for so long nobody ends one that has failed. `token`: gives new ones."""

    def __init__(
        self, market: Market, slots: Mapping[str, int], token: Iterator[str], keep_failed_s: float = 0.0
    ) -> None:
        self.instances: dict[str, Instance] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self._market, self._slots, self._token = market, slots, token
        self._keep_failed_s = keep_failed_s
        self._dead: set[str] = set()
        self._covered: set[str] = set()  # starts for which something was asked
        self._due = Due()

    # --- what is asked of the pool ---------------------------------------------------------------------------

    def hosts(self) -> tuple[Host, ...]:
        """Those that are ready, then one that may be asked for."""
        there = [i for i in self.instances.values() if i.state in ("joined", "leaving") and i.connected]
        ready = (Host(name=i.id, slots=self.slots(i.type)) for i in there if not i.ending)
        return (*ready, Host(name=ANOTHER))

    def slots(self, kind: str) -> int:
        return self._slots.get(kind, 1)

    def start(self, worker: str) -> None:
        """On another instance than there are."""
        self.waiting.append(worker)

    def remember(self, host: str, now: float) -> None:
        """An earlier process of this pool had it."""
        self._meet(host, now, "", None, "")

    def stop(self, worker: str) -> bool:
        """Whether it was waiting, and is called off."""
        if worker not in self.waiting:
            return False
        self._give_up(worker, StartFailed(worker, "called off before there was an instance for it"))
        return True

    # --- what AWS says ---------------------------------------------------------------------------------------

    def answered(self, token: str, ids: Sequence[tuple[str, str]], now: float, why: str = "") -> None:
        """These instances, with their types, and no others, come of it. `why` there are not more."""
        request = self.requests.pop(token, None)
        for each, kind in ids:
            self._meet(each, now, kind, request, token)
        if request is None:
            return
        if len(ids) < request.number:
            self._market.short(request.offer.market, request.offer.zone.name, request.offer.types, now)
            self._fail(why or "AWS has no capacity", capacity=True)

    def refused(self, token: str, reason: str) -> None:
        """Nothing comes of it, and that is not for want of capacity."""
        if self.requests.pop(token, None):
            self._fail(reason)

    def doubtful(self, token: str, now: float) -> None:
        """Whether anything comes of it, nobody knows."""
        if request := self.requests.get(token):
            request.doubt = min(request.doubt, now + DOUBT_S)

    def listed(self, rows: Sequence[Row], now: float) -> None:
        """All that there are, as far as AWS knows."""
        for row in rows:
            if row.id not in self._dead:
                self._listed(row, now)
        there = {row.id for row in rows}
        for instance in list(self.instances.values()):
            if instance.id not in there and not instance.connected and now - instance.heard > MISSING_S:
                self._gone(instance, "AWS knows nothing of it any more", now)

    def _listed(self, row: Row, now: float) -> None:
        if row.id not in self.instances and row.state == "terminated":
            self._dead.add(row.id)
            self._due.forget.append(row.id)  # an earlier process of this pool may have had workers there
            return
        known = self._meet(row.id, now, row.type, self.requests.get(row.request), row.request)
        before, known.row, known.heard = known.row, row, now
        known.type, known.zone, known.market = row.type or known.type, row.zone, row.market
        known.request = known.request or row.request
        if row.state == "terminated" or (row.state == "shutting-down" and not known.connected):
            self._dead.add(row.id)
            self._gone(known, row.reason or "it was terminated", now)
        elif row.state == "shutting-down":
            known.ending = True  # it is no host any more, but what runs there has not ended yet
        elif row.state in ("stopping", "stopped"):
            if known.state != "gone" and not known.connected:
                self._lost(known, "it was stopped", now)
        elif known.state == "gone" and row.state in ("pending", "running"):
            known.state, known.since = "queued", now  # it was started again
        elif not row.tagged and (before is None or before.tagged):
            self._release(known)

    def _meet(self, each: str, now: float, kind: str, request: Request | None, token: str) -> Instance:
        if known := self.instances.get(each):
            return known
        known = self.instances[each] = Instance(id=each, since=now, heard=now, type=kind, request=token)
        if request:
            known.zone, known.market = request.offer.zone.name, request.offer.market
            request.open -= 1
            if request.open <= 0:
                self.requests.pop(request.token, None)
        return known

    def _release(self, instance: Instance) -> None:
        instance.state = "leaving"
        self._see(instance, "leaving", UNTAGGED)
        self._due.events.append(Notice(instance.id, LEAVE_S, UNTAGGED))

    # --- what its agent says ---------------------------------------------------------------------------------

    def agent(self, host: str, *, connected: bool, state: str, reason: str, workers: int, now: float) -> None:
        """It is `preparing`, `ready` or `failed`; `workers` are there or asked for."""
        if host in self._dead:
            self._due.forget.append(host)  # what it says was on its way when it ended
            return
        instance = self.instances.get(host)
        if instance is None:
            if not connected:
                return
            instance = self._meet(host, now, "", None, "")
        instance.connected, instance.workers = connected, workers
        if not connected or instance.ending or instance.state == "leaving":
            return
        if state == "ready" and instance.state != "joined":
            instance.state = "joined"
            self._market.came(instance.market, instance.zone, instance.type)
            self._see(instance, "joined", "")
        elif state == "preparing" and instance.state in ("queued", "gone"):
            instance.state = "preparing"
            self._see(instance, "preparing", "")
        elif state == "failed" and instance.state != "failed":
            self._failed(instance, reason)

    def leaves(self, host: str) -> None:
        """It has notice."""
        if (instance := self.instances.get(host)) and instance.state == "joined":
            instance.state = "leaving"

    # --- what follows ----------------------------------------------------------------------------------------

    def _see(self, instance: Instance, state: str, reason: str) -> None:
        self._due.events.append(Seen(instance.id, state, reason))

    def _failed(self, instance: Instance, reason: str) -> None:
        instance.state, instance.reason = "failed", reason
        self._see(instance, "failed", reason)
        self._fail(f"{instance.id}: {reason}")

    def _lost(self, instance: Instance, reason: str, now: float) -> None:
        """Nothing runs there any more."""
        coming, instance.state = instance.coming, "gone"
        instance.connected, instance.workers, instance.idle = False, 0, math.inf
        self._due.forget.append(instance.id)
        if not instance.ending:
            self._see(instance, "gone", reason)
            if instance.market == SPOT:  # it was taken back
                self._market.short(instance.market, instance.zone, (instance.type,), now)
        if coming:
            self._fail(f"{instance.id}: {reason}")

    def _gone(self, instance: Instance, reason: str, now: float) -> None:
        del self.instances[instance.id]
        self._lost(instance, reason, now)

    def _supply(self) -> int:
        """Slots that are coming."""
        asked = sum(r.open * min(map(self.slots, r.offer.types)) for r in self.requests.values())
        return asked + sum(self.slots(i.type) for i in self.instances.values() if i.coming)

    def _fail(self, reason: str, *, capacity: bool = False) -> None:
        """Something does not come: the starts that have nothing to wait for any more end so."""
        covered = [worker for worker in self.waiting if worker in self._covered]
        for worker in covered[self._supply() :]:
            self._give_up(worker, NoCapacity(worker, reason) if capacity else StartFailed(worker, reason))

    def _give_up(self, worker: str, event: Event) -> None:
        self.waiting.remove(worker)
        self._covered.discard(worker)
        self._due.events.append(event)

    # --- what is due -----------------------------------------------------------------------------------------

    def due(self, now: float) -> Due:
        for request in list(self.requests.values()):
            if now > request.doubt:
                self.refused(request.token, "AWS has not answered, and no instance has come")
        for instance in self.instances.values():
            if instance.state == "queued" and not instance.ending and now - instance.since > JOIN_S:
                self._failed(instance, f"no agent of it has come within {JOIN_S:g} s; see its system log")
        self._place()
        self._ask(now)
        self._end(now)
        for instance in self.instances.values():
            if instance.row and instance.row.tagged and instance.row.shown != instance.state:
                self._due.shown[instance.id] = instance.state
        due, self._due = self._due, Due()
        return due

    def _place(self) -> None:
        for instance in self.instances.values():
            if instance.state != "joined" or not instance.connected or instance.ending:
                continue
            while self.waiting and instance.workers < self.slots(instance.type):
                worker = self.waiting.pop(0)
                self._covered.discard(worker)
                instance.workers += 1
                self._due.starts.append((worker, instance.id))

    def _ask(self, now: float) -> None:
        missing = len(self.waiting) - self._supply()
        if missing > 0:
            used = [i.zone for i in self.instances.values() if i.state not in ("gone", "failed") and not i.ending]
            used += [r.offer.zone.name for r in self.requests.values()]
            offer = self._market.offer(used, now)
            self._covered.update(self.waiting)
            if offer is None:
                self._fail("no zone and type that may be asked for had capacity a moment ago", capacity=True)
                return
            number = -(-missing // min(map(self.slots, offer.types)))
            token = next(self._token)
            request = Request(token=token, number=number, offer=offer, asked=now, open=number)
            self.requests[token] = request
            self._due.asks.append(request)
        self._covered.update(self.waiting)

    def _end(self, now: float) -> None:
        """Who is in excess, has failed, was released; and whom AWS was told to end, once more."""
        left = len(self.waiting)
        for instance in self.instances.values():
            if instance.coming:
                needed, left = left > 0, left - self.slots(instance.type)
            else:
                needed = instance.workers > 0
            instance.idle = math.inf if needed else min(instance.idle, now)
            idle_s = now - instance.idle
            if instance.state == "leaving" and not needed and instance.connected:
                self._due.lets_go.append(instance.id)
            if instance.state == "failed":
                over = idle_s >= self._keep_failed_s
            elif instance.state == "leaving":
                over = idle_s >= AGAIN_S
            else:
                over = idle_s >= IDLE_S
            ours = bool(instance.request) or instance.state == "failed"
            if instance.ending or (over and not needed and ours and instance.state != "gone"):
                instance.ending = True
                if now - instance.ended >= AGAIN_S:
                    instance.ended = now
                    self._due.ends.append(instance.id)
