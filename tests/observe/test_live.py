"""Who follows a run that was killed is not left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import StringIO

import pytest

from farandole.control.ticket import Ticket, new_secret
from farandole.errors import CoordinatorUnreachable
from farandole.observe.display import PlainDisplay
from farandole.observe.live import show_lines

NOBODY = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")


def follow(held: Callable[[], bool], gone_s: float = 0.0) -> None:
    async def play() -> None:
        await show_lines(NOBODY, PlainDisplay(StringIO()), lambda _: None, held, gone_s)

    asyncio.run(play())


@pytest.mark.timeout(30)
def test_it_ends_once_nobody_answers_and_nobody_holds_the_folder() -> None:
    asked = list[bool]()

    def held() -> bool:
        asked.append(len(asked) < 3)  # it is killed while we look
        return asked[-1]

    with pytest.raises(CoordinatorUnreachable):
        follow(held)
    assert asked == [True, True, True, False], "a coordinator that is replaced is waited for"
