"""All messages of a round's exchange that one worker sends or receives, by the phases in `order`.

Each is made from what sender and receiver both know, in the same order, so that the k-th one of its kind and bucket
from one to the other has the same tag on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product

from farandole.collective.levels import Levels, Sliced
from farandole.collective.tags import PARTIAL, REDUCED, WORD, place
from farandole.membership.view import View
from farandole.plan.shards import Node, maximal


@dataclass(frozen=True, slots=True)
class Message:
    """One message, to or from `peer`.

    Attributes:
        place: of its tag, see `tags`.
        bucket, start, stop: the elements that it carries, of a bucket; all 0 for a word.
        node: of a partial sum, whose sum.
        landing: of a partial sum that is received, where: 0 for the slice's own place.
        whose: of a word, who says it.
    """

    kind: int
    peer: str
    place: int
    bucket: int = 0
    start: int = 0
    stop: int = 0
    node: Node = (0, 0)
    landing: int = 0
    whose: str = ""


class Routes:
    """Of `worker` in `view`. `held`: the shards that each worker has sums of.

    Attributes:
        own: the nodes of which this worker has the sums; `nodes_of_host`: those of which its host has.
        near: the others of its host.
        one_host: nobody is on another one.
        folds: this worker adds up what its host has, to be sent across.
        heard: all are on one host, and each has partial sums: who has those of all others knows that they have begun.
        behind: how many buckets a phase is behind the one before.
        most: how many sums of one bucket go from one worker to another at most, anywhere in the view.
    """

    def __init__(
        self, view: View, worker: str, buckets: Sequence[Sliced], shards: int, held: Mapping[str, Sequence[int]]
    ) -> None:
        self._worker, self._buckets = worker, buckets
        self._levels = levels = Levels.of(view)
        self.near = levels.near(worker)
        self._host = levels.host(worker)
        others = (member for member in view.members if levels.host(member) != self._host)
        self._far = tuple(member for member in others if levels.shared(worker, member))
        self._nodes = {member: maximal(held.get(member, ()), shards) for member in view.members}
        of_hosts = [[shard for w in workers for shard in held.get(w, ())] for workers in levels.hosts]
        self._of_hosts = [maximal(shards_of_host, shards) for shards_of_host in of_hosts]
        self.own = self._nodes[worker]
        self.nodes_of_host = self._of_hosts[self._host]
        self.one_host = len(levels.hosts) == 1
        self.folds = bool(self.near) and not self.one_host
        self.heard = self.one_host and all(self._nodes.values())
        self.behind = int(levels.columns > 1 and not self.one_host)
        columns = 0 if self.one_host else -(-levels.columns // min(map(len, levels.hosts)))  # that two share at most
        self.most = max(*map(len, self._nodes.values()), columns * max(map(len, self._of_hosts)))

    def stretch(self, bucket: int) -> tuple[int, int]:
        """What this worker adds up for its host."""
        return self._levels.stretch(self._buckets[bucket], self._worker)

    def slices(self, bucket: int) -> list[tuple[int, int]]:
        """What this worker makes the sums of, for all."""
        return self._levels.slices(self._buckets[bucket], self._worker)

    # --- partial sums --------------------------------------------------------------------------------------------

    def scattered(self, bucket: int) -> tuple[Message, ...]:
        """What this worker's own sums are sent as."""
        if not self.near:
            return self._across(bucket)
        return tuple(
            Message(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self._stretch_of(bucket, peer), node)
            for k, node in enumerate(self.own)
            for peer in self.near
        )

    def partials_of_host(self, bucket: int) -> tuple[Message, ...]:
        """What the others of this host scatter. Where sums of the host are sent on, the first one's place is theirs."""
        landing = count(0 if self.one_host else 1)
        return tuple(
            Message(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self.stretch(bucket), node, next(landing))
            for peer in self.near
            for k, node in enumerate(self._nodes[peer])
        )

    def across(self, bucket: int) -> tuple[Message, ...]:
        """The sums of this host, to those who own the slices; where they are this worker's, that is to scatter them."""
        return self._across(bucket) if self.near else ()

    def sums_of_hosts(self, bucket: int) -> tuple[Message, ...]:
        """The sums of the other hosts."""
        found: list[Message] = []
        landing = count(1 + len(self.partials_of_host(bucket)))
        first = set(self._levels.served(self._worker)) if not self.near else set[int]()
        for peer in self._far:
            for k, node, column in self._between(peer, peer):
                where = 0 if column in first else next(landing)
                first.discard(column)
                cut = self._cut(bucket, column, self._host)
                found.append(Message(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut, node, where))
        return tuple(found)

    def _across(self, bucket: int) -> tuple[Message, ...]:
        made = [
            Message(
                PARTIAL, peer, place(PARTIAL, bucket, k), bucket,
                *self._cut(bucket, column, self._levels.host(peer)), node,
            )
            for peer in self._far
            for k, node, column in self._between(self._worker, peer)
        ]  # fmt: skip
        return tuple(sorted(made, key=lambda message: self.nodes_of_host.index(message.node)))

    def _between(self, sender: str, peer: str) -> Iterator[tuple[int, Node, int]]:
        """What `sender`, who is this worker or `peer`, sends the other of the two: number, node of its host, column."""
        sums = product(self._of_hosts[self._levels.host(sender)], self._levels.shared(self._worker, peer))
        return ((number, node, column) for number, (node, column) in enumerate(sums))

    # --- sums ----------------------------------------------------------------------------------------------------

    def to_share(self, bucket: int) -> tuple[Message, ...]:
        """This worker's slices, to the delegates of the other hosts."""
        return self._shared(bucket, own=True)

    def shared(self, bucket: int) -> tuple[Message, ...]:
        """Theirs."""
        return self._shared(bucket, own=False)

    def to_gather(self, bucket: int) -> tuple[Message, ...]:
        """All columns that this worker serves, to everyone of its host."""
        cut = self.stretch(bucket)
        return tuple(Message(REDUCED, peer, place(REDUCED, bucket), bucket, *cut) for peer in self.near)

    def gathered(self, bucket: int) -> tuple[Message, ...]:
        """Those that they serve."""
        return tuple(
            Message(REDUCED, peer, place(REDUCED, bucket), bucket, *self._stretch_of(bucket, peer))
            for peer in self.near
        )

    def _shared(self, bucket: int, *, own: bool) -> tuple[Message, ...]:
        return tuple(
            Message(
                REDUCED, peer, place(REDUCED, bucket, k), bucket,
                *self._cut(bucket, column, self._host if own else self._levels.host(peer)),
            )
            for peer in self._far
            for k, column in enumerate(self._levels.shared(self._worker, peer))
        )  # fmt: skip

    # --- words ---------------------------------------------------------------------------------------------------

    def to_say(self) -> tuple[Message, ...]:
        """This worker's word: to its host, and to one worker of each other host."""
        return tuple(_word(peer, self._worker) for peer in (*self.near, *self._far) if self._tells(self._worker, peer))

    def words(self) -> tuple[Message, ...]:
        """Those of its host, and those that it is told for its host."""
        return tuple(_word(peer, peer) for peer in (*self.near, *self._told(self._worker)))

    def to_pass_on(self) -> tuple[Message, ...]:
        """What it is told, to its host."""
        return tuple(
            _word(peer, whose, number)
            for number, whose in enumerate(self._told(self._worker), start=1)
            for peer in self.near
        )

    def words_passed_on(self) -> tuple[Message, ...]:
        """What the others of its host are told."""
        return tuple(
            _word(peer, whose, number) for peer in self.near for number, whose in enumerate(self._told(peer), start=1)
        )

    def _tells(self, worker: str, peer: str) -> bool:
        """Whether a worker says its word to that peer: within its host, or to the delegate for its first column."""
        host = self._levels.host(peer)
        return host == self._levels.host(worker) or self._levels.delegate(host, self._levels.served(worker)[0]) == peer

    def _told(self, worker: str) -> list[str]:
        """Who of other hosts says its word to that one of this host."""
        elsewhere = (
            other for workers in self._levels.hosts for other in workers if other not in self._levels.hosts[self._host]
        )
        return [other for other in elsewhere if self._tells(other, worker)]

    # --- cuts ----------------------------------------------------------------------------------------------------

    def _cut(self, bucket: int, column: int, host: int) -> tuple[int, int]:
        return self._levels.slice(self._buckets[bucket], column, host)

    def _stretch_of(self, bucket: int, peer: str) -> tuple[int, int]:
        return self._levels.stretch(self._buckets[bucket], peer)


def _word(peer: str, whose: str, number: int = 0) -> Message:
    return Message(WORD, peer, place(WORD, 0, number), whose=whose)
