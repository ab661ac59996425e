"""The data that `farandole check` and its processes exchange: the terms, in the environment, and records, in files.

A *leg* is one process or one run of the check. All legs run the unchanged script, and leave its loop after a few steps.

    alone     a single process. It writes a checkpoint at the beginning of step `JOIN`
    workers   a run: some workers in step 0, one more from step `JOIN` on, and rank 0 is killed in step `LOSS`
    resume    a single process, which begins with that checkpoint
    whole     a single process: one step of one micro-batch
    parts     the same samples in several micro-batches
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from farandole.platform import files

VARIABLE = "FARANDOLE_CHECK"  # the terms, in a process's environment
STEPS, JOIN, LOSS = 3, 1, 2  # the number of steps, and the steps in which a worker joins and one is killed
RUN = "run"  # the folder of the leg `alone`, with its checkpoint
DATASET = "dataset"  # the name of the loader's dataset in the script's state
Leg = Literal["alone", "workers", "resume", "whole", "parts"]
Kind = Literal["generator", "object", "tensor", "value"]
Leaves = dict[str, tuple[Kind, str]]  # state of the script that is not replicated, by name: its kind and its digest


class CheckTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one process. `workers`: how many begin step 0. `folder`: for all records, and the checkpoint."""

    leg: Leg
    workers: int
    folder: str


class StateRecord(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The replicated state of `worker` at the beginning of `step`, as digests by name; `script`: other state."""

    worker: str
    step: int
    digests: dict[str, int]
    script: Leaves = {}


class ComputedShard(msgspec.Struct, frozen=True, kw_only=True, tag="shard"):
    """What `worker` has computed for a shard in one pass over its batch, as digests by name in their order.

    `script`: the script's own state as the micro-batch was handed to the script.
    """

    worker: str
    step: int
    shard: int
    over: int = 0  # the pass over the step's batch
    names: tuple[str, ...] = ()
    digests: tuple[int, ...] = ()
    script: Leaves = {}


class MicroBatchRecord(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """One micro-batch of the legs `whole` and `parts`. Its gradient is in a file, `gradient_path`.

    `weight`: as the script gives it, None if it gives none. `draws`: the script has drawn random numbers.
    """

    shard: int
    samples: int
    weight: float | None
    loss: float
    draws: bool


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, tag="facts"):
    """The names of the model's modules of batch normalization."""

    batch_norms: tuple[str, ...] = ()


Record = StateRecord | ComputedShard | MicroBatchRecord | ModelFacts
_decoder = msgspec.json.Decoder(StateRecord | ComputedShard | MicroBatchRecord | ModelFacts)


def terms_of(text: str) -> CheckTerms:
    """Return the terms from the environment variable's `text`."""
    return msgspec.json.decode(text, type=CheckTerms)


def environment(terms: CheckTerms) -> dict[str, str]:
    return {VARIABLE: msgspec.json.encode(terms).decode()}


def gradient_path(folder: Path, leg: Leg, shard: int) -> Path:
    return folder / f"{leg}-{shard}.npz"


class Records:
    """The records of this process, in a file that is complete after each `write`."""

    def __init__(self, terms: CheckTerms) -> None:
        self._file = files.append(Path(terms.folder, f"{terms.leg}-{os.getpid()}.jsonl"))

    def write(self, record: Record) -> None:
        files.add(self._file, msgspec.json.encode(record) + b"\n")


def read(folder: Path, leg: Leg) -> list[Record]:
    """Return the complete records of a leg so far."""
    lines = (line for path in sorted(folder.glob(f"{leg}-*.jsonl")) for line in path.read_bytes().split(b"\n")[:-1])
    return [_decoder.decode(line) for line in lines]


def states(records: Iterable[Record]) -> Iterator[StateRecord]:
    return (record for record in records if isinstance(record, StateRecord))


def shards(records: Iterable[Record]) -> Iterator[ComputedShard]:
    return (record for record in records if isinstance(record, ComputedShard))
