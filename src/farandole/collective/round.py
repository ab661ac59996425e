"""What one worker knows of one round's exchange: who contributes what, what has been sent, what is still to come."""

from __future__ import annotations

import time

import torch

from farandole.collective.buckets import Partials
from farandole.collective.transport import MOST_SUMS, TRAINING, Pending
from farandole.errors import UsageError
from farandole.membership.view import Lineage
from farandole.plan.tree import Node, maximal


class Round:
    """One round's exchange: what is sent, received and owed."""

    def __init__(
        self, number: int, worker: str, partials: Partials, shards: int, lineage: Lineage, purpose: int = TRAINING
    ) -> None:
        self.number = number
        self.purpose = purpose
        self.partials = partials
        self.layout = partials.layout
        self.shards = shards
        held = lineage.assign(shards) if shards else {}
        self.nodes: dict[str, tuple[Node, ...]] = {w: maximal(mine, shards) for w, mine in held.items()}
        for holder, nodes in self.nodes.items():
            if len(nodes) > MOST_SUMS:
                raise UsageError(
                    f"after {len(lineage.sets) - 1} losses within one step of {shards:,} shards {holder} has "
                    f"{len(nodes)} partial sums of them, at most {MOST_SUMS} can be exchanged: use larger "
                    f"micro-batches (micro=)"
                )
        self.mine = len(held.get(worker, ()))
        self.begun_at = time.monotonic()
        self.ready = [False] * len(self.layout.buckets)
        self.scattered = [False] * len(self.layout.buckets)
        self.gathered = [False] * len(self.layout.buckets)
        self.worded = False
        self.ended = False
        self.arrivals: list[list[tuple[Node, torch.Tensor, str, Pending]]] = [[] for _ in self.layout.buckets]
        self.slices: list[tuple[str, Pending]] = []
        self.words: list[tuple[str, torch.Tensor, Pending]] = []
        self.sent: list[Pending] = []
