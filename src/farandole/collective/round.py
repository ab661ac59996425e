"""What one worker knows of one round's exchange: its order, and how far it is."""

from __future__ import annotations

import time

import torch

from farandole.collective.order import Order
from farandole.collective.partials import Partials
from farandole.collective.routes import Message
from farandole.collective.tags import WORD
from farandole.collective.transport import Borrowing, Pending, Room
from farandole.numerics import settings
from farandole.plan.shards import Node


class Round:
    """One round's exchange. `tag`: what all tags of its messages have in common. `trains`: it is a training step's.

    Attributes:
        scattered: the buckets that all have been sent this worker's partial sums of; set by the training thread.
        held: for each bucket, the sums that this worker has: its own partial sums, in the memory of the training
            thread's `Partials`; then those of its host. With each the element of the bucket with which it begins.
        served: how many acts of the order are done; set by the view's thread.
        received: what is on its way here, by sender and place, and where it may land.
        here: where it lies, once it is here.
        flushes: whether the training thread, which makes this, takes denormal numbers for zero; as of when it last
            handed something in, since the script may alter that in the loop's body.
        sent: what is on its way to others, which may read it for as long as the round lasts.
        words: by who says them; this worker's own, once it has given it.
    """

    def __init__(self, number: int, order: Order, partials: Partials, tag: int, *, trains: bool) -> None:
        self.number = number
        self.trains = trains
        self.order = order
        self.partials = partials
        self.layout = partials.layout
        self.tag = tag
        self.begun_at = time.monotonic()
        self.flushes = settings.flushes()
        self.scattered = [False] * len(self.layout.buckets)
        self.held: list[dict[Node, tuple[int, torch.Tensor]]] = [{} for _ in self.layout.buckets]
        self.served = 0
        self.received: dict[tuple[str, int], tuple[Borrowing, Room]] = {}
        self.here: dict[tuple[str, int], torch.Tensor] = {}
        self.sent: list[Pending] = []
        self.words: dict[str, torch.Tensor] = {}
        self.ended = False

    def take(self, message: Message) -> torch.Tensor:
        """Blocks until a message is here. Returns where it lies.

        Raises:
            PeerLost: it never will be.
        """
        borrowing, _ = self.received[message.peer, message.place]
        self.here[message.peer, message.place] = there = borrowing.wait()
        if message.kind == WORD:
            self.words[message.whose] = there
        return there

    def landed(self, message: Message) -> bool:
        """Whether a message that is here lies in this worker's memory for it, not in its sender's."""
        key = message.peer, message.place
        return self.received[key][1].holds(self.here[key])

    def sum_held(self, node: Node, bucket: int, start: int, stop: int) -> torch.Tensor:
        """That part of a sum that this worker has."""
        begins, flat = self.held[bucket][node]
        return flat[start - begins : stop - begins]
