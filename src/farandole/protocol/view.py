"""Views, lineages and control words: what the workers agree on.

A view is the agreed, ordered tuple of workers, with a number that only grows. Its unit of progress is the *round*:
one exchange in which every member takes part (a training step, an evaluation, or an idle round below the
minimum). Rounds are what rules R1 and R2 speak of; a training step is one kind of round.

How a step's shards are dealt is a fact of the view too, agreed on like membership (see `speeds`). But a round outlives
its view when that one is stopped: what was computed was dealt by the view in which the round began. So the shares that
count for a round travel with its lineage, and those of the view in force only say how the next round is dealt.

A host's shards are one range in every round that begins in a view, whatever order its workers joined in: subtrees of
the sum then lie in one host wherever they can. Only the deal follows hosts, ranks do not: they stay the order of
standing, which recoveries, witnesses and the lines of metrics go by. Whose shards come first stays too: the first
worker's host is the first host, and it the first there. What a crash leaves over is dealt out over all survivors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farandole.plan.shards import Check, assign
from farandole.protocol.values import Count, Name, Share


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """Among whom a round's shards were dealt: the first of `sets` by `shares` (none: equally), each later one, a
    subset of the one before, what those who are missing in it held.

    `again`: of a round that is done again, who computes which shards too (see `plan.checks`); None: nobody was told.
    """

    sets: tuple[tuple[Name, ...], ...]
    shares: tuple[Share, ...] = ()
    again: tuple[tuple[Name, tuple[Count, ...]], ...] | None = None

    def __post_init__(self) -> None:
        _check(self.shares, self.sets[0] if self.sets else ())

    def assign(self, shards: int) -> dict[str, tuple[int, ...]]:
        """Who computes which of a round's `shards` shards."""
        return assign(shards, self.sets, self.shares)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The ordered members; a worker's rank is its index.

    `joining` are the members that do not hold the state when the view starts: they get no shards in its first
    round and receive the state in it. `group` is the number of the view whose connections this one uses: a view
    that only shrinks connects nothing and names the group of an earlier one. `shares` are the members' parts of a
    step's shards, empty where they are equal; `hosts` are where they run, empty where all do on one. `unproven` are
    those who prove themselves in the first step that is trained in this view; `undecided`: the members do not find the
    same, nobody can tell who is right, and they check each other no more (see `verdicts`).
    """

    number: int
    members: tuple[str, ...]
    joining: tuple[str, ...] = ()
    group: int
    shares: tuple[Share, ...] = ()
    hosts: tuple[Name, ...] = ()
    unproven: tuple[Name, ...] = ()
    undecided: bool = False

    def __post_init__(self) -> None:
        _check(self.shares, self.members)
        if self.hosts and len(self.hosts) != len(self.members):
            raise ValueError(f"{len(self.hosts)} hosts for {len(self.members)} workers: one for each, or none for all")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def synced(self) -> tuple[str, ...]:
        """Members that hold the state when the view starts, in rank order."""
        return tuple(m for m in self.members if m not in self.joining)

    def senders(self, bits: str) -> tuple[str, ...]:
        """Who sends the state to the `joining`: all who hold it, one alone where they may hold different ones."""
        return self.synced[:1] if bits == "any" else self.synced

    def rank(self, worker: str) -> int:
        return self.members.index(worker)

    def shares_of(self, workers: tuple[str, ...]) -> tuple[int, ...]:
        """The shares of some members; empty where they are equal, or one of `workers` is no member."""
        if not self.shares or not set(workers) <= set(self.members):
            return ()
        shares = tuple(self.shares[self.rank(worker)] for worker in workers)
        return shares if len(set(shares)) > 1 else ()

    def hosts_of(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        """Where some members run; empty where it is the same for all, or one of `workers` is no member."""
        if not self.hosts or not set(workers) <= set(self.members):
            return ()
        return tuple(self.hosts[self.rank(worker)] for worker in workers)

    def lineage(self, workers: tuple[str, ...]) -> Lineage:
        """Of a round that begins in this view, its shards dealt among `workers`, host by host."""
        hosts = self.hosts_of(workers) or ("",) * len(workers)
        by_host = sorted(zip(workers, hosts, strict=True), key=lambda each: hosts.index(each[1]))
        dealt = tuple(worker for worker, _ in by_host)
        return Lineage(sets=(dealt,), shares=self.shares_of(dealt))


class CommitMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The control word that every member sends every other at the end of a round (R1, R2).

    It is sent only by a member that holds every reduced bucket of the round, so having all words of a round means
    that everyone holds its result. `prepared` is the newest view that the sender is ready to switch to, 0 for none.
    `digest` is that of the sender's replica as it was when the round's step began, 0 for none (see `replicas`).
    `held` and `checked` are of what it has computed of its own shards that others check, and of another's that it
    checks itself, 0 for none (see `verdicts`).
    """

    view: int
    round: int
    prepared: int
    compute_us: int
    shards: int
    call: int = 0  # the number of what the sender's script has called
    digest: int = 0
    held: int = 0
    checked: int = 0


WORD_LENGTH = 9  # int64 each


def agreed_switch(words: Iterable[CommitMessage]) -> int:
    """R2: the number of the view that takes effect after this round, 0 for none.

    Everyone holds the same words (R1), so everyone decides the same, at the same round, without asking anybody.
    """
    prepared = {word.prepared for word in words}
    return prepared.pop() if len(prepared) == 1 else 0


def by_worker(view: View, worker: str, words: Sequence[CommitMessage]) -> dict[str, CommitMessage]:
    """Whose they are, in the order of ranks; `words`: that of `worker`, then its peers'."""
    said = dict(zip((worker, *(member for member in view.members if member != worker)), words, strict=False))
    return {member: said[member] for member in view.members if member in said}


def unlike(checks: Iterable[Check], words: Mapping[str, CommitMessage]) -> tuple[Check, ...]:
    """Those whose two sides have found different things, by their words; equal for all who have these (R1)."""
    return tuple(check for check in checks if _differ(words.get(check.holder), words.get(check.checker)))


def _differ(holder: CommitMessage | None, checker: CommitMessage | None) -> bool:
    return holder is not None and checker is not None and 0 < holder.held != checker.checked > 0


def _check(shares: tuple[int, ...], workers: tuple[str, ...]) -> None:
    if shares and len(shares) != len(workers):
        raise ValueError(f"{len(shares)} shares for {len(workers)} workers: one for each, or none where they are equal")
