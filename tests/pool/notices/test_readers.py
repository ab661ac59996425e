"""What each reader makes of what its cloud says, by real servers that follow the clouds' documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web

from farandole.pool import preemption
from farandole.pool.preemption import FAR_S, NOTICE_S, Azure, Ec2, Google, Metadata, Silent, Unanswered, watch
from farandole.protocol.messages import HostPreemption
from tests.support.metadata_services import AzureService, Ec2Service, GoogleService, Service, azure_event

T = TypeVar("T")

NOW = 1_700_000_000.0
STOP = '{"action": "stop", "time": "2023-11-14T22:15:20Z"}'  # two minutes after NOW
REBALANCE = '{"noticeTime": "2023-11-14T22:13:20Z"}'
PUT, ACTION = f"PUT {preemption.TOKEN}", f"GET {preemption.ACTION}"


def asking(service: Service, ask: Callable[[Metadata], Awaitable[T]]) -> T:
    async def scenario() -> T:
        async with aiohttp.ClientSession() as session:
            return await ask(Metadata(session, service.address))

    return asyncio.run(scenario())


def assert_is(heard: HostPreemption | None, at: float, *values: str, advice: bool = False) -> None:
    assert heard is not None
    assert (heard.at, heard.advice) == (at, advice)
    assert all(value in heard.reason for value in values)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long for who does not answer."""
    monkeypatch.setattr(preemption.Metadata.ask, "__kwdefaults__", {"answer_s": 0.3})


class Misleading(Service):
    """It sends everybody elsewhere."""

    def __init__(self, elsewhere: str, status: int) -> None:
        super().__init__()
        self._elsewhere, self._status = elsewhere, status

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(status=self._status, headers={"Location": self._elsewhere + request.path})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("make", [Ec2, Google, Azure], ids=lambda make: make.__name__)
def test_nobody_is_asked_but_the_service_itself(make: Callable[[Metadata], Any], status: int) -> None:
    """A redirect would take a request, with its token, to another host, and believe what that one says."""

    class Anybody(Service):
        async def answer(self, request: web.Request) -> web.Response:
            del request
            return web.Response(text=STOP)

    async def ask(metadata: Metadata) -> Any:
        answer = await metadata.ask("GET", preemption.ACTION, {"X-aws-ec2-metadata-token": "t"})
        assert answer.status == status
        return await make(metadata).read()

    with Anybody() as anybody, Misleading(anybody.address, status) as service, pytest.raises(Unanswered):
        asking(service, ask)
    assert not anybody.asked


def test_no_proxy_of_the_environment_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the session that is used in a run."""
    with Ec2Service() as proxy, Ec2Service() as service:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        service.set(action=STOP)
        told: list[HostPreemption | None] = []

        async def enough(_: float) -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(watch("ec2", service.address, told.append, enough))
    [notice] = told
    assert_is(notice, NOW + 120, "EC2", "stop")
    assert not proxy.asked


# --- EC2 ---------------------------------------------------------------------------------------------------------


def test_ec2_says_nothing_by_404_then_that_it_may_interrupt_then_that_it_does_then_nothing() -> None:
    async def ask(metadata: Metadata) -> list[HostPreemption | None]:
        reader = Ec2(metadata)
        assert await reader.is_here()
        heard = [await reader.read()]
        service.set(rebalance=REBALANCE)
        heard.append(await reader.read())
        service.set(action=STOP)
        heard += [await reader.read(), await reader.read()]
        service.set(action="", rebalance="")
        return [*heard, await reader.read()]

    with Ec2Service() as service:
        nothing, advice, notice, again, withdrawn = asking(service, ask)
    assert nothing is None
    assert_is(advice, NOW, "EC2", advice=True)
    assert_is(notice, NOW + 120, "EC2", "stop")
    assert notice == again
    assert withdrawn is None
    assert service.asked[PUT] == 1, "one token serves all of it"


def test_a_token_that_has_expired_is_renewed_once_a_request() -> None:
    async def ask(metadata: Metadata) -> None:
        reader = Ec2(metadata)
        await reader.read()
        service.set(tokens=set())
        assert await reader.read() is None
        assert service.asked[PUT] == 2
        service.hangs.add(PUT)
        service.set(tokens=set())
        with pytest.raises(Unanswered, match="hop limit"):
            await reader.read()
        service.hangs.clear()
        assert await reader.read() is None

    with Ec2Service() as service:
        asking(service, ask)


def test_a_service_that_takes_none_of_its_own_tokens_is_not_asked_for_ever() -> None:
    class Forgetful(Ec2Service):
        def _token(self, request: Any) -> Any:
            answer = super()._token(request)
            self.tokens.clear()
            return answer

    with Forgetful() as service, pytest.raises(Unanswered, match="status 401"):
        asking(service, lambda metadata: Ec2(metadata).read())
    assert service.asked[PUT] == 2


def test_a_token_that_does_not_come_through_is_told_with_what_to_do() -> None:
    """The PUT's answer gets lost on its second hop; other requests are answered."""
    with Ec2Service() as service:
        service.hangs.add(PUT)
        assert asking(service, lambda metadata: Ec2(metadata).is_here()), "it is EC2, all the same"
        with pytest.raises(Unanswered, match=r"--http-put-response-hop-limit 2.*--notices none"):
            asking(service, lambda metadata: Ec2(metadata).read())


def test_where_nothing_is_answered_no_hop_limit_is_suspected() -> None:
    with Ec2Service() as service:
        service.hangs |= {PUT, f"GET {preemption.EC2_ROOT}"}
        with pytest.raises(Silent):
            asking(service, lambda metadata: Ec2(metadata).is_here())


def test_an_interruption_is_heard_whatever_becomes_of_the_recommendation() -> None:
    with Ec2Service() as service:
        service.set(action=STOP)
        service.hangs.add(f"GET {preemption.REBALANCE}")
        heard = asking(service, lambda metadata: Ec2(metadata).read())
    assert heard is not None
    assert not heard.advice


# --- Google ------------------------------------------------------------------------------------------------------


def test_google_says_that_it_preempts_as_soon_as_it_does_and_the_time_counts_from_then() -> None:
    async def ask(metadata: Metadata) -> None:
        now = [NOW]
        reader = Google(metadata, clock=lambda: now[0])
        assert await reader.is_here()
        assert await reader.read() is None
        waiting = asyncio.ensure_future(reader.read())
        while service.asked["GET /computeMetadata/v1/instance/preempted"] < 2:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        service.set(preempted="TRUE")
        notice = HostPreemption(at=NOW + NOTICE_S, reason="Google preempts this VM")
        assert await waiting == notice
        now[0] += 10
        service.set(garbage="TRUE")  # the same, with another ETag
        assert await reader.read() == notice, "twice is once"
        service.set(preempted="FALSE", garbage=None)
        assert await reader.read() is None

    with GoogleService() as service:
        asking(service, ask)


def test_what_has_changed_between_two_requests_is_not_missed() -> None:
    async def ask(metadata: Metadata) -> None:
        reader = Google(metadata, clock=lambda: NOW)
        assert await reader.read() is None
        service.set(preempted="TRUE")
        assert await reader.read() is not None

    with GoogleService() as service:
        asking(service, ask)


def test_who_does_not_call_itself_google_is_not_believed() -> None:
    with GoogleService() as service:
        service.set(flavor="Other", preempted="TRUE")
        for ask in (Google.is_here, Google.read):
            with pytest.raises(Unanswered, match="Google"):
                asking(service, lambda metadata, ask=ask: ask(Google(metadata)))


# --- Azure -------------------------------------------------------------------------------------------------------


def azure(service: AzureService, *events: dict[str, Any]) -> HostPreemption | None:
    service.set(events=events)
    return asking(service, lambda metadata: Azure(metadata, clock=lambda: NOW).read())


def at(after_s: float) -> str:
    return format_datetime(datetime.fromtimestamp(NOW + after_s, timezone.utc), usegmt=True)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_names_the_time_of_what_ends_this_vm(kind: str) -> None:
    with AzureService() as service:
        assert azure(service) is None
        heard = azure(service, azure_event(kind, at(30)))
    assert heard == HostPreemption(at=NOW + 30, reason=f"Azure has scheduled {kind} of this VM")


def test_what_pauses_it_or_ends_another_is_none_of_its_notices() -> None:
    with AzureService() as service:
        assert azure(service, azure_event("Freeze", at(30))) is None
        assert azure(service, azure_event("Preempt", at(30), Resources=["vm-2", "vm-10"])) is None
        assert azure(service, azure_event("Preempt", at(30), Resources=["vm-2", "VM-1"])) is not None


def test_of_several_the_first_counts_and_what_is_days_away_is_advice() -> None:
    with AzureService() as service:
        far = azure_event("Redeploy", at(7 * 86_400))
        heard = azure(service, far)
        assert heard is not None
        assert heard.advice
        heard = azure(service, far, azure_event("Reboot", at(FAR_S - 1)))
        assert_is(heard, NOW + FAR_S - 1, "Azure", "Reboot")


def test_the_time_of_what_has_begun_is_when_that_was_heard() -> None:
    async def ask(metadata: Metadata) -> list[HostPreemption | None]:
        times = iter((NOW, NOW + 5))
        reader = Azure(metadata, clock=lambda: next(times))
        return [await reader.read(), await reader.read()]

    with AzureService() as service:
        service.set(events=(azure_event("Preempt"),))
        first, second = asking(service, ask)
    assert_is(first, NOW, "Azure", "Preempt")
    assert first == second


# --- all of them -------------------------------------------------------------------------------------------------

READERS = ((Ec2Service, Ec2), (GoogleService, Google), (AzureService, Azure))
GARBAGE = ("", "{", "<html>", "[]", '{"action": 3, "Events": 5}', "\0\xff", '{"Events": [{}]}', '{"action": "stop"}')


@pytest.mark.parametrize("text", GARBAGE)
@pytest.mark.parametrize(("service_of", "reader_of"), READERS, ids=lambda kind: kind.__name__)
def test_garbage_is_no_notice_and_no_health(service_of: Any, reader_of: Any, text: str) -> None:
    with service_of() as service:
        service.set(garbage=text)
        with pytest.raises(Unanswered):
            asking(service, lambda metadata: reader_of(metadata).read())


@pytest.mark.parametrize("event", [{"EventType": "Preempt"}, azure_event("Preempt", "soon")])
def test_an_event_that_can_not_be_read_is_no_health(event: dict[str, Any]) -> None:
    with AzureService() as service, pytest.raises(Unanswered):
        azure(service, event)


@pytest.mark.parametrize(("service_of", "reader_of"), READERS, ids=lambda kind: kind.__name__)
def test_no_answer_an_error_and_too_much_of_an_answer_are_told(service_of: Any, reader_of: Any) -> None:
    with service_of() as service:
        service.set(broken=1)
        with pytest.raises(Unanswered):
            asking(service, lambda metadata: reader_of(metadata).read())
        service.set(garbage="x" * (preemption.MOST_BYTES + 1))
        with pytest.raises(Unanswered, match="more than"):
            asking(service, lambda metadata: reader_of(metadata).read())
        address = service.address
    with pytest.raises(Unanswered):
        asking(service, lambda metadata: reader_of(metadata).read())
    assert service.address == address


@pytest.mark.parametrize(("service_of", "reader_of"), READERS, ids=lambda kind: kind.__name__)
def test_no_cloud_takes_itself_for_another(service_of: Any, reader_of: Any) -> None:
    with service_of() as service:
        for other_of in {reader for _, reader in READERS} - {reader_of}:
            with pytest.raises(Unanswered):
                asking(service, lambda metadata, other_of=other_of: other_of(metadata).is_here())
