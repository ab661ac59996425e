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

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from typing import Protocol

from farandole.errors import ProtocolError, UsageError
from farandole.plan.shards import Node, maximal
from farandole.protocol.view import Lineage, View

# --- levels -----------------------------------------------------------------------------------------------------------
#
# Who sums up what of a bucket: within each host its workers, between hosts those that serve the same column.
#
# A bucket is cut into *columns*, as many as the host with most workers has. Of each column every host has one
# *delegate*: it adds up what the workers of its host have of it, and exchanges that with the delegates of the other
# hosts. So a column is cut once more, into one slice a host, of which that host's delegate makes the sum. What goes
# from host to host is then the size of the sums, whatever number of workers a host has, and a worker exchanges with
# those of its host and one on each other host; with several, where the other host has more workers.
#
# Where all workers are on one host, a column is one slice, and each worker's own. Where each has a host to itself there
# is one column, of which each worker has a slice.


class Sliced(Protocol):
    """What has to be known of a bucket."""

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        """One of so many parts of like size, as `[start, stop)`."""
        ...


@dataclass(frozen=True)
class Levels:
    """`hosts`: the workers of each, in the order of their ranks; the hosts in that of their first ones."""

    hosts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, view: View) -> Levels:
        hosts: dict[str, list[str]] = {}
        for member, host in zip(view.members, view.hosts_of(view.members) or ("",) * view.size, strict=True):
            hosts.setdefault(host, []).append(member)
        return cls(tuple(map(tuple, hosts.values())))

    @functools.cached_property
    def columns(self) -> int:
        return max(map(len, self.hosts))

    @functools.cached_property
    def _host(self) -> dict[str, int]:
        return {worker: number for number, workers in enumerate(self.hosts) for worker in workers}

    def host(self, worker: str) -> int:
        return self._host[worker]

    def near(self, worker: str) -> tuple[str, ...]:
        """The others of its host."""
        return tuple(other for other in self.hosts[self.host(worker)] if other != worker)

    def delegate(self, host: int, column: int) -> str:
        workers = self.hosts[host]
        return workers[column * len(workers) // self.columns]

    def served(self, worker: str) -> range:
        """The columns of which a worker is its host's delegate: at least one, all in a row."""
        workers = self.hosts[self.host(worker)]
        place = workers.index(worker)
        return range(*(-(-each * self.columns // len(workers)) for each in (place, place + 1)))

    def shared(self, worker: str, other: str) -> range:
        """The columns that both serve, on different hosts."""
        mine, theirs = self.served(worker), self.served(other)
        return range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))

    def slice(self, bucket: Sliced, column: int, host: int) -> tuple[int, int]:
        """The part of a bucket that the host's delegate for that column makes the sum of."""
        return bucket.slice(column * len(self.hosts) + host, self.columns * len(self.hosts))

    def slices(self, bucket: Sliced, worker: str) -> list[tuple[int, int]]:
        """What a worker makes the sums of, for all."""
        return [self.slice(bucket, column, self.host(worker)) for column in self.served(worker)]

    def stretch(self, bucket: Sliced, worker: str) -> tuple[int, int]:
        """All columns that a worker serves."""
        served, last = self.served(worker), len(self.hosts) - 1
        return self.slice(bucket, served[0], 0)[0], self.slice(bucket, served[-1], last)[1]


# --- tags -------------------------------------------------------------------------------------------------------------
#
# The tags of messages: what tells one from another between the same two workers.
#
# A tag is 31 bits, since Gloo's is a C int:
#
#     purpose 1   a training step, or anything else
#     view    9   modulo 512
#     round   2   modulo 4
#     kind    2   partial sum, reduced slice, control word, state
#     bucket  8
#     node    9   which of its sender's partial sums
#
# The last three, the *place*, are the same in every round; the first three, the *round's*, are added to it.
#
# Where a message and what waits for it differ in size, Gloo ends the process. So their tags must differ where their
# sizes might: what the purpose is for says `protocol/coordinator/view_changes.py`. Within a view rounds go in
# lockstep, at most one apart, so two bits tell them apart.
#
# What goes on over the connections of an earlier view (R3) leaves receives behind in them that nothing ends: a
# message of a later view that had the same tag would be taken for theirs. The connections are made anew, ahead of the
# switch, when they have served half of the 512 numbers (`protocol/coordinator/view_changes.py`), and that is tried
# again for as long as the other half lasts. No view uses connections that have served all of them: `of_round` refuses.

# Kinds.
PARTIAL, REDUCED, WORD, STATE = range(4)
# Purposes of a round: a training step (or waiting for one), or anything else.
TRAINING, OTHER = range(2)
VIEWS = 512  # numbers that the tags of one group's messages tell apart
ROUNDS = 4
MOST_BUCKETS = 256  # of a layout, which makes them larger rather than more
MOST_SUMS = 512  # of a worker in a round: a contiguous range of shards has at most 62, each loss in a step adds some


def place(kind: int, bucket: int = 0, node: int = 0) -> int:
    """What is the same of a message's tag in every round."""
    assert bucket < MOST_BUCKETS, f"bucket {bucket}: at most {MOST_BUCKETS} buckets"
    assert node < MOST_SUMS, f"node {node}: at most {MOST_SUMS} partial sums a worker"
    return kind << 17 | bucket << 9 | node


def of_round(view: View, round_: int, purpose: int = TRAINING) -> int:
    """What all tags of one round have in common.

    Raises:
        ProtocolError: the tags of this view's group have been used up.
    """
    if view.number - view.group >= VIEWS:
        raise ProtocolError(
            f"view {view.number} is to use the connections of view {view.group}, which are good for {VIEWS} numbers: "
            f"its members could not be connected anew for that long; see what keeps them apart, then resume the run"
        )
    return purpose << 30 | view.number % VIEWS << 21 | round_ % ROUNDS << 19


# --- routes -----------------------------------------------------------------------------------------------------------
#
# All messages of a round's exchange that one worker sends or receives, by the phases in `order`.
#
# Each is made from what sender and receiver both know, in the same order, so that the k-th one of its kind and bucket
# from one to the other has the same tag on both sides.


@dataclass(frozen=True, slots=True)
class ExchangeMessage:
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

    def scattered(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """What this worker's own sums are sent as."""
        if not self.near:
            return self._across(bucket)
        return tuple(
            ExchangeMessage(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self._stretch_of(bucket, peer), node)
            for k, node in enumerate(self.own)
            for peer in self.near
        )

    def partials_of_host(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """What the others of this host scatter. Where sums of the host are sent on, the first one's place is theirs."""
        landing = count(0 if self.one_host else 1)
        return tuple(
            ExchangeMessage(
                PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self.stretch(bucket), node, next(landing)
            )
            for peer in self.near
            for k, node in enumerate(self._nodes[peer])
        )

    def across(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The sums of this host, to those who own the slices; where they are this worker's, that is to scatter them."""
        return self._across(bucket) if self.near else ()

    def sums_of_hosts(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The sums of the other hosts."""
        found: list[ExchangeMessage] = []
        landing = count(1 + len(self.partials_of_host(bucket)))
        first = set(self._levels.served(self._worker)) if not self.near else set[int]()
        for peer in self._far:
            for k, node, column in self._between(peer, peer):
                where = 0 if column in first else next(landing)
                first.discard(column)
                cut = self._cut(bucket, column, self._host)
                found.append(ExchangeMessage(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut, node, where))
        return tuple(found)

    def _across(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        made = [
            ExchangeMessage(
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

    def to_share(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """This worker's slices, to the delegates of the other hosts."""
        return self._shared(bucket, own=True)

    def shared(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """Theirs."""
        return self._shared(bucket, own=False)

    def to_gather(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """All columns that this worker serves, to everyone of its host."""
        cut = self.stretch(bucket)
        return tuple(ExchangeMessage(REDUCED, peer, place(REDUCED, bucket), bucket, *cut) for peer in self.near)

    def gathered(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """Those that they serve."""
        return tuple(
            ExchangeMessage(REDUCED, peer, place(REDUCED, bucket), bucket, *self._stretch_of(bucket, peer))
            for peer in self.near
        )

    def _shared(self, bucket: int, *, own: bool) -> tuple[ExchangeMessage, ...]:
        return tuple(
            ExchangeMessage(
                REDUCED, peer, place(REDUCED, bucket, k), bucket,
                *self._cut(bucket, column, self._host if own else self._levels.host(peer)),
            )
            for peer in self._far
            for k, column in enumerate(self._levels.shared(self._worker, peer))
        )  # fmt: skip

    # --- words ---------------------------------------------------------------------------------------------------

    def to_say(self) -> tuple[ExchangeMessage, ...]:
        """This worker's word: to its host, and to one worker of each other host."""
        return tuple(_word(peer, self._worker) for peer in (*self.near, *self._far) if self._tells(self._worker, peer))

    def words(self) -> tuple[ExchangeMessage, ...]:
        """Those of its host, and those that it is told for its host."""
        return tuple(_word(peer, peer) for peer in (*self.near, *self._told(self._worker)))

    def to_pass_on(self) -> tuple[ExchangeMessage, ...]:
        """What it is told, to its host."""
        return tuple(
            _word(peer, whose, number)
            for number, whose in enumerate(self._told(self._worker), start=1)
            for peer in self.near
        )

    def words_passed_on(self) -> tuple[ExchangeMessage, ...]:
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


def _word(peer: str, whose: str, number: int = 0) -> ExchangeMessage:
    return ExchangeMessage(WORD, peer, place(WORD, 0, number), whose=whose)


# --- order ------------------------------------------------------------------------------------------------------------

LANDINGS = 2  # buckets whose partial sums may be arriving at a time: bounds the memory for them


# --- what the view's thread does -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Until this worker has scattered `bucket`."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Take:
    """Until these are here."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """Make the host's sums of a stretch of `bucket`, these `nodes`: of this worker's own, and what it has `taken`."""

    bucket: int
    start: int
    stop: int
    nodes: tuple[Node, ...]
    taken: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Sum up a slice of `bucket`: of the sums that this worker has, or its host, and what it has `taken`."""

    bucket: int
    start: int
    stop: int
    taken: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class PostReceives:
    """Be ready to receive these."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class SendMessages:
    """Send these."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class Vouch:
    """This worker holds every reduced bucket: make its word, which the next act sends. None: the round ends here."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """All words are here."""


Act = Await | Take | Fold | Add | PostReceives | SendMessages | Vouch | RoundEnd


@dataclass(frozen=True, kw_only=True)
class ExchangeOrder:
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
    begin: tuple[ExchangeMessage, ...]
    scatter: tuple[tuple[ExchangeMessage, ...], ...]
    serve: tuple[Act, ...]

    @property
    def arrivals(self) -> Iterable[ExchangeMessage]:
        """All that is received."""
        yield from self.begin
        for act in self.serve:
            if isinstance(act, PostReceives):
                yield from act.messages

    def owed(self, scattered: Sequence[bool], served: int) -> Iterable[ExchangeMessage]:
        """What has not been sent when these buckets have been scattered and so many acts of `serve` are done."""
        for bucket, messages in enumerate(self.scatter):
            if not scattered[bucket]:
                yield from messages
        for act in self.serve[served:]:
            if isinstance(act, SendMessages):
                yield from act.messages


def order(view: View, worker: str, buckets: Sequence[Sliced], shards: int, lineage: Lineage) -> ExchangeOrder:
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
            yield SendMessages(routes.across(bucket))

    def sum_(bucket: int) -> Iterable[Act]:
        arrivals = near if routes.one_host else across
        yield Take(arrivals[bucket])
        for cut in routes.slices(bucket):
            yield Add(bucket, *cut, tuple(m for m in arrivals[bucket] if (m.start, m.stop) == cut))
        yield from _next(arrivals, bucket)
        yield SendMessages(routes.to_share(bucket))

    def pass_on(bucket: int) -> Iterable[Act]:
        if routes.near:
            yield Take(shared[bucket])
            yield SendMessages(routes.to_gather(bucket))

    serve: list[Act] = []
    for number in range(len(buckets) + 2 * routes.behind):
        for late, phase in enumerate((fold, sum_, pass_on)):
            if 0 <= number - late * routes.behind < len(buckets):
                serve += phase(number - late * routes.behind)
    serve += [*map(Take, gathered if routes.near else shared), Vouch(), SendMessages(routes.to_say()), Take(words)]
    serve += [SendMessages(routes.to_pass_on()), Take(passed_on), RoundEnd()]
    posted = (*near[:LANDINGS], *across[:LANDINGS], *shared, *gathered, words, passed_on)
    return ExchangeOrder(
        shards=shards,
        mine=len(held.get(worker, ())),
        own=routes.own,
        heard=routes.heard,
        begin=tuple(message for messages in posted for message in messages),
        scatter=tuple(routes.scattered(bucket) for bucket in numbers),
        serve=tuple(act for act in serve if not isinstance(act, Take | PostReceives | SendMessages) or act.messages),
    )


def _next(arrivals: Sequence[tuple[ExchangeMessage, ...]], bucket: int) -> Iterable[PostReceives]:
    """What lands where that bucket's have: see the module's head."""
    if bucket + LANDINGS < len(arrivals):
        yield PostReceives(arrivals[bucket + LANDINGS])
