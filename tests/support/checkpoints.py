"""Small checkpoints, written as a run writes them."""

from __future__ import annotations

from typing import Any

import torch

from farandole.checkpoint import content
from farandole.checkpoint.content import in_place
from farandole.checkpoint.store import Manifest, Sealing, Sink, Store
from farandole.plan.shards import Position

FACTS = (("torch version", "1"), ("samples in the data", "9"), ("parameter model.weight", "[2] float32"))


def state(value: float) -> dict[str, Any]:
    model = {"weight": torch.full((300, 50), value), "steps": torch.tensor(7)}
    return {"objects": {"model": model}, "buffers": [model["steps"]], "requires_grad": [True], "origin": "o"}


def manifest(step: int, *, whole: bool = True, run: str = "") -> Manifest:
    return Manifest(
        epoch=1, offset=4, step=step, whole=whole, run="r", run_id=run, worker="w1", seed=3, facts=FACTS, time=0.0
    )  # fmt: skip


def save(
    store: Store, step: int, *, keep: int = 9, whole: bool = True, value: float | None = None, run: str = ""
) -> str:
    """`run`: the identity of the one that writes it, "" for one of an earlier version."""
    described = manifest(step, whole=whole, run=run)
    held = in_place(state(step if value is None else value))

    def produce(sink: Sink) -> bytes:
        sealing = Sealing(sink)
        content.save(held, Position(epoch=1, offset=4, step=step), sealing)
        return sealing.seal(described)

    stem = store.name(described)
    store.write(stem, produce, keep)
    return stem


def steps(store: Store) -> list[int]:
    return [entry.step for entry in store.entries()]
