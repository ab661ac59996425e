"""Who sends the state to joiners."""

from __future__ import annotations

import pytest

from farandole.membership.terms import RunTerms
from farandole.membership.view import View
from farandole.worker.fake import FakeParticipant
from farandole.worker.receiver import senders

VIEW = View(number=2, members=("a", "b", "c"), joining=("c",), group=2)


@pytest.mark.parametrize(("bits", "who"), [("same", ("a", "b")), ("portable", ("a", "b")), ("any", ("a",))])
def test_all_veterans_unless_they_may_hold_different_states(bits: str, who: tuple[str, ...]) -> None:
    assert tuple(senders(VIEW, FakeParticipant(terms=RunTerms(bits=bits)))) == who
