"""The seam between a cloud's metadata service and who wants to know of this machine's end.

A `Reader` says what is known now. Every request is bounded in time and size, goes to the machine's own service and
nowhere else (no proxy, no redirect), and what is no proper answer is `Unanswered`, in words: who asks tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from farandole.pool.clouds import AZURE, EC2, GOOGLE, NONE
from farandole.protocol.messages import HostPreemption

# --- base -------------------------------------------------------------------------------------------------------------

ADDRESS = "http://169.254.169.254"  # of all three clouds
CONNECT_S, ANSWER_S = 1.0, 2.0
MOST_BYTES = 64 * 1024


class Unanswered(Exception):
    """Nobody answered, or not so that it could be understood; says what is wrong. Who asks tries again."""


class Silent(Unanswered):
    """The request went out, and nothing has come back in time."""


@dataclass(frozen=True)
class MetadataAnswer:
    """Of a metadata service."""

    status: int
    headers: dict[str, str]  # their names in small letters
    body: bytes


class Reader(Protocol):
    """Of one cloud. `name` is the cloud's; `pause_s`: how long to wait between two reads."""

    name: str
    pause_s: float

    async def here(self) -> bool:
        """Whether this machine is that cloud's. Raises Unanswered: not known, for nobody answers."""
        ...

    async def read(self) -> HostPreemption | None:
        """What is known of the machine's end; None: nothing, which is healthy. It may wait for something to change.

        Raises:
            Unanswered: nothing is known.
        """
        ...


class Metadata:
    """The metadata service at `address`."""

    def __init__(self, session: aiohttp.ClientSession, address: str = "") -> None:
        self._session = session
        self._address = (address or ADDRESS).rstrip("/")

    async def ask(
        self, method: str, path: str, headers: dict[str, str], *, answer_s: float = ANSWER_S, **parameters: str
    ) -> MetadataAnswer:
        """One request.

        Raises:
            Silent: no answer within `answer_s`.
            Unanswered: nobody is there, or it is more than `MOST_BYTES`.
        """
        timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                method, self._address + path, headers=headers, params=parameters, timeout=timeout, allow_redirects=False
            ) as response:
                names = {name.lower(): value for name, value in response.headers.items()}
                return MetadataAnswer(response.status, names, await _body(response))
        except aiohttp.ServerTimeoutError as error:  # it could not connect
            raise Unanswered(str(error)) from error
        except asyncio.TimeoutError as error:
            raise Silent(f"no answer to {method} {path} within {answer_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{method} {path}: {error or type(error).__name__}") from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) > MOST_BYTES:
            raise Unanswered(f"an answer of more than {MOST_BYTES} bytes")
    return body


def refused(answer: MetadataAnswer, path: str) -> Unanswered:
    """What an answer is that none of the service's documented ones is."""
    return Unanswered(f"{path}: status {answer.status}, {answer.body[:80]!r}")


# --- ec2 --------------------------------------------------------------------------------------------------------------
#
# What EC2 says to a spot instance: that it is interrupted, with the time; or that it may be, which is advice.
#
# Every request needs a session token (IMDSv2), which a PUT gives for at most six hours; a request with one that has
# expired is answered by 401, and gets a new one. 404 is the healthy answer of both items: there is nothing to say. The
# interruption is announced two minutes before, by best effort, the recommendation at any time before, or with it. EC2
# recommends to look every 5 s.
#
# The answer to the PUT, and it alone, travels with a hop limit, 1 unless the instance says otherwise: it does not get
# through to a container behind a bridge. So where the PUT gets no answer and a request without token gets one, that is
# what is told.
#
# Sources, in docs.aws.amazon.com/AWSEC2/latest/UserGuide: spot-instance-termination-notices.html
# (spot/instance-action), rebalance-recommendations.html (events/recommendations/rebalance),
# instance-metadata-v2-how-it-works.html (tokens, 401), configuring-IMDS-existing-instances.html (hop limit).

TOKEN = "/latest/api/token"
EC2_ROOT = "/latest/meta-data/"
ACTION = EC2_ROOT + "spot/instance-action"
REBALANCE = EC2_ROOT + "events/recommendations/rebalance"
TTL_S = 21_600  # the most that there is
HOPS = (
    "EC2's metadata service is there, and its token does not come through: this is probably a container, and the "
    "instance's hop limit is 1. Allow a second hop (aws ec2 modify-instance-metadata-options --instance-id ID "
    "--http-put-response-hop-limit 2), give the container the host's network, or use --notices none"
)
T = TypeVar("T")


class _Action(msgspec.Struct):
    action: str
    time: datetime.datetime


class _Rebalance(msgspec.Struct):
    noticeTime: datetime.datetime  # noqa: N815  as EC2 writes it


class TooFar(Unanswered):
    """The token does not come through."""


class Ec2:
    """Of one instance."""

    name = "EC2"

    def __init__(self, metadata: Metadata, pause_s: float = 5.0) -> None:
        self.pause_s = pause_s
        self._metadata = metadata
        self._token = ""

    async def here(self) -> bool:
        with contextlib.suppress(TooFar):  # each read says so
            await self._renew()
        return True

    async def read(self) -> HostPreemption | None:
        return await self._action() or await self._rebalance()

    async def _action(self) -> HostPreemption | None:
        answer = await self._get(ACTION)
        if answer.status == 404:
            return None
        said = _decoded(answer, ACTION, _Action)
        return HostPreemption(at=said.time.timestamp(), reason=f"EC2 interrupts this instance ({said.action[:40]})")

    async def _rebalance(self) -> HostPreemption | None:
        answer = await self._get(REBALANCE)
        if answer.status == 404:
            return None
        said = _decoded(answer, REBALANCE, _Rebalance)
        reason = "EC2 recommends to replace this instance, which it may interrupt"
        return HostPreemption(at=said.noticeTime.timestamp(), reason=reason, advice=True)

    async def _get(self, path: str) -> MetadataAnswer:
        for last in (False, True):
            if not self._token:
                await self._renew()
            answer = await self._metadata.ask("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401 or last:
                break
            self._token = ""
        if answer.status not in (200, 404):
            raise refused(answer, path)
        return answer

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TTL_S)}
        try:
            answer = await self._metadata.ask("PUT", TOKEN, headers)
        except Silent as error:
            if await self._answers_without():
                raise TooFar(HOPS) from error
            raise
        token = answer.body.decode("ascii", "replace").strip()
        if answer.status != 200 or not token.isprintable() or not 0 < len(token) < 1000:
            raise refused(answer, TOKEN)
        self._token = token

    async def _answers_without(self) -> bool:
        """With 401 where tokens are required."""
        try:
            answer = await self._metadata.ask("GET", EC2_ROOT, {})
        except Unanswered:
            return False
        return answer.status in (200, 401)


def _decoded(answer: MetadataAnswer, path: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError as error:
        raise refused(answer, path) from error


# --- google -----------------------------------------------------------------------------------------------------------
#
# What Google says to a spot or preemptible VM: that it is preempted. There is no advice.
#
# `instance/preempted` is FALSE, and TRUE from the notice on. With `wait_for_change` a request is answered once that
# changes, or after `timeout_sec`; with `last_etag` also where it has changed between two requests. The VM is stopped
# 30 s later, by best effort; nothing says when that was counted from, so the 30 s begin when it is heard. Where a
# longer notice was asked for (120 s), what is not used of it is not waited for. An answer without the header
# `Metadata-Flavor: Google` is somebody else's, and 503 is to be tried again.
#
# Sources, in docs.cloud.google.com/compute/docs: instances/create-use-spot, metadata/querying-metadata.

GOOGLE_ROOT = "/computeMetadata/v1/instance/"
PREEMPTED = GOOGLE_ROOT + "preempted"
FLAVOR = "Google"
NOTICE_S = 30.0
WAIT_S = 60


class Google:
    """Of one VM."""

    name = "Google"

    def __init__(self, metadata: Metadata, pause_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        """`pause_s`: a server that does not wait is asked no oftener."""
        self.pause_s = pause_s
        self._metadata, self._clock = metadata, clock
        self._etag = ""
        self._goes_at = math.nan

    async def here(self) -> bool:
        await self._get(GOOGLE_ROOT + "id")
        return True

    async def read(self) -> HostPreemption | None:
        waiting = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(WAIT_S)} if self._etag else {}
        answer = await self._get(PREEMPTED, answer_s=WAIT_S + 5.0 if waiting else ANSWER_S, **waiting)
        said = answer.body.decode("ascii", "replace").strip().upper()
        if said not in ("TRUE", "FALSE"):
            raise refused(answer, PREEMPTED)
        self._etag = answer.headers.get("etag", "")
        if said == "FALSE":
            self._goes_at = math.nan
            return None
        if math.isnan(self._goes_at):
            self._goes_at = self._clock() + NOTICE_S
        return HostPreemption(at=self._goes_at, reason="Google preempts this VM")

    async def _get(self, path: str, *, answer_s: float = ANSWER_S, **parameters: str) -> MetadataAnswer:
        answer = await self._metadata.ask("GET", path, {"Metadata-Flavor": FLAVOR}, answer_s=answer_s, **parameters)
        if answer.headers.get("metadata-flavor") != FLAVOR:
            raise Unanswered(f"{path}: status {answer.status}, and not from Google's metadata server")
        if answer.status != 200:
            raise refused(answer, path)
        return answer


# --- azure ------------------------------------------------------------------------------------------------------------
#
# What Azure says to a VM by its Scheduled Events: that it will be preempted, deleted, rebooted or moved, and when.
#
# All VMs of an availability set, or of a scale set's placement group, hear of each other's events: so this machine's
# name is asked for first, and only events that name it count. Of their types `Preempt` (30 s at least), `Terminate`
# (5 to 15 min), `Reboot` (15 min) and `Redeploy` (10 min) end its workers; `Freeze` pauses it for some seconds, which a
# run bears. A redeploy off a machine that is about to fail is announced days before: what is more than `FAR_S` away is
# advice until then. An event that is called off goes from the list. Azure recommends to look once a second; the first
# request turns the service on, and may take two minutes.
#
# Events are never acknowledged (`StartRequests`). That would only make them begin at once, for all machines that they
# name and all that runs on them, which is for their owner to say; and nothing is gained: who has left does not wait.
#
# Source: learn.microsoft.com/azure/virtual-machines/linux/scheduled-events; for the name .../instance-metadata-service.

EVENTS, EVENTS_VERSION = "/metadata/scheduledevents", "2020-07-01"
NAME, NAME_VERSION = "/metadata/instance/compute/name", "2021-02-01"
ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
AZURE_FIRST_S = 130.0
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
        self._answer_s = AZURE_FIRST_S
        self._began: dict[str, float] = {}  # when an event was first heard of that says no time

    async def here(self) -> bool:
        answer = await self._get(NAME, NAME_VERSION, format="text")
        self._vm = answer.body.decode("utf-8", "replace").strip().lower()
        return bool(self._vm)

    async def read(self) -> HostPreemption | None:
        if not self._vm and not await self.here():
            raise Unanswered(f"{NAME}: this machine has no name")
        answer = await self._get(EVENTS, EVENTS_VERSION, answer_s=self._answer_s)
        self._answer_s = 5.0
        try:
            document = msgspec.json.decode(answer.body, type=_Document)
        except msgspec.MsgspecError as error:
            raise refused(answer, EVENTS) from error
        return min(self._notified(document.events), key=lambda notified: notified.at, default=None)

    def _notified(self, events: list[_Event]) -> Iterator[HostPreemption]:
        now = self._clock()
        for event in events:
            if event.event_type in ENDS and self._vm in map(str.lower, event.resources):
                at = self._time(event, now)
                reason = f"Azure has scheduled {event.event_type} of this VM"
                yield HostPreemption(at=at, reason=reason, advice=at - now > FAR_S)

    def _time(self, event: _Event, now: float) -> float:
        """That of an event that has begun is blank."""
        if not event.not_before:
            return self._began.setdefault(event.event_id, now)
        try:
            return parsedate_to_datetime(event.not_before).timestamp()
        except ValueError as error:
            raise Unanswered(f"{EVENTS}: NotBefore is no time: {event.not_before[:80]!r}") from error

    async def _get(self, path: str, version: str, *, answer_s: float = 2.0, **parameters: str) -> MetadataAnswer:
        parameters["api-version"] = version
        answer = await self._metadata.ask("GET", path, {"Metadata": "true"}, answer_s=answer_s, **parameters)
        if answer.status != 200:
            raise refused(answer, path)
        return answer


# --- watch ------------------------------------------------------------------------------------------------------------
#
# Asks the cloud whose machine this is for notices, for as long as it is let; which cloud, it finds out by asking.
#
# Nothing waits for it. A machine that is no cloud's is asked three times, within seconds, for its services may come up
# later than this process; then nothing more is done, and nothing said. Where the cloud was named, or found, it is asked
# for ever: a service that does not answer is asked again later and later, up to `LONGEST_S`, and that is said once.

_log = logging.getLogger(__name__)
READERS: dict[str, Callable[[Metadata], Reader]] = {EC2: Ec2, GOOGLE: Google, AZURE: Azure}
TRIES, FIRST_S = 3, 1.0  # of finding out; the pause after the first one
TOLD_AFTER, LONGEST_S = 3, 60.0  # failures in a row; the longest pause
Tell = Callable[[HostPreemption | None], None]
Pause = Callable[[float], Coroutine[Any, Any, None]]


def in_background(cloud: str, address: str, tell: Tell) -> None:
    """`watch` in a thread of its own, in which `tell` is called."""
    if cloud != NONE:
        threading.Thread(target=lambda: asyncio.run(watch(cloud, address, tell)), name="notices", daemon=True).start()


async def watch(cloud: str, address: str, tell: Tell, pause: Pause = asyncio.sleep) -> None:
    """Call `tell` whenever something else is known of this machine's end; None: what was known was taken back.

    `cloud`: "" for the one whose machine this is, if it is one's. `address`: of its metadata service, "" for its own.
    """
    if cloud == NONE:
        return
    async with aiohttp.ClientSession() as session:
        metadata = Metadata(session, address)
        reader = READERS[cloud](metadata) if cloud else await _found(metadata, pause)
        if reader is not None:
            _log.info("notices: asking %s's metadata service", reader.name)
            await _follow(reader, tell, pause)


async def _found(metadata: Metadata, pause: Pause) -> Reader | None:
    for tried in range(TRIES):
        if tried:
            await pause(FIRST_S * 2.0 ** (tried - 1))
        readers = [make(metadata) for make in READERS.values()]
        for reader, here in zip(readers, await asyncio.gather(*map(_is_here, readers)), strict=True):
            if here:
                return reader
    return None


async def _is_here(reader: Reader) -> bool:
    try:
        return await reader.here()
    except Unanswered:
        return False


async def _follow(reader: Reader, tell: Tell, pause: Pause) -> None:
    known: HostPreemption | None = None
    failures = 0
    while True:
        try:
            notified = await reader.read()
        except Unanswered as error:
            failures += 1
            if failures == TOLD_AFTER:
                _log.warning("no notice of %s would be heard now: %s; asking again", reader.name, error)
            await pause(min(FIRST_S * 2.0 ** (failures - 1), LONGEST_S))
            continue
        if failures >= TOLD_AFTER:
            _log.warning("%s's metadata service answers again", reader.name)
        failures = 0
        if notified != known:
            known = notified
            tell(notified)
        await pause(reader.pause_s)
