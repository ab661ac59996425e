"""A frozen worker of a real run: what its silence was judged by is in the event of its loss."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chaos.launched import Launched
from chaos.trial import digits, judged
from chaos.verdict import Reference
from farandole.protocol.events import LostEvent
from farandole.protocol.failure_detector import FLOOR_S
from farandole.protocol.messages import RunTerms

pytestmark = [pytest.mark.processes]
TERMS = RunTerms()
FIRST = "no heartbeat for "


@pytest.mark.long
def test_who_is_frozen_is_given_up_by_what_is_usual_and_who_is_so_for_less_than_the_floor_is_not(
    place: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    with Launched(place / "frozen", digits(place), ["--workers", "3", "--min", "2"], pace_s=0.05) as run:
        watch = run.watch
        assert run.until(lambda: len(watch.holders) == 3, 60.0)
        for member in watch.members:
            assert run.freeze(watch.pids[member], FLOOR_S / 2)
            before = watch.step
            assert run.until(lambda before=before: watch.step > before + 20)
        assert watch.seen["lost"] == 0
        frozen = watch.members[1]
        watch.signal(watch.pids[frozen], signal.SIGSTOP)
        assert run.until(lambda: watch.seen["lost"] > 0)
        [lost] = watch.events(LostEvent)
        assert (lost.worker, lost.reason[: len(FIRST)]) == (frozen, FIRST)
        limit_s = float(lost.reason.removeprefix(FIRST).removesuffix(" s"))
        assert TERMS.heartbeat_s + FLOOR_S <= limit_s <= TERMS.heartbeat_timeout_s
        assert run.until(lambda: len(watch.holders) == 3 and frozen not in watch.members)
        told = judged(0, run, run.finish(), [], reference)
    assert not told.complaints, capsys.readouterr().out
