"""A member that sends wrong sums: exchanges, updates and digests tell from whose sums a difference comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from farandole.collective.fake import FakeNetwork
from farandole.collective.schedule import REDUCED
from farandole.collective.transport import Links, Pending
from farandole.protocol import messages as m
from farandole.protocol.coordinator.disputes import suspects_of
from farandole.protocol.messages import MAX_PARTS
from farandole.protocol.view import View
from farandole.training.digest import ROTATION, UNKNOWN, PartsDigest, each
from farandole.training.replica import Replica
from tests.support.exchanging import Worker, on_all, workers
from tests.support.linking import Counting

Wrong = Mapping[str, Mapping[str, float]]  # by sender and receiver, what is added to each reduced gradient


class WrongSums(Counting):
    """Links of a member whose reduced gradients reach some peers as others than it has made."""

    def __init__(self, links: Links, wrong: Mapping[str, float]) -> None:
        super().__init__(links)
        self._wrong = wrong

    def lend(self, tensor: torch.Tensor, peer: str, tag: int) -> Pending:
        if tag >> 17 & 3 == REDUCED and tensor.dtype == torch.float32 and peer in self._wrong:
            tensor = tensor + self._wrong[peer]
        return super().lend(tensor, peer, tag)


class Trained:
    """A replica over a worker's parameters, and its digests."""

    def __init__(self, worker: Worker, clip: float) -> None:
        self.worker, self.clip = worker, clip
        self.model = nn.ParameterList(worker.layout.parameters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.replica = Replica({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})
        self.parts = PartsDigest(self.replica)

    def update(self, buckets: list[torch.Tensor], view: View, step: int) -> None:
        layout = self.worker.layout
        for bucket, flat in zip(layout.buckets, buckets, strict=True):
            for index, grad in layout.views(bucket, flat).items():
                layout.parameters[index].grad = grad
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip, norm_type=1.0)
        self.optimizer.step()
        self.schedule.step()
        self.parts.updated(view, layout, step)

    def answer(self, step: int) -> m.Digests:
        self.replica.keep_buffers()
        names, digests = each(self.replica, {})
        parts, rest = self.parts.at(step, {})
        return m.Digests(step=step, names=names, digests=digests, parts=parts, rest=rest)


def answers(
    count: int, wrong: Wrong, *, hosts: str = "", zones: str = "", clip: float = 0.0,
    after: Callable[[dict[str, Trained]], Any] = len,
) -> dict[str, m.Digests]:  # fmt: skip
    """What `count` workers answer after a step in which these send wrong sums."""
    with workers(count, network=FakeNetwork(), hosts=hosts, zones=zones) as everyone:
        view, lineage = everyone[0].exchange.view, everyone[0].exchange.view.lineage(everyone[0].exchange.view.members)
        for worker in everyone:
            assert worker.links is not None
            if worker.name in wrong:
                worker.links = WrongSums(worker.links.links, wrong[worker.name])
                worker.enter(view)
        sums: list[Any] = on_all(everyone, lambda worker: worker.step(0, 2 * count, lineage.sets))
        trained = {worker.name: Trained(worker, clip) for worker in everyone}
        for one, buckets in zip(trained.values(), sums, strict=True):
            one.update(buckets, view, 0)
        after(trained)
        return {name: one.answer(1) for name, one in trained.items()}


@pytest.mark.parametrize(
    ("count", "wrong", "hosts", "suspects"),
    [
        (3, {}, "", ()),
        (3, {"w0": {"w1": 1.0}}, "", ("w1", "w0")),  # one word against another
        (3, {"w2": {"w0": 1.0}}, "", ("w0", "w2")),
        (3, {"w2": {"w0": 1.0}}, "abc", ("w0", "w2")),
        (3, {"w2": {"w0": 1.0}}, "aab", ("w2",)),  # w0 has handed on to w1 what it got
        (4, {"w0": {"w1": 1.0}}, "aabb", ("w1",)),  # of its own sums, and of what it hands on
        (4, {"w2": {"w0": 1.0}}, "aabb", ()),
        (3, {"w0": {"w1": 1.0, "w2": 1.0}}, "", ("w0",)),
        (3, {"w0": {"w1": 1.0, "w2": 2.0}}, "", ("w0",)),
        (4, {"w0": {"w1": 1.0, "w2": 1.0}}, "", ("w0",)),  # two against two
        (4, {"w3": {"w0": 1.0, "w1": 2.0, "w2": 3.0}}, "", ("w3",)),
        (4, {"w1": {"w0": 1.0}, "w2": {"w3": 1.0}}, "", ()),  # nobody alone
        (2, {"w0": {"w1": 1.0}}, "", ("w0", "w1")),
    ],
)
def test_the_suspects_are_those_who_alone_explain_what_differs(
    count: int, wrong: Wrong, hosts: str, suspects: tuple[str, ...]
) -> None:
    assert suspects_of(answers(count, wrong, hosts=hosts)) == suspects


@pytest.mark.parametrize(("wrong", "suspects"), [({"w2": {"w0": 1.0}}, ()), ({"w0": {"w1": 1.0}}, ("w1",))])
def test_a_worker_hands_on_to_its_zone_what_another_zone_sent(wrong: Wrong, suspects: tuple[str, ...]) -> None:
    """So a part of a member does not tell who has made a sum wrong, as on hosts with several workers."""
    assert suspects_of(answers(4, wrong, hosts="abcd", zones="eeww")) == suspects


def test_a_difference_that_an_update_has_spread_has_no_maker() -> None:
    assert suspects_of(answers(3, {"w0": {"w1": 1e25}}, clip=1e-3)) == ("w1",)


def test_what_no_sum_makes_has_no_maker() -> None:
    def alter(trained: dict[str, Trained]) -> None:
        trained["w1"].optimizer.param_groups[0]["lr"] = 0.2

    assert suspects_of(answers(3, {"w0": {"w1": 1.0}}, after=alter)) == ("w1",)


def test_of_two_views_that_may_have_made_it_both_makers_are_named() -> None:
    """In the second one w2 sums up what w0 did in the first, and nobody knows in which it came about."""

    def step(trained: dict[str, Trained]) -> None:
        for one in trained.values():
            same = [torch.ones(bucket.numel) for bucket in one.worker.layout.buckets]
            one.update(same, View(number=2, members=("w2", "w1", "w0"), group=1), 1)

    # the slices of the two views are not alike to the last element: so one of them may be left
    suspects = suspects_of(answers(3, {"w0": {"w1": 1.0}}, after=step))
    assert {"w1", "w0"} <= set(suspects) <= {"w0", "w1", "w2"}


def test_who_was_not_in_the_view_has_the_state_of_somebody_who_was() -> None:
    found = answers(4, {"w0": {"w1": 1.0}})
    late = m.Digests(step=1, names=found["w2"].names, digests=found["w2"].digests, rest=found["w2"].rest)
    assert suspects_of({**found, "w3": late}) == ("w1", "w0")
    other = m.Digests(step=1, names=late.names, digests=(*late.digests[:-1], 5), rest=late.rest)
    assert suspects_of({**found, "w3": other}) == ()


def test_views_are_known_for_as_long_as_a_difference_may_be_of_them() -> None:
    with workers(2, network=FakeNetwork()) as everyone:
        one = Trained(everyone[0], 0.0)
        layout = everyone[0].layout
        for number in range(MAX_PARTS + 1):
            one.parts.updated(View(number=number, members=("w0", "w1"), group=0), layout, number)
        assert one.parts.at(MAX_PARTS + 1, {}) == UNKNOWN, "one view too many"
        assert len(one.parts.at(ROTATION + 2, {})[0]) == MAX_PARTS
        assert [part.view for part in one.parts.at(ROTATION + MAX_PARTS + 1, {})[0]] == [MAX_PARTS]
        assert one.parts.at(ROTATION + MAX_PARTS + 2, {}) == UNKNOWN
