"""Views, lineages and commit messages: what the workers agree on.

A view is the agreed, ordered tuple of workers, with a number that only grows. Its unit of progress is the *round*: one
all-reduce in which every member takes part (a training step, an evaluation, a call round, or an idle round below the
minimum). The shard assignment is a fact of the view, and that of a started round travels with its lineage. A host's
shards are one range in every round that begins in a view; ranks stay in order of joining.
See docs/protocol.md: Rules R1-R3, Reconfiguration, and Shares by speed 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from farandole.plan.shards import Check, assign
from farandole.protocol.values import Count, Name, Share

T = TypeVar("T")


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The shard assignment history of a round.

    The first of `sets` received all shards, by `shares` (empty: equally). Each later set is a subset of the one before,
    and received the shards of the members that are missing in it. `rechecks` ("again" in journals): if the round is
    repeated, the shards that each worker computes as checks (see `plan/shards.py`); None if no worker was assigned any.

    Raises:
        ValueError: the number of shares is not that of the workers of the first set.
    """

    sets: tuple[tuple[Name, ...], ...]
    shares: tuple[Share, ...] = ()
    rechecks: tuple[tuple[Name, tuple[Count, ...]], ...] | None = msgspec.field(default=None, name="again")

    def __post_init__(self) -> None:
        _check(self.shares, self.sets[0] if self.sets else ())

    def assign(self, shards: int) -> dict[str, tuple[int, ...]]:
        """Return the shards of each worker, of a round with `shards` shards."""
        return assign(shards, self.sets, self.shares)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The ordered members; a worker's rank is its index.

    Attributes:
        number: grows with each view.
        members: the ids of the workers, in rank order.
        joining: members that do not hold the state when the view starts. They get no shards in its first round, and
            receive the state in it.
        group: the number of the view whose connections this one uses. A view that only shrinks opens no connection and
            names the group of an earlier one.
        shares: the members' parts of a step's shards, empty if they are equal.
        hosts: where the members run, empty if all run on one host.
        unchecked: members that pass their admission check in the first step that is trained in this view.
        undecided: the members compute different results, no third worker can decide who is right, and they check each
            other no more.
        zones: the zones of the members' hosts, parallel to `hosts`, empty if all are in one zone or no host reports
            one. Zone "" is that of the hosts that report none.

    Raises:
        ValueError: the number of shares, hosts or zones is not that of the members, or one host is in two zones.
    """

    number: int
    members: tuple[str, ...]
    joining: tuple[str, ...] = ()
    group: int
    shares: tuple[Share, ...] = ()
    hosts: tuple[Name, ...] = ()
    unchecked: tuple[Name, ...] = msgspec.field(default=(), name="unproven")  # its name in journals
    undecided: bool = False
    zones: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        _check(self.shares, self.members)
        if self.hosts and len(self.hosts) != len(self.members):
            raise ValueError(
                f"{len(self.hosts)} hosts for {len(self.members)} workers: give one for each, or none if there is one"
            )
        if self.zones:
            _check_zones(self.zones, self.hosts, self.members)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def synced(self) -> tuple[str, ...]:
        """The members that hold the state when the view starts, in rank order."""
        joining = set(self.joining)
        return tuple(m for m in self.members if m not in joining)

    def senders(self, bits: str) -> tuple[str, ...]:
        """Return the members that send the state to the `joining`: all that hold it, but one alone under `--bits any`,
        where they may hold different states.
        """
        return self.synced[:1] if bits == "any" else self.synced

    def rank(self, worker: str) -> int:
        return self.members.index(worker)

    def shares_of(self, workers: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shares of `workers`; empty if they are equal, or if one of `workers` is no member."""
        shares = self._values_of(workers, self.shares)
        return shares if len(set(shares)) > 1 else ()

    def hosts_of(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the hosts of `workers`; empty if all members run on one, or if one of `workers` is no member."""
        return self._values_of(workers, self.hosts)

    def zones_of(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the zones of `workers`; empty if all members are in one, or if one of `workers` is no member."""
        return self._values_of(workers, self.zones)

    def _values_of(self, workers: tuple[str, ...], values: tuple[T, ...]) -> tuple[T, ...]:
        """Return the values of `workers` from those of the members, empty if one is no member or there are none."""
        by_member = dict(zip(self.members, values, strict=True)) if values else {}
        return tuple(by_member[w] for w in workers) if by_member.keys() >= set(workers) else ()

    def lineage(self, workers: tuple[str, ...]) -> Lineage:
        """Return the lineage of a round that begins in this view.

        Its shards are assigned to `workers`, zone by zone and within a zone host by host: so neighbours in the tree
        are added before anything leaves a host or a zone. The first worker's host comes first, and that worker first in
        it. Only the assignment follows hosts; what a crash leaves over is assigned over all survivors.
        """
        hosts, zones = (each or ("",) * len(workers) for each in (self.hosts_of(workers), self.zones_of(workers)))
        first_of_host, first_of_zone = _firsts(hosts), _firsts(zones)
        places = [(first_of_zone[zone], first_of_host[host]) for zone, host in zip(zones, hosts, strict=True)]
        dealt = tuple(workers[rank] for rank in sorted(range(len(workers)), key=places.__getitem__))
        return Lineage(sets=(dealt,), shares=self.shares_of(dealt))


class CommitMessage(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The message that every member sends every other at the end of a round (R1, R2).

    A member sends it only if it holds every reduced bucket of the round. So a member that has all commit messages of a
    round knows that every member holds its result.

    Attributes:
        prepared: the newest view that the sender is ready to switch to, 0 for none.
        compute_us: microseconds that its `shards` shards took.
        call: the number of the script's call.
        digest: of the sender's replica when the round's step began, 0 for none.
        own_results: a digest of its results for its own shards that others check, 0 for none.
        check_results: a digest of its results for the shards of another worker that it checks, 0 for none.
    """

    view: int
    round: int
    prepared: int
    compute_us: int
    shards: int
    call: int = 0
    digest: int = 0
    own_results: int = 0
    check_results: int = 0


COMMIT_FIELDS = 9  # fields of a commit message, an int64 each


def agreed_switch(commits: Iterable[CommitMessage]) -> int:
    """Return the number of the view that is agreed at the end of this round, 0 for none (R2).

    All members hold the same messages (R1), so all decide the same, at the same round, without any other message.
    """
    prepared = {commit.prepared for commit in commits}
    return prepared.pop() if len(prepared) == 1 else 0


def by_worker(view: View, worker: str, commits: Sequence[CommitMessage]) -> dict[str, CommitMessage]:
    """Return the commit messages by worker, in rank order. `commits`: that of `worker`, then those of its peers."""
    messages = dict(zip((worker, *(member for member in view.members if member != worker)), commits, strict=False))
    return {member: messages[member] for member in view.members if member in messages}


def unlike(checks: Iterable[Check], commits: Mapping[str, CommitMessage]) -> tuple[Check, ...]:
    """Return the checks whose two workers computed different results. All members return the same (R1)."""
    return tuple(check for check in checks if _differ(commits.get(check.owner), commits.get(check.checker)))


def _differ(owner: CommitMessage | None, checker: CommitMessage | None) -> bool:
    return owner is not None and checker is not None and 0 < owner.own_results != checker.check_results > 0


def _firsts(values: Sequence[T]) -> dict[T, int]:
    """Return the index at which each value comes first."""
    return {value: index for index, value in reversed([*enumerate(values)])}


def _check(shares: tuple[int, ...], workers: tuple[str, ...]) -> None:
    if shares and len(shares) != len(workers):
        raise ValueError(
            f"{len(shares)} shares for {len(workers)} workers: give one for each, or none if they are equal"
        )


def _check_zones(zones: tuple[str, ...], hosts: tuple[str, ...], workers: tuple[str, ...]) -> None:
    if not len(zones) == len(hosts) == len(workers):
        raise ValueError(
            f"{len(zones)} zones and {len(hosts)} hosts for {len(workers)} workers: give one for each, or no zones"
        )
    zone_of_host: dict[str, str] = {}
    for host, zone in zip(hosts, zones, strict=True):
        if zone_of_host.setdefault(host, zone) != zone:
            raise ValueError(f"host {host!r} is in the zones {zone_of_host[host]!r} and {zone!r}: give it one zone")
