"""The order of one round's exchange at one worker, as a value: which messages, when, and where they land.

`exchange` follows it with threads and tensors, and so does the simulator (`farandole.simulate`) with neither: what is
decided here is what both do. For each bucket, as soon as this worker's last shard has filled it:

(a) scatter  every rank sends each other rank its partial sums of the slice that the other owns;
(b) sum      the owner adds them in the order of the tree over shards;
(c) gather   the owner sends the sum to everyone.

Then, when every bucket is reduced, (d) words: the control words go round (R1) and the round ends.

Two threads. The training thread posts `begin` and sends `scatter[bucket]` as the backward pass fills the bucket. The
view's thread does `serve`, one act after the other, because a wait on a peer that is frozen can't be woken. Each is
alone with its part, so that the order within each is all that there is to decide. Why it is the right one:

- *What arrives is known by its tag alone.* Sender and receiver make their messages from the same facts (view, lineage,
  number of shards, buckets), each by itself: the k-th partial sum that a worker sends is that of the k-th node in
  `plan.tree.maximal` of what it holds, and its receiver takes it for that. After a loss the survivors' nodes are other
  ones, more or larger ones; the lineage, which names the losses, is equal for all, and so is what is made from it.
- *Nothing lands on what is still needed.* A reduced slice lands in its own place, which nothing else uses. The first
  partial sum of a bucket lands where its sum will be, the others in landings that `LANDINGS` buckets share in turn:
  those of bucket b + LANDINGS are posted when b has been summed, and not before.
- *A slice is gathered when it is summed*, a word said when every slice is here; and since its peers' words say the same
  of theirs (R1), what this worker has sent has arrived when it has all words. So the next round may write there; where
  peers use what lies here, the round after the next (`sums`).
- *No circle of waits.* Bucket by bucket, everyone waits for partial sums, which need nobody's help but their sender's
  backward pass; then for slices, which need only those; then for words.

A loss. Who finds a peer lost says so; the round then never ends here, and what is in the reduced buckets is garbage
unless a word was said. The partial sums are untouched, and the whole round is done again in the next view: every bucket
is scattered again, the lost shards dealt out, with tags and buffers of that view (R3), so that what is still under way
in the old one meets only what is left of the old one.

Settling. A thread of the old view may wait for what a survivor has not sent, and nothing but that message ends the wait
(`transport`). So each survivor, as it leaves the view, sends what it still `owed`, contents aside. It may do so only
when every survivor has abandoned the view: nobody takes it for a result then, since `Agreement.word` refuses. What the
view's thread was about to send when it was overtaken is sent twice; the second one meets nobody. That thread may go on
long after, when the partial sums are those of a later round: so it adds what was scattered, by reference, and what
comes of it is looked at by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from farandole.collective.tags import MOST_SUMS, PARTIAL, REDUCED, WORD, place
from farandole.errors import UsageError
from farandole.membership.view import Lineage, View
from farandole.plan.tree import Node, maximal

LANDINGS = 2  # buckets whose partial sums may be arriving at a time: bounds the memory for them


class Sliced(Protocol):
    """What the order has to know of a bucket."""

    def slice(self, rank: int, ranks: int) -> tuple[int, int]:
        """The part `[start, stop)` that one rank sums up."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """One message, to or from `peer`.

    Attributes:
        place: of its tag, see `tags`.
        bucket, start, stop: the elements that it carries, of a bucket; all 0 for a word.
        node: of a partial sum, whose sum.
        landing: of a partial sum that is received, where: 0 for the slice's own place.
    """

    kind: int
    peer: str
    place: int
    bucket: int = 0
    start: int = 0
    stop: int = 0
    node: Node = (0, 0)
    landing: int = 0


# --- what the view's thread does -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Until this worker has scattered `bucket`."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Take:
    """Until these are here."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Sum up this rank's slice of `bucket`: of what it has scattered itself, and what it has `taken`."""

    bucket: int
    start: int
    stop: int
    taken: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Be ready to receive these."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send these."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Vouch:
    """This worker holds every reduced bucket: make its word, which the next act sends. None: the round ends here."""


@dataclass(frozen=True, slots=True)
class End:
    """All words are here."""


Act = Await | Take | Add | Post | Send | Vouch | End


@dataclass(frozen=True, kw_only=True)
class Order:
    """See the module's head.

    Attributes:
        begin: receives that are posted as the round begins.
        scatter: for each bucket, what is sent when this worker's shards are all in it.
        serve: what follows, in this order.
        mine: how many shards are this worker's.
        own: the nodes that it holds the sums of.
    """

    shards: int
    mine: int
    own: tuple[Node, ...]
    begin: tuple[Message, ...]
    scatter: tuple[tuple[Message, ...], ...]
    serve: tuple[Act, ...]

    def owed(self, scattered: Sequence[bool], served: int) -> Iterable[Message]:
        """What has not been sent when these buckets have been scattered and so many acts of `serve` are done."""
        for bucket, messages in enumerate(self.scatter):
            if not scattered[bucket]:
                yield from messages
        for act in self.serve[served:]:
            if isinstance(act, Send):
                yield from act.messages


def order(view: View, worker: str, buckets: Sequence[Sliced], shards: int, lineage: Lineage) -> Order:
    """The order of a round of `shards` shards, dealt out by `lineage`, at `worker` in `view`.

    Raises:
        UsageError: after so many losses a worker's shards are in more pieces than a tag can tell apart.
    """
    held = lineage.assign(shards) if shards else {}
    nodes = {holder: maximal(mine, shards) for holder, mine in held.items()}
    for holder, pieces in nodes.items():
        if len(pieces) > MOST_SUMS:
            raise UsageError(
                f"after {len(lineage.sets) - 1} losses within one step of {shards:,} shards {holder} has "
                f"{len(pieces)} partial sums of them, at most {MOST_SUMS} can be exchanged: use larger "
                f"micro-batches (micro=)"
            )
    peers = [member for member in view.members if member != worker]
    own = nodes.get(worker, ())
    numbers = range(len(buckets))

    def cut(bucket: int, owner: str) -> tuple[int, int]:
        return buckets[bucket].slice(view.rank(owner), view.size)

    def scattered(bucket: int) -> tuple[Message, ...]:
        return tuple(
            Message(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut(bucket, peer), node)
            for k, node in enumerate(own)
            for peer in peers
        )

    def arrivals(bucket: int) -> tuple[Message, ...]:
        theirs = [(peer, k, node) for peer in peers for k, node in enumerate(nodes.get(peer, ()))]
        return tuple(
            Message(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut(bucket, worker), node, landing)
            for landing, (peer, k, node) in enumerate(theirs)
        )

    def sums(bucket: int, *, own: bool) -> tuple[Message, ...]:
        owners = [worker if own else peer for peer in peers]
        return tuple(
            Message(REDUCED, peer, place(REDUCED, bucket), bucket, *cut(bucket, owner))
            for peer, owner in zip(peers, owners, strict=True)
        )

    landing = [arrivals(bucket) for bucket in numbers]
    gathered = [sums(bucket, own=False) for bucket in numbers]
    words = tuple(Message(WORD, peer, place(WORD)) for peer in peers)
    serve: list[Act] = []
    for bucket in numbers:
        serve += [Await(bucket), Take(landing[bucket]), Add(bucket, *cut(bucket, worker), landing[bucket])]
        if bucket + LANDINGS < len(buckets):
            serve.append(Post(landing[bucket + LANDINGS]))
        serve.append(Send(sums(bucket, own=True)))
    serve += [*map(Take, gathered), Vouch(), Send(words), Take(words), End()]
    return Order(
        shards=shards,
        mine=len(held.get(worker, ())),
        own=own,
        begin=tuple(message for posted in (*landing[:LANDINGS], *gathered, words) for message in posted),
        scatter=tuple(scattered(bucket) for bucket in numbers),
        serve=tuple(serve),
    )
