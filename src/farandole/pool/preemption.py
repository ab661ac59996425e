"""Preemption notices of this machine, read from its cloud's metadata service.

A `Reader` returns what is known now. Every request is bounded in time and size and goes to the machine's own service
only (no proxy, no redirect). An invalid answer raises `Unanswered`, with the reason as text: the caller tries again.
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

ADDRESS = "http://169.254.169.254"  # the same in all three clouds
CONNECT_S, ANSWER_S = 1.0, 2.0
MOST_BYTES = 64 * 1024


class Unanswered(Exception):
    """There was no answer, or an invalid one; the text says what is wrong. The caller tries again."""


class Silent(Unanswered):
    """The request was sent, and no answer came in time."""


@dataclass(frozen=True)
class MetadataAnswer:
    """An answer of a metadata service."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class Reader(Protocol):
    """Reads one cloud's notices. `name`: the cloud's name; `pause_s`: the delay between two reads."""

    name: str
    pause_s: float

    async def is_here(self) -> bool:
        """Returns True if this machine belongs to that cloud. Raises Unanswered: unknown, because nothing answers."""
        ...

    async def read(self) -> HostPreemption | None:
        """The notice for this machine; None: none, the healthy case. It may wait for a change.

        Raises:
            Unanswered: the state is unknown.
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
        """Send one request.

        Raises:
            Silent: no answer within `answer_s`.
            Unanswered: no connection, or the answer has more than `MOST_BYTES`.
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
    """The error for an answer that the service's documentation does not list."""
    return Unanswered(f"{path}: status {answer.status}, {answer.body[:80]!r}")


# --- ec2 --------------------------------------------------------------------------------------------------------------
#
# EC2's notices for a spot instance: an interruption, with its time; or a rebalance recommendation, which is advice.
#
# Every request needs a session token (IMDSv2). A PUT returns one for at most six hours. A request with an expired token
# is answered by 401, and then gets a new one. 404 is the healthy answer of both items: there is no notice. The
# interruption is announced two minutes before, by best effort; the recommendation comes at any time before, or with it.
# EC2 recommends to read every 5 s.
#
# The answer to the PUT, and only it, travels with a hop limit, 1 unless the instance says otherwise: it does not reach
# a container behind a bridge. So if the PUT gets no answer and a request without token gets one, the log reports the
# hop limit.
#
# Sources, in docs.aws.amazon.com/AWSEC2/latest/UserGuide: spot-instance-termination-notices.html
# (spot/instance-action), rebalance-recommendations.html (events/recommendations/rebalance),
# instance-metadata-v2-how-it-works.html (tokens, 401), configuring-IMDS-existing-instances.html (hop limit).

TOKEN = "/latest/api/token"
EC2_ROOT = "/latest/meta-data/"
ACTION = EC2_ROOT + "spot/instance-action"
REBALANCE = EC2_ROOT + "events/recommendations/rebalance"
TTL_S = 21_600  # the maximum
HOPS = (
    "EC2's metadata service answers, but its token does not arrive: this is probably a container, and the "
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
    """The service answers, but its token does not arrive."""


class Ec2:
    """Reads the notices of an EC2 instance."""

    name = "EC2"

    def __init__(self, metadata: Metadata, pause_s: float = 5.0) -> None:
        self.pause_s = pause_s
        self._metadata = metadata
        self._token = ""

    async def is_here(self) -> bool:
        with contextlib.suppress(TooFar):  # each read reports it
            await self._renew()
        return True

    async def read(self) -> HostPreemption | None:
        return await self._action() or await self._rebalance()

    async def _action(self) -> HostPreemption | None:
        answer = await self._get(ACTION)
        if answer.status == 404:
            return None
        notice = _decoded(answer, ACTION, _Action)
        return HostPreemption(at=notice.time.timestamp(), reason=f"EC2 interrupts this instance ({notice.action[:40]})")

    async def _rebalance(self) -> HostPreemption | None:
        answer = await self._get(REBALANCE)
        if answer.status == 404:
            return None
        notice = _decoded(answer, REBALANCE, _Rebalance)
        reason = "EC2 recommends to replace this instance, which it may interrupt"
        return HostPreemption(at=notice.noticeTime.timestamp(), reason=reason, advice=True)

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
            if await self._answers_without_token():
                raise TooFar(HOPS) from error
            raise
        token = answer.body.decode("ascii", "replace").strip()
        if answer.status != 200 or not token.isprintable() or not 0 < len(token) < 1000:
            raise refused(answer, TOKEN)
        self._token = token

    async def _answers_without_token(self) -> bool:
        """Returns True if the service answers without a token, with 401 where tokens are required."""
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
# Google's notice for a spot or preemptible VM: it is preempted. There is no advice.
#
# `instance/preempted` is FALSE, and TRUE from the notice on. With `wait_for_change` a request is answered when that
# changes, or after `timeout_sec`; with `last_etag` also if it has changed between two requests. The VM is stopped 30 s
# later, by best effort. The service does not say when these 30 s start, so they start here when the notice is received.
# If a longer notice was configured (120 s), the unused rest of it is not waited for. An answer without the header
# `Metadata-Flavor: Google` comes from another server, and after 503 the request must be repeated.
#
# Sources, in docs.cloud.google.com/compute/docs: instances/create-use-spot, metadata/querying-metadata.

GOOGLE_ROOT = "/computeMetadata/v1/instance/"
PREEMPTED = GOOGLE_ROOT + "preempted"
FLAVOR = "Google"
NOTICE_S = 30.0
WAIT_S = 60


class Google:
    """Reads the notices of a Google VM."""

    name = "Google"

    def __init__(self, metadata: Metadata, pause_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        """`pause_s`: the minimum interval for a server that does not wait."""
        self.pause_s = pause_s
        self._metadata, self._clock = metadata, clock
        self._etag = ""
        self._preempted_at = math.nan

    async def is_here(self) -> bool:
        await self._get(GOOGLE_ROOT + "id")
        return True

    async def read(self) -> HostPreemption | None:
        waiting = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(WAIT_S)} if self._etag else {}
        answer = await self._get(PREEMPTED, answer_s=WAIT_S + 5.0 if waiting else ANSWER_S, **waiting)
        value = answer.body.decode("ascii", "replace").strip().upper()
        if value not in ("TRUE", "FALSE"):
            raise refused(answer, PREEMPTED)
        self._etag = answer.headers.get("etag", "")
        if value == "FALSE":
            self._preempted_at = math.nan
            return None
        if math.isnan(self._preempted_at):
            self._preempted_at = self._clock() + NOTICE_S
        return HostPreemption(at=self._preempted_at, reason="Google preempts this VM")

    async def _get(self, path: str, *, answer_s: float = ANSWER_S, **parameters: str) -> MetadataAnswer:
        answer = await self._metadata.ask("GET", path, {"Metadata-Flavor": FLAVOR}, answer_s=answer_s, **parameters)
        if answer.headers.get("metadata-flavor") != FLAVOR:
            raise Unanswered(f"{path}: status {answer.status}, and not from Google's metadata server")
        if answer.status != 200:
            raise refused(answer, path)
        return answer


# --- azure ------------------------------------------------------------------------------------------------------------
#
# Azure's notices for a VM, its Scheduled Events: it will be preempted, deleted, rebooted or moved, and when.
#
# All VMs of an availability set, or of a scale set's placement group, receive each other's events. So this machine's
# name is requested first, and only events that name it count. The types `Preempt` (at least 30 s), `Terminate` (5 to
# 15 min), `Reboot` (15 min) and `Redeploy` (10 min) end its workers. `Freeze` pauses it for some seconds, which a run
# survives. A redeploy off a machine that is about to fail is announced days before: an event more than `FAR_S` away is
# advice until then. A cancelled event disappears from the list. Azure recommends to read once a second. The first
# request turns the service on, and may take two minutes.
#
# Events are never acknowledged (`StartRequests`). That would only make them begin at once, for all machines that they
# name and all that runs on them, which their owner must decide. And nothing is gained: a worker that has left does not
# wait.
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
    """Reads the notices of an Azure VM."""

    name = "Azure"

    def __init__(self, metadata: Metadata, pause_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        self.pause_s = pause_s
        self._metadata, self._clock = metadata, clock
        self._vm = ""
        self._answer_s = AZURE_FIRST_S
        self._began: dict[str, float] = {}  # when an event without a time was first received

    async def is_here(self) -> bool:
        answer = await self._get(NAME, NAME_VERSION, format="text")
        self._vm = answer.body.decode("utf-8", "replace").strip().lower()
        return bool(self._vm)

    async def read(self) -> HostPreemption | None:
        if not self._vm and not await self.is_here():
            raise Unanswered(f"{NAME}: this machine has no name")
        answer = await self._get(EVENTS, EVENTS_VERSION, answer_s=self._answer_s)
        self._answer_s = 5.0
        try:
            document = msgspec.json.decode(answer.body, type=_Document)
        except msgspec.MsgspecError as error:
            raise refused(answer, EVENTS) from error
        return min(self._notices(document.events), key=lambda notice: notice.at, default=None)

    def _notices(self, events: list[_Event]) -> Iterator[HostPreemption]:
        now = self._clock()
        for event in events:
            if event.event_type in ENDS and self._vm in map(str.lower, event.resources):
                at = self._time(event, now)
                reason = f"Azure has scheduled {event.event_type} of this VM"
                yield HostPreemption(at=at, reason=reason, advice=at - now > FAR_S)

    def _time(self, event: _Event, now: float) -> float:
        """The time of the event. It is blank for an event that has begun; then it is the time of the first receipt."""
        if not event.not_before:
            return self._began.setdefault(event.event_id, now)
        try:
            return parsedate_to_datetime(event.not_before).timestamp()
        except ValueError as error:
            raise Unanswered(f"{EVENTS}: NotBefore is not a time: {event.not_before[:80]!r}") from error

    async def _get(self, path: str, version: str, *, answer_s: float = 2.0, **parameters: str) -> MetadataAnswer:
        parameters["api-version"] = version
        answer = await self._metadata.ask("GET", path, {"Metadata": "true"}, answer_s=answer_s, **parameters)
        if answer.status != 200:
            raise refused(answer, path)
        return answer


# --- watch ------------------------------------------------------------------------------------------------------------
#
# Reads this machine's notices until it is cancelled; finds out which cloud the machine belongs to by asking each.
#
# Nothing waits for it. A machine that belongs to no cloud is asked three times, within seconds, because its services
# may start later than this process; then it stops without a message. If the cloud was named, or found, it is asked for
# ever: a service that does not answer is asked at longer and longer intervals, up to `LONGEST_S`, which is logged once.

_log = logging.getLogger(__name__)
READERS: dict[str, Callable[[Metadata], Reader]] = {EC2: Ec2, GOOGLE: Google, AZURE: Azure}
TRIES, FIRST_S = 3, 1.0  # attempts to find the cloud; the delay after the first
WARN_AFTER, LONGEST_S = 3, 60.0  # failures in a row before a warning; the longest delay
Tell = Callable[[HostPreemption | None], None]
Pause = Callable[[float], Coroutine[Any, Any, None]]


def in_background(cloud: str, address: str, tell: Tell) -> None:
    """Run `watch` in its own thread, which also calls `tell`."""
    if cloud != NONE:
        threading.Thread(target=lambda: asyncio.run(watch(cloud, address, tell)), name="notices", daemon=True).start()


async def watch(cloud: str, address: str, tell: Tell, pause: Pause = asyncio.sleep) -> None:
    """Call `tell` whenever the notice for this machine changes; None: the previous notice was withdrawn.

    `cloud`: "" to find the cloud of this machine, if it has one. `address`: the metadata service's, "" for the default.
    """
    if cloud == NONE:
        return
    async with aiohttp.ClientSession() as session:
        metadata = Metadata(session, address)
        reader = READERS[cloud](metadata) if cloud else await _find_reader(metadata, pause)
        if reader is not None:
            _log.info("notices: asking %s's metadata service", reader.name)
            await _follow(reader, tell, pause)


async def _find_reader(metadata: Metadata, pause: Pause) -> Reader | None:
    for attempt in range(TRIES):
        if attempt:
            await pause(FIRST_S * 2.0 ** (attempt - 1))
        readers = [make(metadata) for make in READERS.values()]
        for reader, matches in zip(readers, await asyncio.gather(*map(_belongs_here, readers)), strict=True):
            if matches:
                return reader
    return None


async def _belongs_here(reader: Reader) -> bool:
    try:
        return await reader.is_here()
    except Unanswered:
        return False


async def _follow(reader: Reader, tell: Tell, pause: Pause) -> None:
    previous: HostPreemption | None = None
    failures = 0
    while True:
        try:
            notice = await reader.read()
        except Unanswered as error:
            failures += 1
            if failures == WARN_AFTER:
                _log.warning("can't read preemption notices from %s: %s; trying again", reader.name, error)
            await pause(min(FIRST_S * 2.0 ** (failures - 1), LONGEST_S))
            continue
        if failures >= WARN_AFTER:
            _log.warning("%s's metadata service answers again", reader.name)
        failures = 0
        if notice != previous:
            previous = notice
            tell(notice)
        await pause(reader.pause_s)
