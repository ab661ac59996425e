"""The order of one round's exchange at one worker, as a value: which messages, when, and where they land.

`exchange` follows it with threads and tensors, and so does the simulator (`farandole.simulate`) with neither: what is
decided here is what both do. Who sums up what is said by `levels`. For each bucket, as soon as this worker's last shard
has filled it:

(a) scatter  every worker sends each other one of its host its partial sums of the columns that the other serves;
(b) fold     who serves a column adds them, as far as the tree over shards goes within the host, and
(c) across   sends the delegates of the other hosts the host's sums of the slices that those own;
(d) sum      the owner of a slice adds them in the tree's order, and
(e) share    sends the sum to the delegates of the other hosts;
(f) gather   who has all slices of its columns sends those to everyone of its host.

Then, when every bucket is reduced, (g) words: the control words go round (R1), within a host directly, and to another
host by one of its workers, who passes them on; and the round ends. On one host (c) and (e) have nothing to do; who is
alone on its host scatters what others send across, and (b) and (f) have nothing to do.

Two threads. The training thread posts `begin` and sends `scatter[bucket]` as the backward pass fills the bucket. The
view's thread does `serve`, one act after the other, because a wait on a peer that is frozen can't be woken. Each is
alone with its part, so that the order within each is all that there is to decide. Why it is the right one:

- *What arrives is known by its tag alone.* Sender and receiver make their messages from the same facts (view, lineage,
  number of shards, buckets), each by itself: the k-th sum of a bucket that one sends the other is that of the k-th node
  in `plan.tree.maximal` of what the sender, or its host, holds, column by column. After a loss the survivors' nodes are
  other ones, more or larger ones; the lineage, which names the losses, is equal for all, so what is made from it is.
- *Nothing lands on what is still needed.* A reduced slice lands in its own place. Before, the first of the host's sums
  may be there: the slice's owner has that one when it sends the slice. Of what comes from others the first sum of a
  bucket lands where its sum will be, unless a sum of the host is to be there; the others in landings that `LANDINGS`
  buckets share in turn: those of bucket b + LANDINGS are posted when b has been folded, or summed, and not before.
- *A slice is passed on when it is summed*, a word said when every slice is here; and since its peers' words say the
  same of theirs (R1), what this worker has sent has arrived when it has all words. So the next round may write there;
  where peers use what lies here, when they have begun it (`sums`). A word that is passed on says what it said.
- *No circle of waits.* All serve in the same order of phases, `serve`'s: first (b) of bucket b, then (d) of the one
  before, then (f) of the one before that, so that no host waits for another one's backward pass before it has folded
  what is there. In each phase a worker sends before it waits for what others send in that phase; so of those who wait
  nobody waits for who is in a later phase, and who is in the first one waits for a backward pass.

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

from farandole.collective.levels import Sliced
from farandole.collective.routes import Message, Routes
from farandole.collective.tags import MOST_SUMS
from farandole.errors import UsageError
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Node

LANDINGS = 2  # buckets whose partial sums may be arriving at a time: bounds the memory for them


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
class Fold:
    """Make the host's sums of a stretch of `bucket`, these `nodes`: of this worker's own, and what it has `taken`."""

    bucket: int
    start: int
    stop: int
    nodes: tuple[Node, ...]
    taken: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Sum up a slice of `bucket`: of the sums that this worker has, or its host, and what it has `taken`."""

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


Act = Await | Take | Fold | Add | Post | Send | Vouch | End


@dataclass(frozen=True, kw_only=True)
class Order:
    """See the module's head.

    Attributes:
        begin: receives that are posted as the round begins.
        scatter: for each bucket, what is sent when this worker's shards are all in it.
        serve: what follows, in this order.
        mine: how many shards are this worker's.
        own: the nodes that it holds the sums of.
        heard: see `Routes`.
    """

    shards: int
    mine: int
    own: tuple[Node, ...]
    heard: bool
    begin: tuple[Message, ...]
    scatter: tuple[tuple[Message, ...], ...]
    serve: tuple[Act, ...]

    @property
    def arrivals(self) -> Iterable[Message]:
        """All that is received."""
        yield from self.begin
        for act in self.serve:
            if isinstance(act, Post):
                yield from act.messages

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
    routes = Routes(view, worker, buckets, shards, held)
    if routes.most > MOST_SUMS:
        raise UsageError(
            f"after {len(lineage.sets) - 1} losses within one step of {shards:,} shards {routes.most} partial sums of "
            f"them go from one worker to another, at most {MOST_SUMS} can: use larger micro-batches (micro=)"
        )
    numbers = range(len(buckets))
    near = [routes.partials_of_host(bucket) for bucket in numbers]
    across = [routes.sums_of_hosts(bucket) for bucket in numbers]
    shared = [routes.shared(bucket) for bucket in numbers]
    gathered = [routes.gathered(bucket) for bucket in numbers]
    words, passed_on = routes.words(), routes.words_passed_on()

    def fold(bucket: int) -> Iterable[Act]:
        yield Await(bucket)
        if routes.folds:
            yield Take(near[bucket])
            yield Fold(bucket, *routes.stretch(bucket), routes.nodes_of_host, near[bucket])
            yield from _next(near, bucket)
            yield Send(routes.across(bucket))

    def sum_(bucket: int) -> Iterable[Act]:
        arrivals = near if routes.one_host else across
        yield Take(arrivals[bucket])
        for cut in routes.slices(bucket):
            yield Add(bucket, *cut, tuple(m for m in arrivals[bucket] if (m.start, m.stop) == cut))
        yield from _next(arrivals, bucket)
        yield Send(routes.to_share(bucket))

    def pass_on(bucket: int) -> Iterable[Act]:
        if routes.near:
            yield Take(shared[bucket])
            yield Send(routes.to_gather(bucket))

    serve: list[Act] = []
    for number in range(len(buckets) + 2 * routes.behind):
        for late, phase in enumerate((fold, sum_, pass_on)):
            if 0 <= number - late * routes.behind < len(buckets):
                serve += phase(number - late * routes.behind)
    serve += [*map(Take, gathered if routes.near else shared), Vouch(), Send(routes.to_say()), Take(words)]
    serve += [Send(routes.to_pass_on()), Take(passed_on), End()]
    posted = (*near[:LANDINGS], *across[:LANDINGS], *shared, *gathered, words, passed_on)
    return Order(
        shards=shards,
        mine=len(held.get(worker, ())),
        own=routes.own,
        heard=routes.heard,
        begin=tuple(message for messages in posted for message in messages),
        scatter=tuple(routes.scattered(bucket) for bucket in numbers),
        serve=tuple(act for act in serve if not isinstance(act, Take | Post | Send) or act.messages),
    )


def _next(arrivals: Sequence[tuple[Message, ...]], bucket: int) -> Iterable[Post]:
    """What lands where that bucket's have: see the module's head."""
    if bucket + LANDINGS < len(arrivals):
        yield Post(arrivals[bucket + LANDINGS])
