"""What the groups of a worker hand to the transport."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.collective.arena import Ordinary
from farandole.collective.codec import CODECS, Codec
from farandole.collective.link_meter import LinkMeter
from farandole.protocol.view import View
from farandole.worker import groups
from farandole.worker.groups import Groups


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_only_a_codec_that_adapts_has_a_payoff_and_all_groups_have_the_same_one(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    class Transport:
        def __init__(self, *_: object, **options: Any) -> None:
            given.append(options)

        def connect(self, view: View, me: str) -> None:
            assert me in view.members

    monkeypatch.setattr(groups, "ByHost", Transport)
    made = Groups({}, lambda _: None, Ordinary(), LinkMeter())
    made.codec = codec
    for number in (1, 2):
        view = View(number=number, members=("a", "b"), group=number)
        made.prepare_for(view, keep=())
        made.meet(view, "a", b"")
    assert [each["compressed"] for each in given] == [codec.compressed] * 2
    assert [each["payoff"] is not None for each in given] == [codec.adapts] * 2
    assert given[0]["payoff"] is given[1]["payoff"]
