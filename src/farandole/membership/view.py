"""Views and control words: what the workers agree on.

A view is the agreed, ordered tuple of workers, with a number that only grows. Its unit of progress is the *round*:
one exchange in which every member takes part (a training step, an evaluation, or an idle round below the
minimum). Rounds are what rules R1 and R2 speak of; a training step is one kind of round.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The ordered members; a worker's rank is its index.

    `joining` are the members that do not hold the state when the view starts: they get no shards in its first
    round and receive the state in it. `group` is the number of the view whose connections this one uses: a view
    that only shrinks connects nothing and names the group of an earlier one.
    """

    number: int
    members: tuple[str, ...]
    joining: tuple[str, ...] = ()
    group: int

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def level(self) -> tuple[str, ...]:
        """Members that hold the state when the view starts, in rank order."""
        return tuple(m for m in self.members if m not in self.joining)

    def rank(self, worker: str) -> int:
        return self.members.index(worker)


class Word(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The control word that every member sends every other at the end of a round (R1, R2).

    It is sent only by a member that holds every reduced bucket of the round, so having all words of a round means
    that everyone holds its result. `prepared` is the newest view that the sender is ready to switch to, 0 for none.
    """

    view: int
    round: int
    prepared: int
    compute_us: int
    shards: int


WORD_LENGTH = 5  # int64 each


def agreed_switch(words: Iterable[Word]) -> int:
    """R2: the number of the view that takes effect after this round, 0 for none.

    Everyone holds the same words (R1), so everyone decides the same, at the same round, without asking anybody.
    """
    prepared = {word.prepared for word in words}
    return prepared.pop() if len(prepared) == 1 else 0
