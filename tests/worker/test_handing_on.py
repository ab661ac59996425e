"""Who hands the state on to joiners, where each veteran comes by."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.plan.shards import Position
from farandole.protocol.messages import RunTerms
from farandole.protocol.view import View
from farandole.worker import rounds
from farandole.worker.fake import FakeContext

VIEW = View(number=2, members=("a", "b", "c"), joining=("c",), group=2)


@pytest.mark.parametrize(("bits", "who"), [("same", ["a", "b"]), ("any", ["a"])])
def test_all_veterans_or_the_longest_standing_one(bits: str, who: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for worker in "abc":
        it = FakeContext(worker, RunTerms(bits=bits))
        it.groups[VIEW.group] = object()  # type: ignore[assignment]  there are connections

        def snapshot(state: Any, worker: str = worker) -> None:
            del state
            taken.append(worker)

        monkeypatch.setattr(rounds, "Snapshot", snapshot)
        monkeypatch.setattr(rounds, "send_state", lambda *_: None)
        rounds.send_state_to_joiners(it, VIEW, 0, Position(), {})
    assert taken == who
