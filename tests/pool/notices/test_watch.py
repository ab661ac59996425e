"""Which cloud is asked, how often, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from farandole.errors import UsageError
from farandole.pool import clouds, preemption
from farandole.pool.preemption import LONGEST_S, WARN_AFTER
from farandole.protocol.messages import HostPreemption
from tests.support.metadata_services import AzureService, Ec2Service, GoogleService, Service, azure_event

STOP = '{"action": "terminate", "time": "2023-11-14T22:15:20Z"}'
REBALANCE = '{"noticeTime": "2023-11-14T22:13:20Z"}'


@dataclass
class Watching:
    told: list[HostPreemption | None] = field(default_factory=list[HostPreemption | None])
    pauses: list[float] = field(default_factory=list[float])


def watching(service: Service | None, cloud: str, *acts: Callable[[Watching], bool]) -> Watching:
    """Watch until each of `acts` in turn has become true, or it ends by itself."""
    it = Watching()

    async def pause(seconds: float) -> None:
        it.pauses.append(seconds)
        await asyncio.sleep(0.002)

    async def scenario() -> None:
        address = service.address if service else "http://127.0.0.1:9"
        task = asyncio.ensure_future(preemption.watch(cloud, address, it.told.append, pause))
        for act in acts:
            while not act(it) and not task.done():
                await asyncio.sleep(0.002)
        if acts:
            task.cancel()
        await asyncio.gather(task, return_exceptions=not acts or not task.done())

    asyncio.run(asyncio.wait_for(scenario(), 60))
    return it


@pytest.mark.parametrize("cloud", ["", "ec2"])
def test_each_thing_is_told_once_and_that_it_was_withdrawn_too(cloud: str) -> None:
    with Ec2Service() as service:
        it = watching(
            service,
            cloud,
            lambda it: len(it.pauses) > 3 and (service.set(rebalance=REBALANCE) or True),
            lambda it: len(it.told) == 1 and len(it.pauses) > 8 and (service.set(action=STOP) or True),
            lambda it: len(it.told) == 2 and (service.set(action="", rebalance="") or True),
            lambda it: len(it.told) == 3,
        )
    assert [told and told.advice for told in it.told] == [True, False, None]
    assert set(it.pauses) == {5.0}, "every 5 s"


@pytest.mark.parametrize("service_of", [GoogleService, AzureService])
def test_a_cloud_is_found_by_asking(service_of: type[Service]) -> None:
    with service_of() as service:
        if isinstance(service, GoogleService):
            service.set(preempted="TRUE")
        else:
            service.set(events=(azure_event("Preempt"),))
        it = watching(service, "", lambda it: bool(it.told))
    assert it.told[0] is not None
    assert service.asked["PUT /latest/api/token"] == 1, "one that is another's is asked once"


def test_a_machine_of_no_cloud_is_left_alone_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    it = watching(None, "")
    assert it.pauses == [1.0, 2.0]
    assert it.told == []
    assert [record for record in caplog.records if record.name.startswith("farandole")] == []


def test_a_service_that_comes_up_later_is_found() -> None:
    with Ec2Service() as service:
        service.set(broken=3, action=STOP)
        it = watching(service, "", lambda it: bool(it.told))
    assert it.pauses[0] == 1.0
    assert it.told[0] is not None


def test_one_that_does_not_answer_is_asked_later_and_later_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Ec2Service() as service:
        service.set(broken=12, action=STOP)
        it = watching(service, "ec2", lambda it: bool(it.told))
    assert it.pauses[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2
    assert all(value in said[0] for value in ("EC2", "/latest/api/token", "500"))
    assert "EC2" in said[1]


def test_a_failure_now_and_then_is_not_said_and_takes_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    with Ec2Service() as service:
        service.set(action=STOP)
        it = watching(
            service,
            "ec2",
            lambda it: bool(it.told) and (service.set(broken=WARN_AFTER - 1) or True),
            lambda it: it.pauses[-1] == 5.0 and service.broken == 0,
        )
    assert len(it.told) == 1
    assert caplog.records == []


def test_none_asks_nobody() -> None:
    with Ec2Service() as service:
        watching(service, "none")
        before = threading.active_count()
        preemption.in_background("none", service.address, lambda _: None)
        assert threading.active_count() == before
    assert not service.asked


def test_a_thread_of_its_own_tells() -> None:
    heard: list[HostPreemption | None] = []
    there = threading.Event()

    def tell(notified: HostPreemption | None) -> None:
        heard.append(notified)
        there.set()

    with Ec2Service() as service:
        service.set(action=STOP)
        preemption.in_background("", service.address, tell)
        assert there.wait(200)
    assert heard[0] is not None
    assert "EC2" in heard[0].reason
    assert "terminate" in heard[0].reason


def test_a_cloud_that_there_is_not_is_an_error() -> None:
    for cloud in ("", "none", "ec2", "gcp", "azure"):
        assert clouds.check(cloud) == cloud
    with pytest.raises(UsageError, match=r"--notices aws\b.*\bec2, gcp, azure"):
        clouds.check("aws")
