"""What EC2 says to a spot instance: that it is interrupted, with the time; or that it may be, which is advice.

Every request needs a session token (IMDSv2), which a PUT gives for at most six hours; a request with one that has
expired is answered by 401, and gets a new one. 404 is the healthy answer of both items: there is nothing to say. The
interruption is announced two minutes before, by best effort, the recommendation at any time before, or with it. EC2
recommends to look every 5 s.

The answer to the PUT, and it alone, travels with a hop limit, 1 unless the instance says otherwise: it does not get
through to a container behind a bridge. So where the PUT gets no answer and a request without token gets one, that is
what is told.

Sources, in docs.aws.amazon.com/AWSEC2/latest/UserGuide: spot-instance-termination-notices.html (spot/instance-action),
rebalance-recommendations.html (events/recommendations/rebalance), instance-metadata-v2-how-it-works.html (tokens, 401),
configuring-IMDS-existing-instances.html (hop limit).
"""

from __future__ import annotations

import contextlib
import datetime
from typing import TypeVar

import msgspec

from farandole.membership.hosts import Notified
from farandole.pool.notices.base import Answer, Metadata, Silent, Unanswered, refused

TOKEN = "/latest/api/token"
ROOT = "/latest/meta-data/"
ACTION = ROOT + "spot/instance-action"
REBALANCE = ROOT + "events/recommendations/rebalance"
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

    async def read(self) -> Notified | None:
        return await self._action() or await self._rebalance()

    async def _action(self) -> Notified | None:
        answer = await self._get(ACTION)
        if answer.status == 404:
            return None
        said = _decoded(answer, ACTION, _Action)
        return Notified(at=said.time.timestamp(), reason=f"EC2 interrupts this instance ({said.action[:40]})")

    async def _rebalance(self) -> Notified | None:
        answer = await self._get(REBALANCE)
        if answer.status == 404:
            return None
        said = _decoded(answer, REBALANCE, _Rebalance)
        reason = "EC2 recommends to replace this instance, which it may interrupt"
        return Notified(at=said.noticeTime.timestamp(), reason=reason, advice=True)

    async def _get(self, path: str) -> Answer:
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
            answer = await self._metadata.ask("GET", ROOT, {})
        except Unanswered:
            return False
        return answer.status in (200, 401)


def _decoded(answer: Answer, path: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except msgspec.MsgspecError as error:
        raise refused(answer, path) from error
