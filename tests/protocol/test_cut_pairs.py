"""Two members that can't reach each other while the coordinator reaches both: known within seconds, not by a stall."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.worker.session import STEPS, peer_over_soft_limit
from tests.support.mentioned import mentions
from tests.support.scene import trained

TIMEOUT_S, STALL_S = 5.0, 30.0


@pytest.mark.parametrize(
    ("step_s", "limit"),
    [
        (0.05, TIMEOUT_S),
        (2.0, STEPS * 2.0),  # a slow link and large buckets: each waits for the other while data flows
        (None, STALL_S),  # the first step: who knows
    ],
)
def test_too_long_is_measured_by_the_steps(step_s: float | None, limit: float) -> None:
    def held_up(waiting: tuple[int, str, float] | None, now: float) -> str:
        return peer_over_soft_limit(waiting, step_s, stall_s=STALL_S, heartbeat_timeout_s=TIMEOUT_S, now=now)

    assert held_up((3, "b", 100.0), 100.0 + limit) == ""
    assert held_up((3, "b", 100.0), 100.1 + limit) == "b"
    assert held_up(None, 1000.0) == ""


def waits(worker: str, *, view: int = 1) -> m.Heartbeat:
    return m.Heartbeat(view=view, round=8, step=8, blocked_on=worker)


def test_two_that_wait_for_each_other_are_a_broken_pair() -> None:
    scene = trained("a", "b", "c")
    scene.say("a", waits("c"))
    scene.say("b", waits("c"))
    assert "Stop" not in scene.kinds("a"), "it may be c that computes, or another that holds it up"
    scene.say("c", waits("b"))
    for worker in "abc":
        scene.report(worker, 8)
    assert scene.fields["lost"]["worker"] == "c"
    assert mentions(scene.fields["lost"]["reason"], "b", "c")
    assert scene.members("a", "b") == ("a", "b")
    scene.forget()
    scene.say("a", waits("b", view=2))
    scene.say("b", waits("a", view=1))
    assert "Stop" not in scene.kinds("a"), "of a view that is no more"


def test_two_in_different_views_do_not_wait_for_each_other() -> None:
    """While a view takes over from another both count: a waits in the new one for b, which ends its round in the old
    one first, and waits there for a word that is on its way.
    """
    scene = trained("a", "b", wanted=3)
    scene.ready("c")
    view = scene.last("a", m.Propose).view
    scene.switch(view, 8, "a", synced=False)
    scene.say("a", waits("b", view=view.number))
    scene.say("b", waits("a", view=1))
    assert scene.coordinator.stopping is None
    scene.say("b", waits("a", view=view.number))
    assert scene.coordinator.stopping is not None, "now they do"


def test_whoever_waits_no_longer_is_no_part_of_a_pair() -> None:
    scene = trained("a", "b")
    scene.say("a", waits("b"), waits(""))
    scene.say("b", waits("a"))
    assert "Stop" not in scene.kinds("a")


def test_a_heartbeat_that_waits_fits_the_wire() -> None:
    assert m.decode_from_worker(m.encode(waits("b"))) == waits("b")
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_worker(m.encode(waits("b" * 1000)))
