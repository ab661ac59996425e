"""Who follows a run that was killed is not left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from farandole.cli.attach import _watch
from farandole.control.ticket import Ticket, new_secret
from farandole.errors import CoordinatorUnreachable
from farandole.observe.live import PlainDisplay, show_lines
from farandole.protocol import events
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an

NOBODY = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")


def follow(held: Callable[[], bool], gone_s: float = 0.0) -> None:
    async def play() -> None:
        await show_lines(NOBODY, PlainDisplay(StringIO()), lambda _: None, held, gone_s)

    asyncio.run(play())


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the whole run is killed (kill -9) while others watch it",
    seen="`farandole attach` and `top` end after 5 s without an answer, `trace` at once; the dashboard says `cut off`",
    outcome="exit code 1 of `attach` and `top`; they wait for a coordinator that is only replaced",
)
@pytest.mark.timeout(30)
def test_it_ends_once_nobody_answers_and_nobody_holds_the_folder() -> None:
    asked = list[bool]()

    def held() -> bool:
        asked.append(len(asked) < 3)  # it is killed while we look
        return asked[-1]

    with pytest.raises(CoordinatorUnreachable):
        follow(held)
    assert asked == [True, True, True, False], "a coordinator that is replaced is waited for"


@pytest.mark.timeout(60)
def test_a_run_that_was_over_before_its_coordinator_was_reached_was_not_killed(tmp_path: Path) -> None:
    NOBODY.save(tmp_path / "ticket")
    (tmp_path / "metrics.jsonl").write_bytes(as_written(an(events.OverEvent, code=3)))
    assert asyncio.run(_watch(tmp_path, PlainDisplay(StringIO()))) == 3
