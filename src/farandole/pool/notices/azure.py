"""What Azure says to a VM by its Scheduled Events: that it will be preempted, deleted, rebooted or moved, and when.

All VMs of an availability set, or of a scale set's placement group, hear of each other's events: so this machine's
name is asked for first, and only events that name it count. Of their types `Preempt` (30 s at least), `Terminate`
(5 to 15 min), `Reboot` (15 min) and `Redeploy` (10 min) end its workers; `Freeze` pauses it for some seconds, which a
run bears. A redeploy off a machine that is about to fail is announced days before: what is more than `FAR_S` away is
advice until then. An event that is called off goes from the list. Azure recommends to look once a second; the first
request turns the service on, and may take two minutes.

Events are never acknowledged (`StartRequests`). That would only make them begin at once, for all machines that they
name and all that runs on them, which is for their owner to say; and nothing is gained: who has left does not wait.

Source: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events; for the name .../instance-metadata-service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime

import msgspec

from farandole.membership.hosts import Notified
from farandole.pool.notices.base import Answer, Metadata, Unanswered, refused

EVENTS, EVENTS_VERSION = "/metadata/scheduledevents", "2020-07-01"
NAME, NAME_VERSION = "/metadata/instance/compute/name", "2021-02-01"
ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
FIRST_S = 130.0
FAR_S = 20 * 60.0


class _Event(msgspec.Struct, rename="pascal"):
    event_id: str
    event_type: str
    resources: list[str] = []
    event_status: str = ""
    not_before: str = ""


class _Document(msgspec.Struct, rename="pascal"):
    events: list[_Event]


class Azure:
    """Of one VM."""

    name = "Azure"

    def __init__(self, metadata: Metadata, pause_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        self.pause_s = pause_s
        self._metadata, self._clock = metadata, clock
        self._vm = ""
        self._answer_s = FIRST_S
        self._began: dict[str, float] = {}  # when an event was first heard of that says no time

    async def here(self) -> bool:
        answer = await self._get(NAME, NAME_VERSION, format="text")
        self._vm = answer.body.decode("utf-8", "replace").strip().lower()
        return bool(self._vm)

    async def read(self) -> Notified | None:
        if not self._vm and not await self.here():
            raise Unanswered(f"{NAME}: this machine has no name")
        answer = await self._get(EVENTS, EVENTS_VERSION, answer_s=self._answer_s)
        self._answer_s = 5.0
        try:
            document = msgspec.json.decode(answer.body, type=_Document)
        except msgspec.MsgspecError as error:
            raise refused(answer, EVENTS) from error
        return min(self._notified(document.events), key=lambda notified: notified.at, default=None)

    def _notified(self, events: list[_Event]) -> Iterator[Notified]:
        now = self._clock()
        for event in events:
            if event.event_type in ENDS and self._vm in map(str.lower, event.resources):
                at = self._time(event, now)
                reason = f"Azure has scheduled {event.event_type} of this VM"
                yield Notified(at=at, reason=reason, advice=at - now > FAR_S)

    def _time(self, event: _Event, now: float) -> float:
        """That of an event that has begun is blank."""
        if not event.not_before:
            return self._began.setdefault(event.event_id, now)
        try:
            return parsedate_to_datetime(event.not_before).timestamp()
        except ValueError as error:
            raise Unanswered(f"{EVENTS}: NotBefore is no time: {event.not_before[:80]!r}") from error

    async def _get(self, path: str, version: str, *, answer_s: float = 2.0, **parameters: str) -> Answer:
        parameters["api-version"] = version
        answer = await self._metadata.ask("GET", path, {"Metadata": "true"}, answer_s=answer_s, **parameters)
        if answer.status != 200:
            raise refused(answer, path)
        return answer
