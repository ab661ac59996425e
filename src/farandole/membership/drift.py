"""Replicas that drift apart, where `--bits any` allows it: who has drifted, and when it is given the state again.

Unlike machines add up the same gradients, but each steps its own optimizer, so their replicas come apart by rounding
errors. Every `EVERY` steps those that differ from the longest-standing member's take over its state. Who knows what
when:

1. Whoever ends a round has all its words (R1), and so the same digests. What is remembered of them counts within one
   view only, and whoever is in a view has ended each of its rounds by their words: who is told that a round is
   committed gets another view with it. So all members of a view remember the same, and know alike who is due when.
2. The state is that of the step's beginning, and goes as it goes to a joiner. It is there before the member that takes
   it over computes anything of the step, and nobody ends the step without that one's word; so nobody writes to what is
   being sent.
3. If the view is stopped meanwhile, that member goes on with what it holds: it has taken over nothing, or all. Either
   is as good as before, so it counts as one that holds the state all the time.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from farandole.membership import messages as m
from farandole.membership.difference import outliers
from farandole.membership.view import View

EVERY = 512  # steps, in which the digests of steps have looked at everything


class Drift:
    """What one member remembers of it."""

    def __init__(self) -> None:
        self._view = 0
        self._odd: set[str] = set()  # in that view
        self._times = 0
        self._said: list[m.Message] = []

    def heard(self, view: View, step: int, digests: Mapping[str, int]) -> None:
        """A step has ended in `view`, with these digests in its words."""
        apart = outliers(digests)
        if not apart:
            return
        if view.number != self._view:
            self._view, self._odd = view.number, set()
        self._odd |= {worker for worker in digests if digests[worker] != digests.get(view.members[0])}
        self._times += 1
        if self._times & (self._times - 1) == 0:
            self._said.append(m.Drifts(step=step, workers=apart, times=self._times))

    def report(self) -> list[m.Message]:
        """For the coordinator: the first time, and each time that their number has doubled."""
        said, self._said = self._said, []
        return said

    def renewal(self, view: View, step: int) -> View | None:
        """Who gives the state to whom as `step` begins in `view`, as if these were joiners; None: nobody is due."""
        if view.number != self._view or step % EVERY or not self._odd:
            return None
        odd, self._odd = self._odd, set()
        return msgspec.structs.replace(view, joining=tuple(worker for worker in view.members if worker in odd))
