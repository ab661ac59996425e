"""The order of one round's exchange at one worker, as a value: the messages, their order, and their receive buffers.

`exchange.py` executes this order with threads and tensors, and the simulator (`farandole.simulate`) executes it without
either: both do what is decided here. `Levels` decides which worker sums up which part. For each bucket, as soon as this
worker's last shard has filled it:

(a) scatter  each worker sends every other worker of its host its partial sums of the columns that the other serves;
(b) host sum the worker that serves a column adds them, as far as the tree over shards goes within the host, and
(c) across   sends the host's sums of each strip to the host delegate of the zone that serves the strip;
(d) zone sum that worker adds them, as far as the tree goes within the zone, and
(e) beyond   sends the zone's sums of each slice to the worker (of another zone) that owns the slice;
(f) sum      the owner of a slice adds the sums in the tree's order, and
(g) share    sends the result to the workers that serve the strip in the other zones;
(h) spread   a worker that has all slices of its strips sends those to the host delegates of its zone;
(i) gather   a worker that has all slices of its columns sends those to every worker of its host.

With one zone, what goes between hosts is cut into pieces (`Bucket.pieces`), each a message of its own. The owner of a
slice adds a piece and sends it on before it waits for the next one, so the link is not idle while a slice is added.

When every bucket is reduced, (j) commits: the workers exchange commit messages (R1). They send them directly within a
host, and to one worker of each other host, which forwards them. Then the round ends.

A phase that has nothing to do is left out: with one host (c) and (h), with one zone (d), (e) and (g): then the worker
that serves a strip owns its only slice. A worker that is alone on its host sends in (a) what others send in (c), and if
its host is alone in its zone, what others send in (e).

Two threads. The training thread posts `begin`, and sends `scatter[bucket]` as the backward pass fills the bucket, or
has another thread send it after this has quantized it (`buckets.py`; it waits for that thread before it goes on). The
view's thread executes `serve`, one act after the other, because a wait on a frozen peer can't be woken. The two threads
share nothing else, so only the order within each thread has to be decided. The order is correct because:

- *The tag alone identifies a message.* Sender and receiver compute their messages independently from the same facts
  (view, lineage, number of shards, buckets): the k-th sum of a bucket from one to the other is that of the k-th node in
  `plan.shards.maximal` of the shards that the sender, or its host, holds, column by column. After a loss the survivors
  have other nodes, more or larger ones. The lineage names the losses and is equal on all workers, so the messages that
  are computed from it are equal too.
- *No message overwrites memory that is still needed.* A reduced slice (or piece) arrives in its own place. Before that,
  the first of the host's sums may be there: whoever sends the slice has received that sum, or a sum of the zone in
  which it is. Sums of the zone have memory of their own. The first sum of a bucket from other workers arrives where the
  bucket's sum will be, unless a sum of the host goes there. The others, and with several zones all from other hosts,
  arrive in landing buffers that `LANDINGS` buckets share in turn: the receives of bucket b + LANDINGS are posted only
  after b is added up within the host or the zone, or summed.
- *A slice (or piece) is sent on after it is summed*, and a commit message after every slice has arrived. The commit
  messages of the peers state the same for them (R1), so everything that this worker sent has arrived when it has all
  commit messages. So the next round may write to that memory; if peers use the memory in place, only after they have
  begun the next round (`shm_sums`). A forwarded commit message has the same content.
- *No circular wait.* All workers execute the phases in the same order, that of `serve`: first (b) of bucket b, then (d)
  of the bucket before, then (f) of the bucket before that, then (h) and (i) in the same way. So no host waits for
  another host's backward pass before it has added up the sums that it has. In each phase a worker sends before it waits
  for the messages of that phase. So no waiting worker waits for one that is in a later phase, and a worker in the first
  phase waits for a backward pass.

A loss. A worker that finds a peer lost reports it. Then the round never ends on this worker, and the reduced buckets
are garbage unless it has sent its commit message. The partial sums are unchanged, and the next view repeats the whole
round: every bucket is scattered again, the shards of the lost worker are redistributed, with the tags and buffers of
the new view (R3). So messages that are still pending in the old view meet only receives of the old view.

Releasing peers. A thread of the old view may wait for a message that a survivor has not sent, and only that message
ends the wait (see `transport`). So each survivor, as it leaves the view, sends the messages that its peers still wait
for (`unsent`), with any contents. It may do so only after every survivor has abandoned the view: then no worker takes
the contents for a result, because `Agreement.commit_message` refuses. A message that the view's thread was about to
send at that moment is sent twice; the second one has no receiver. That thread may continue long after, when the partial
sums are those of a later round. So it adds the tensors that were scattered, by reference, and its results are not used.
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
# The assignment of parts of a bucket to workers: first within each host, then between the hosts of a zone, then between
# zones (hierarchical reduction).
#
# A bucket is cut into *columns* (inter-host slices), as many as the largest number of workers on one host. Each host
# has one *host delegate* for each column: it adds up the column over the workers of its host, and exchanges
# the result with the delegates of the other hosts. So the traffic between hosts has the size of the sums, for any
# number of workers on a host. A worker exchanges with the workers of its host and with one on each other host; with
# several if the other host has more workers.
#
# In the same way a column is cut into *strips*, as many as the largest number of hosts in one zone, and each zone has
# one host that serves a strip: its delegate adds up the strip over the hosts of its zone, and exchanges the result with
# the delegates that serve the strip in the other zones. So a strip is cut once more, into one slice for each zone, and
# that zone's delegate computes the sum of the slice. So what goes from one zone to another has the size of one copy of
# the sums, for any number of hosts in a zone (with Z zones 2 (Z - 1) / Z copies leave a zone).
#
# If there is one zone, a strip is one slice. That also counts if each zone has one host: then the zones change nothing.
# If all workers are on one host, a column is one slice, and each worker owns one. If each worker has a host of its own,
# there is one column.
#
# A bucket of a view with host A (w1, w2) and host B (w3, w4): two columns of two slices.
#
#                       |--- column 0 ---|--- column 1 ---|
#     delegate of A     |       w1       |       w2       |
#     delegate of B     |       w3       |       w4       |
#     slice of host     |   A   |   B    |   A   |   B    |
#     its sum is by     |   w1  |   w3   |   w2  |   w4   |
#
#     (a, b)  w2 sends w1 its partial sums of column 0: w1 has host A's sums of both slices of column 0
#     (c, f)  w1 sends w3 host A's sums of slice B, and gets host B's of slice A: w1 has the sum of slice A of column 0
#     (h, i)  w1 and w3 exchange these two sums: w1 has column 0, and sends it to w2
#
# A bucket of a view with hosts A, B (w1, w2) in zone east and C, D (w3, w4) in zone west: two strips of two slices.
#
#                       |---- strip 0 ----|---- strip 1 ----|
#     served in east by |       w1        |       w2        |
#     served in west by |       w3        |       w4        |
#     slice of zone     |  east  |  west  |  east  |  west  |
#     its sum is by     |   w1   |   w3   |   w2   |   w4   |
#
#     (c, d)  w2 sends w1 its sums of strip 0: w1 has the sums of zone east of both slices of strip 0
#     (e, f)  w1 sends w3 those of slice west, and gets those of west of slice east: w1 has the sum of slice east
#     (g, h)  w1 and w3 exchange these two sums: w1 has strip 0, and sends it to w2


class Sliced(Protocol):
    """The part of a bucket's interface that the schedule needs."""

    def slice(self, part: int, parts: int) -> tuple[int, int]:
        """Returns part `part` of `parts` parts of similar size, as elements `[start, stop)`."""
        ...

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the elements `[start, stop)` of a slice, cut into at most `MOST_PIECES` contiguous pieces."""
        ...


@dataclass(frozen=True)
class Levels:
    """The columns, strips and delegates of a view.

    Attributes:
        hosts: the workers of each host in the order of their ranks. Hosts are in the order of their first worker.
        zones: the numbers of the hosts of each zone. Zones are in the order of their first host. There is one zone if
            each zone has only one host.
    """

    hosts: tuple[tuple[str, ...], ...]
    zones: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, view: View) -> Levels:
        hosts, zones = dict[str, list[str]](), dict[str, str]()
        host_of = view.hosts_of(view.members) or ("",) * view.size
        zone_of = view.zones_of(view.members) or ("",) * view.size
        for member, host, zone in zip(view.members, host_of, zone_of, strict=True):
            hosts.setdefault(host, []).append(member)
            zones.setdefault(host, zone)
        groups: dict[str, list[int]] = {}
        for number, host in enumerate(hosts):
            groups.setdefault(zones[host], []).append(number)
        grouped = len(groups) > 1 and len(groups) < len(hosts)
        return cls(
            tuple(map(tuple, hosts.values())),
            tuple(map(tuple, groups.values())) if grouped else (tuple(range(len(hosts))),),
        )

    @functools.cached_property
    def columns(self) -> int:
        return max(map(len, self.hosts))

    @functools.cached_property
    def strips(self) -> int:
        """The strips of each column."""
        return max(map(len, self.zones))

    @functools.cached_property
    def _host(self) -> dict[str, int]:
        return {worker: number for number, workers in enumerate(self.hosts) for worker in workers}

    @functools.cached_property
    def _zone(self) -> dict[int, int]:
        return {host: number for number, hosts in enumerate(self.zones) for host in hosts}

    def host(self, worker: str) -> int:
        return self._host[worker]

    def zone(self, worker: str) -> int:
        return self._zone[self._host[worker]]

    def near(self, worker: str) -> tuple[str, ...]:
        """The other workers of its host."""
        return tuple(other for other in self.hosts[self.host(worker)] if other != worker)

    def delegate(self, host: int, column: int) -> str:
        """The worker that serves `column` for `host`."""
        workers = self.hosts[host]
        return workers[column * len(workers) // self.columns]

    def served(self, worker: str) -> range:
        """The columns of which a worker is its host's delegate: at least one, and contiguous."""
        workers = self.hosts[self.host(worker)]
        return _even(workers.index(worker), len(workers), self.columns)

    def shared(self, worker: str, other: str) -> range:
        """The columns that both workers serve, each for its own host."""
        return _both(self.served(worker), self.served(other))

    def strips_served(self, worker: str) -> range:
        """The strips that the host of a worker serves in its zone: at least one, and contiguous."""
        host = self.host(worker)
        hosts = self.zones[self._zone[host]]
        return _even(hosts.index(host), len(hosts), self.strips)

    def strips_shared(self, worker: str, other: str) -> range:
        """The strips that the hosts of both workers serve, each in its own zone."""
        return _both(self.strips_served(worker), self.strips_served(other))

    def slice(self, bucket: Sliced, column: int, strip: int, zone: int) -> tuple[int, int]:
        """The elements `[start, stop)` of a bucket that are one slice: a zone's part of a strip of a column."""
        zones = len(self.zones)
        return bucket.slice((column * self.strips + strip) * zones + zone, self.columns * self.strips * zones)

    def strips_of(self, bucket: Sliced, column: int, worker: str) -> tuple[int, int]:
        """The elements `[start, stop)` of a column that are the strips that the host of a worker serves."""
        strips = self.strips_served(worker)
        last = len(self.zones) - 1
        return self.slice(bucket, column, strips[0], 0)[0], self.slice(bucket, column, strips[-1], last)[1]

    def slices(self, bucket: Sliced, worker: str) -> list[tuple[int, int]]:
        """The slices whose sums a worker computes for all workers."""
        zone = self.zone(worker)
        cuts = product(self.served(worker), self.strips_served(worker))
        return [self.slice(bucket, column, strip, zone) for column, strip in cuts]

    def stretch(self, bucket: Sliced, worker: str) -> tuple[int, int]:
        """The elements `[start, stop)` of all columns that a worker serves."""
        served, strip, zone = self.served(worker), self.strips - 1, len(self.zones) - 1
        return self.slice(bucket, served[0], 0, 0)[0], self.slice(bucket, served[-1], strip, zone)[1]


def _even(part: int, parts: int, total: int) -> range:
    """Part `part` of `parts` contiguous parts of `range(total)`; none is empty if there are at most `total`."""
    return range(-(-part * total // parts), -(-(part + 1) * total // parts))


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


# --- tags -------------------------------------------------------------------------------------------------------------
#
# The tags of messages. A tag distinguishes the messages between the same two workers.
#
# A tag has 31 bits, because Gloo's tag is a C int:
#
#     purpose 1   a training step, or anything else
#     view    9   modulo 512
#     round   2   modulo 4
#     kind    2   partial sum, reduced slice, commit message, state
#     bucket  8
#     node    9   the index of the sum among its sender's partial sums
#
# The last three fields, the *place*, are the same in every round. The first three, those of the *round*, are added.
#
# If a message and its receive differ in size, Gloo ends the process. So their tags must differ if their sizes may
# differ: `protocol/coordinator/view_changes.py` explains the need for the purpose. Within a view rounds go in lockstep,
# at most one apart, so two bits are enough.
#
# A view that reuses the connections of an earlier view (R3) may leave receives in them that nothing ends. A message of
# a later view with the same tag would match such a receive. So the connections are renewed, ahead of the switch, when
# they have served half of the 512 view numbers (`protocol/coordinator/view_changes.py`); the coordinator retries that
# while it uses the other half. No view uses connections that have served all 512 numbers: `of_round` refuses.

# Kinds.
PARTIAL, REDUCED, COMMIT, STATE = range(4)
# Purposes of a round: a training step (or the wait for one), or anything else.
TRAINING, OTHER = range(2)
VIEWS = 512  # view numbers that the tags of one group can distinguish
ROUNDS = 4
MOST_BUCKETS = 256  # of a layout, which makes larger buckets instead of more
MOST_SUMS = 512  # of a worker in a round: a contiguous range of shards has at most 62, each loss in a step adds some
MOST_PIECES = 4  # of a slice


def place(kind: int, bucket: int = 0, node: int = 0) -> int:
    """Returns the part of a message's tag that is the same in every round."""
    assert bucket < MOST_BUCKETS, f"bucket {bucket}: at most {MOST_BUCKETS} buckets"
    assert node < MOST_SUMS, f"node {node}: at most {MOST_SUMS} partial sums a worker"
    return kind << 17 | bucket << 9 | node


def kind_of(tag: int) -> int:
    """Returns the kind of the message with this tag."""
    return tag >> 17 & 3


def of_round(view: View, round_: int, purpose: int = TRAINING) -> int:
    """Returns the part of the tag that all messages of one round have in common.

    Raises:
        ProtocolError: the group of this view has used all its view numbers.
    """
    if view.number - view.group >= VIEWS:
        raise ProtocolError(
            f"view {view.number} would use the connections of view {view.group}, which can serve only {VIEWS} views, "
            f"and all attempts to renew them failed: check the network between the workers, then resume the run"
        )
    return purpose << 30 | view.number % VIEWS << 21 | round_ % ROUNDS << 19


# --- routes -----------------------------------------------------------------------------------------------------------
#
# All messages of a round's exchange that one worker sends or receives, by the phases at the top of this file.
#
# Sender and receiver compute each message from the same facts, in the same order, so that the k-th message of a kind
# and bucket from one to the other has the same tag on both sides.


@dataclass(frozen=True, slots=True)
class ExchangeMessage:
    """One message, to or from `peer`.

    Attributes:
        place: the part of its tag that is the same in every round, see `place`.
        bucket, start, stop: the elements of a bucket that it carries; all 0 for a commit message.
        node: for a partial sum, the node in the tree over shards whose sum it is.
        landing: for a received partial sum, the number of its receive buffer; 0 is the slice's own place.
        whose: for a commit message, the worker that made it.
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
    """The messages of `worker` in `view`. `held` maps each worker to the shards that it has sums of.

    Attributes:
        own: the nodes whose sums this worker has; `nodes_of_host`, `nodes_of_zone`: those whose sums its host and its
            zone have.
        near: the other workers of its host.
        far: the workers of other hosts of its zone with whom it exchanges.
        beyond: the workers of other zones with whom it exchanges.
        one_host: True if all workers are on one host. `one_zone`: True if all hosts are in one zone.
        sums_for_host: True if this worker adds up the sums of its host, to send them to other hosts.
        all_begun: True if all workers are on one host and each has partial sums. Then a worker that has received
            those of all others knows that all have begun the round.
        behind: how many buckets a phase is behind the phase before it.
        most: the largest number of sums of one bucket that one worker sends to another, anywhere in the view.
        in_pieces: True if slices are sent in pieces: between the hosts of one zone, unless the sums of a bucket are so
            many that tags can't number the pieces.
    """

    def __init__(
        self, view: View, worker: str, buckets: Sequence[Sliced], shards: int, held: Mapping[str, Sequence[int]]
    ) -> None:
        self._worker, self._buckets = worker, buckets
        self._levels = levels = Levels.of(view)
        self.near = levels.near(worker)
        self._host = levels.host(worker)
        self._zone = levels.zone(worker)
        others = (member for member in view.members if levels.host(member) != self._host)
        self._others = tuple(member for member in others if levels.shared(worker, member))
        self.far = tuple(member for member in self._others if levels.zone(member) == self._zone)
        self.beyond = tuple(
            member
            for member in self._others
            if levels.zone(member) != self._zone and levels.strips_shared(worker, member)
        )
        self._nodes = {member: maximal(held.get(member, ()), shards) for member in view.members}
        of_hosts = [[shard for w in workers for shard in held.get(w, ())] for workers in levels.hosts]
        of_zones = [[shard for host in hosts for shard in of_hosts[host]] for hosts in levels.zones]
        self._of_hosts = [maximal(shards_of_host, shards) for shards_of_host in of_hosts]
        self._of_zones = [maximal(shards_of_zone, shards) for shards_of_zone in of_zones]
        self.own = self._nodes[worker]
        self.nodes_of_host, self.nodes_of_zone = self._of_hosts[self._host], self._of_zones[self._zone]
        self.one_host, self.one_zone = len(levels.hosts) == 1, len(levels.zones) == 1
        self.sums_for_host = bool(self.near) and not self.one_host
        self.all_begun = self.one_host and all(self._nodes.values())
        self.behind = int(not self.one_host and (levels.columns > 1 or not self.one_zone))
        columns = 0 if self.one_host else -(-levels.columns // min(map(len, levels.hosts)))  # most that two share
        strips = 0 if self.one_zone else -(-levels.strips // min(map(len, levels.zones)))
        most_of_hosts, most_of_zones = max(map(len, self._of_hosts)), max(map(len, self._of_zones))
        self.most = max(*map(len, self._nodes.values()), columns * max(most_of_hosts, strips * most_of_zones))
        self.in_pieces = self.one_zone and not self.one_host and self.most * MOST_PIECES <= MOST_SUMS

    def stretch(self, bucket: int) -> tuple[int, int]:
        """The elements `[start, stop)` that this worker adds up for its host."""
        return self._levels.stretch(self._buckets[bucket], self._worker)

    def strips(self, bucket: int) -> list[tuple[int, int]]:
        """The elements `[start, stop)` that this worker adds up for its zone, one for each column that it serves."""
        return [self._strips_of(bucket, column, self._worker) for column in self._levels.served(self._worker)]

    def slices(self, bucket: int) -> list[tuple[int, int]]:
        """The slices, or pieces of slices, whose sums this worker computes for all workers."""
        slices = self._levels.slices(self._buckets[bucket], self._worker)
        return [*dict.fromkeys(piece for cut in slices for piece in self._pieces(bucket, cut))]  # several may be empty

    def portions(self, bucket: int) -> list[list[tuple[int, int]]]:
        """Those of `slices` that are added and sent together: each piece by itself if slices are cut, else all."""
        cuts = self.slices(bucket)
        is_cut = any(cut not in cuts for cut in self._levels.slices(self._buckets[bucket], self._worker))
        return [[cut] for cut in cuts] if is_cut else [cuts]

    # --- partial sums --------------------------------------------------------------------------------------------

    def scattered(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (a) with this worker's own sums."""
        if not self.near:
            return self._across(bucket) if self.far else self._out_of_zone(bucket)
        return tuple(
            ExchangeMessage(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self._stretch_of(bucket, peer), node)
            for k, node in enumerate(self.own)
            for peer in self.near
        )

    def partials_of_host(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (a) from the others of this host.

        If the host's sums are sent to other hosts, the first of those takes the bucket's own place, landing 0.
        """
        landing = count(0 if self.one_host else 1)
        return tuple(
            ExchangeMessage(
                PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self.stretch(bucket), node, next(landing)
            )
            for peer in self.near
            for k, node in enumerate(self._nodes[peer])
        )

    def across(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (c): the sums of this host, to those who serve the strips in its zone; none if this worker is
        alone on its host, because `scattered` sends them then.
        """
        return self._across(bucket) if self.near else ()

    def sums_of_hosts(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (c) from the other hosts of its zone."""
        messages: list[ExchangeMessage] = []
        landing = count(1 + len(self.partials_of_host(bucket)))
        in_place = not self.near and self.one_zone
        first = set(self.slices(bucket)) if in_place else set[tuple[int, int]]()
        for peer in self.far:
            for k, node, cut in self._between(bucket, peer, self._worker):
                where = 0 if cut in first else next(landing)
                first.discard(cut)
                messages.append(ExchangeMessage(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut, node, where))
        return tuple(messages)

    def out_of_zone(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (e): the sums of this zone, to the owners of the slices; none if this worker is alone in its
        zone, because `scattered` sends them then.
        """
        return self._out_of_zone(bucket) if self.near or self.far else ()

    def sums_of_zones(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (e) from the other zones."""
        landing = count(1 + len(self.partials_of_host(bucket)) + len(self.sums_of_hosts(bucket)))
        return tuple(
            ExchangeMessage(
                PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self._slice(bucket, column, strip, self._worker),
                node, next(landing),
            )
            for peer in self.beyond
            for k, node, column, strip in self._between_zones(peer, peer)
        )  # fmt: skip

    def _across(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        messages = [
            ExchangeMessage(PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *cut, node)
            for peer in self.far
            for k, node, cut in self._between(bucket, self._worker, peer)
        ]
        return tuple(sorted(messages, key=lambda message: self.nodes_of_host.index(message.node)))

    def _out_of_zone(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        messages = [
            ExchangeMessage(
                PARTIAL, peer, place(PARTIAL, bucket, k), bucket, *self._slice(bucket, column, strip, peer), node
            )
            for peer in self.beyond
            for k, node, column, strip in self._between_zones(self._worker, peer)
        ]
        return tuple(sorted(messages, key=lambda message: self.nodes_of_zone.index(message.node)))

    def _between(self, bucket: int, sender: str, receiver: str) -> Iterator[tuple[int, Node, tuple[int, int]]]:
        """The sums that this worker sends a peer, or gets from it: (number, node of the sender's host, elements)."""
        cuts = self._cuts(bucket, sender, receiver)
        sums = product(self._of_hosts[self._levels.host(sender)], cuts)
        return ((number, node, cut) for number, (node, cut) in enumerate(sums))

    def _cuts(self, bucket: int, sender: str, receiver: str) -> list[tuple[int, int]]:
        """The pieces of the strips that `receiver` serves, of the columns that both serve."""
        columns = self._levels.shared(sender, receiver)
        return [cut for c in columns for cut in self._pieces(bucket, self._strips_of(bucket, c, receiver))]

    def _between_zones(self, sender: str, peer: str) -> Iterator[tuple[int, Node, int, int]]:
        """The sums that `sender`, either this worker or `peer`, sends the other: (number, node of its zone, column,
        strip).
        """
        levels = self._levels
        columns, strips = levels.shared(self._worker, peer), levels.strips_shared(self._worker, peer)
        sums = product(self._of_zones[levels.zone(sender)], columns, strips)
        return ((number, node, column, strip) for number, (node, column, strip) in enumerate(sums))

    # --- sums ----------------------------------------------------------------------------------------------------

    def to_share(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (g): this worker's slices, to those who serve the strips in the other zones."""
        return self._shared(bucket, own=True)

    def shared(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (g) from the other zones."""
        return self._shared(bucket, own=False)

    def to_spread(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (h): this worker's strips, to the delegates of the other hosts of its zone."""
        return self._spread(bucket, own=True)

    def spread(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (h) from the delegates of the other hosts of its zone."""
        return self._spread(bucket, own=False)

    def to_gather(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (i): all columns that this worker serves, to every worker of its host."""
        cut = self.stretch(bucket)
        return tuple(ExchangeMessage(REDUCED, peer, place(REDUCED, bucket), bucket, *cut) for peer in self.near)

    def gathered(self, bucket: int) -> tuple[ExchangeMessage, ...]:
        """The messages (i) from the workers of its host: the columns that they serve."""
        return tuple(
            ExchangeMessage(REDUCED, peer, place(REDUCED, bucket), bucket, *self._stretch_of(bucket, peer))
            for peer in self.near
        )

    def _shared(self, bucket: int, *, own: bool) -> tuple[ExchangeMessage, ...]:
        levels = self._levels
        return tuple(
            ExchangeMessage(
                REDUCED, peer, place(REDUCED, bucket, k), bucket,
                *self._slice(bucket, column, strip, self._worker if own else peer),
            )
            for peer in self.beyond
            for k, (column, strip) in enumerate(
                product(levels.shared(self._worker, peer), levels.strips_shared(self._worker, peer))
            )
        )  # fmt: skip

    def _spread(self, bucket: int, *, own: bool) -> tuple[ExchangeMessage, ...]:
        return tuple(
            ExchangeMessage(REDUCED, peer, place(REDUCED, bucket, k), bucket, *cut)
            for peer in self.far
            for k, cut in enumerate(self._cuts(bucket, *((peer, self._worker) if own else (self._worker, peer))))
        )

    # --- commit messages -----------------------------------------------------------------------------------------

    def own_commits(self) -> tuple[ExchangeMessage, ...]:
        """This worker's commit message: to its host, and to one worker of each other host."""
        return tuple(
            _commit_message(peer, self._worker)
            for peer in (*self.near, *self._others)
            if self._sends_to(self._worker, peer)
        )

    def commit_messages(self) -> tuple[ExchangeMessage, ...]:
        """The commit messages of its host, and those that it receives from other hosts on behalf of its host."""
        return tuple(_commit_message(peer, peer) for peer in (*self.near, *self._senders(self._worker)))

    def to_forward(self) -> tuple[ExchangeMessage, ...]:
        """The commit messages from other hosts that this worker forwards to its host."""
        return tuple(
            _commit_message(peer, whose, number)
            for number, whose in enumerate(self._senders(self._worker), start=1)
            for peer in self.near
        )

    def forwarded(self) -> tuple[ExchangeMessage, ...]:
        """The commit messages from other hosts that the others of its host forward."""
        return tuple(
            _commit_message(peer, whose, number)
            for peer in self.near
            for number, whose in enumerate(self._senders(peer), start=1)
        )

    def _sends_to(self, worker: str, peer: str) -> bool:
        """Returns True if `worker` sends `peer` its commit message: to its host and its first delegates."""
        host = self._levels.host(peer)
        return host == self._levels.host(worker) or self._levels.delegate(host, self._levels.served(worker)[0]) == peer

    def _senders(self, worker: str) -> list[str]:
        """The workers of other hosts that send their commit message to this `worker` of this host."""
        elsewhere = (
            other for workers in self._levels.hosts for other in workers if other not in self._levels.hosts[self._host]
        )
        return [other for other in elsewhere if self._sends_to(other, worker)]

    # --- cuts ----------------------------------------------------------------------------------------------------

    def _slice(self, bucket: int, column: int, strip: int, owner: str) -> tuple[int, int]:
        """The slice of a strip whose sum the zone of `owner` computes."""
        return self._levels.slice(self._buckets[bucket], column, strip, self._levels.zone(owner))

    def _pieces(self, bucket: int, cut: tuple[int, int]) -> list[tuple[int, int]]:
        return self._buckets[bucket].pieces(*cut) if self.in_pieces else [cut]

    def _strips_of(self, bucket: int, column: int, worker: str) -> tuple[int, int]:
        return self._levels.strips_of(self._buckets[bucket], column, worker)

    def _stretch_of(self, bucket: int, peer: str) -> tuple[int, int]:
        return self._levels.stretch(self._buckets[bucket], peer)


def _commit_message(peer: str, whose: str, number: int = 0) -> ExchangeMessage:
    return ExchangeMessage(COMMIT, peer, place(COMMIT, 0, number), whose=whose)


# --- order ------------------------------------------------------------------------------------------------------------

LANDINGS = 2  # buckets whose partial sums may be arriving at a time: bounds the memory for them


# --- the acts of the view's thread ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until this worker has scattered `bucket`."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Take:
    """Wait until these messages have arrived."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class HostSum:
    """Compute the host's sums of the elements `[start, stop)` of `bucket`, for these `nodes`.

    They are made from this worker's own sums and the messages in `taken`.
    """

    bucket: int
    start: int
    stop: int
    nodes: tuple[Node, ...]
    taken: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class ZoneSum:
    """Compute the zone's sums of the elements `[start, stop)` of `bucket`, for these `nodes`.

    They are made from the sums that this worker or its host has, and the messages in `taken`.
    """

    bucket: int
    start: int
    stop: int
    nodes: tuple[Node, ...]
    taken: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Compute the sum of the slice `[start, stop)` of `bucket`.

    It is made from the sums that this worker, its host or its zone has, and the messages in `taken`.
    """

    bucket: int
    start: int
    stop: int
    taken: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class PostReceives:
    """Post the receives of these messages."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class SendMessages:
    """Send these messages."""

    messages: tuple[ExchangeMessage, ...]


@dataclass(frozen=True, slots=True)
class MakeCommitMessage:
    """This worker holds every reduced bucket: make its commit message, which the next act sends."""


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """All commit messages have arrived."""


Act = Await | Take | HostSum | ZoneSum | Add | PostReceives | SendMessages | MakeCommitMessage | RoundEnd


@dataclass(frozen=True, kw_only=True)
class ExchangeOrder:
    """The order of one round's exchange at one worker; see the docstring of the module.

    Attributes:
        begin: receives that are posted as the round begins.
        scatter: for each bucket, the messages that are sent when all of this worker's shards are in it.
        serve: the acts that follow, in this order.
        mine: the number of this worker's shards.
        own: the nodes whose sums it holds.
        all_begun, in_pieces: see `Routes`.
    """

    shards: int
    mine: int
    own: tuple[Node, ...]
    all_begun: bool
    in_pieces: bool
    begin: tuple[ExchangeMessage, ...]
    scatter: tuple[tuple[ExchangeMessage, ...], ...]
    serve: tuple[Act, ...]

    @property
    def arrivals(self) -> Iterable[ExchangeMessage]:
        """All messages that are received."""
        yield from self.begin
        for act in self.serve:
            if isinstance(act, PostReceives):
                yield from act.messages

    def unsent(self, scattered: Sequence[bool], served: int) -> Iterable[ExchangeMessage]:
        """The messages that are not sent yet, given the buckets' `scattered` flags and the number of acts `served`."""
        for bucket, messages in enumerate(self.scatter):
            if not scattered[bucket]:
                yield from messages
        for act in self.serve[served:]:
            if isinstance(act, SendMessages):
                yield from act.messages


def order(view: View, worker: str, buckets: Sequence[Sliced], shards: int, lineage: Lineage) -> ExchangeOrder:
    """Returns the order of a round of `shards` shards, assigned by `lineage`, at `worker` in `view`.

    Raises:
        UsageError: after many losses, one worker sends another more partial sums than a tag can number.
    """
    held = lineage.assign(shards) if shards else {}
    routes = Routes(view, worker, buckets, shards, held)
    if routes.most > MOST_SUMS:
        raise UsageError(
            f"after {len(lineage.sets) - 1} losses in one step of {shards:,} micro-batches one worker must send "
            f"another {routes.most} partial sums, and the limit is {MOST_SUMS}: use larger micro-batches (micro=)"
        )
    numbers = range(len(buckets))
    near = [routes.partials_of_host(bucket) for bucket in numbers]
    across = [routes.sums_of_hosts(bucket) for bucket in numbers]
    of_zones = [routes.sums_of_zones(bucket) for bucket in numbers]
    shared = [routes.shared(bucket) for bucket in numbers]
    spread = [routes.spread(bucket) for bucket in numbers]
    gathered = [routes.gathered(bucket) for bucket in numbers]
    commits, passed_on = routes.commit_messages(), routes.forwarded()

    def host_sum(bucket: int) -> Iterable[Act]:
        yield Await(bucket)
        if routes.sums_for_host:
            yield Take(near[bucket])
            yield HostSum(bucket, *routes.stretch(bucket), routes.nodes_of_host, near[bucket])
            yield from _next(near, bucket)
            yield SendMessages(routes.across(bucket))

    def zone_sum(bucket: int) -> Iterable[Act]:
        if routes.far:
            yield Take(across[bucket])
            for cut in routes.strips(bucket):
                yield ZoneSum(bucket, *cut, routes.nodes_of_zone, _of_cuts(across[bucket], [cut]))
            yield from _next(across, bucket)
        yield SendMessages(routes.out_of_zone(bucket))

    def sum_(bucket: int) -> Iterable[Act]:
        arrivals = near if routes.one_host else across if routes.one_zone else of_zones
        results = routes.to_spread(bucket) if routes.one_zone else routes.to_share(bucket)
        portions = routes.portions(bucket)
        for number, cuts in enumerate(portions, start=1):
            taken = _of_cuts(arrivals[bucket], cuts)
            yield Take(taken)
            for cut in cuts:
                yield Add(bucket, *cut, _of_cuts(taken, [cut]))
            if number == len(portions):
                yield from _next(arrivals, bucket)
            yield SendMessages(_of_cuts(results, cuts))

    def spread_in_zone(bucket: int) -> Iterable[Act]:
        if routes.far:
            yield Take(shared[bucket])
            yield SendMessages(routes.to_spread(bucket))

    def pass_on(bucket: int) -> Iterable[Act]:
        if routes.near:
            yield Take(spread[bucket] if routes.far else shared[bucket])
            yield SendMessages(routes.to_gather(bucket))

    phases = (host_sum, sum_, pass_on) if routes.one_zone else (host_sum, zone_sum, sum_, spread_in_zone, pass_on)
    serve: list[Act] = []
    for number in range(len(buckets) + (len(phases) - 1) * routes.behind):
        for late, phase in enumerate(phases):
            if 0 <= number - late * routes.behind < len(buckets):
                serve += phase(number - late * routes.behind)
    serve += [*map(Take, gathered if routes.near else spread if routes.far else shared)]
    serve += [MakeCommitMessage(), SendMessages(routes.own_commits()), Take(commits)]
    serve += [SendMessages(routes.to_forward()), Take(passed_on), RoundEnd()]
    arriving = (*near[:LANDINGS], *across[:LANDINGS], *of_zones[:LANDINGS])
    posted = (*arriving, *shared, *spread, *gathered, commits, passed_on)
    return ExchangeOrder(
        shards=shards,
        mine=len(held.get(worker, ())),
        own=routes.own,
        all_begun=routes.all_begun,
        in_pieces=routes.in_pieces,
        begin=tuple(message for messages in posted for message in messages),
        scatter=tuple(routes.scattered(bucket) for bucket in numbers),
        serve=tuple(act for act in serve if not isinstance(act, Take | PostReceives | SendMessages) or act.messages),
    )


def _of_cuts(messages: Iterable[ExchangeMessage], cuts: Sequence[tuple[int, int]]) -> tuple[ExchangeMessage, ...]:
    return tuple(message for message in messages if (message.start, message.stop) in cuts)


def _next(arrivals: Sequence[tuple[ExchangeMessage, ...]], bucket: int) -> Iterable[PostReceives]:
    """The receives that reuse the landing buffers of `bucket`; see the docstring of the module."""
    if bucket + LANDINGS < len(arrivals):
        yield PostReceives(arrivals[bucket + LANDINGS])
