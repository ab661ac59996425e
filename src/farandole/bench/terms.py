"""The data that `farandole bench` and its workers exchange: the terms, in the environment of the workers, and their
measurements, as hidden lines of each worker's log, which comes to the run's folder from any host.

A round has a block of steps for each contestant. The order rotates, so that each round starts with another contestant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from farandole.control.run_folder import HIDDEN_LOG_PREFIX, LOGS
from farandole.errors import UsageError
from farandole.platform import files

VARIABLE = "FARANDOLE_BENCH"  # the terms, in a worker's environment
PREFIX = f"{HIDDEN_LOG_PREFIX}bench: ".encode()
STDOUT = 1
ALONE, FARANDOLE, DDP = "alone", "farandole", "ddp"
CONTESTANTS = (ALONE, FARANDOLE, DDP)
Mode = Literal["strong", "weak"]  # scaling with a constant global batch, and with a constant batch of each worker
MODES: tuple[Mode, ...] = ("strong", "weak")


class BenchTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a bench. `steps`: timed steps of each block, after `warmup` others; `rounds`: blocks of each
    contestant. `mode`: how the batch follows the number of workers, for `bench scaling`; None: as in the script.

    Raises:
        UsageError: a value is below its limit.
    """

    workers: int
    steps: int
    rounds: int
    warmup: int = 3
    contestants: tuple[str, ...] = CONTESTANTS
    mode: Mode | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: at least 1")

    @property
    def least(self) -> int:
        """The least number of steps of the script's own loop: the steps that are not done aside."""
        return self.warmup + self.rounds * (self.warmup + self.steps)

    def order(self, contestants: tuple[str, ...], round_: int) -> tuple[str, ...]:
        """Return the contestants in their order in a round."""
        first = round_ % len(contestants)
        return contestants[first:] + contestants[:first]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The parts of one worker's time in one step, in seconds. `rest`: the part of `step` that belongs to none of them.

    data: waiting for micro-batches. compute: forward and backward. folding: adding up gradients and handing them over.
    waiting: from its last backward pass until the sum has arrived. landing: turning the sum into `.grad`. update:
    `optimizer.step()`.
    """

    step: float
    data: float = 0.0
    compute: float = 0.0
    folding: float = 0.0
    waiting: float = 0.0
    landing: float = 0.0
    update: float = 0.0

    @property
    def rest(self) -> float:
        return self.step - self.data - self.compute - self.folding - self.waiting - self.landing - self.update


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """The timed steps of a contestant's block, of `samples` each over all workers."""

    round: int
    contestant: str
    samples: int
    spent: tuple[StepSeconds, ...]


class Exchanges(msgspec.Struct, frozen=True, kw_only=True, tag="exchanges"):
    """The times of exchanges that overlap with no computation, in seconds from this worker's last sum to the result.

    `all_reduces`: the times of as many all-reduces of Gloo, with as many bytes; empty if DistributedDataParallel is
    left out.
    """

    round: int
    seconds: tuple[float, ...]
    all_reduces: tuple[float, ...] = ()


class Unfit(msgspec.Struct, frozen=True, kw_only=True, tag="unfit"):
    """The reason why DistributedDataParallel can't be a contestant, as this worker sees it."""

    reason: str


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, tag="facts"):
    """The facts of a run of `bench scaling` that hold for all its steps.

    began: Unix time at which the worker's script got its first step. shards: micro-batches of a step, of all workers.
    samples: of the script's whole training. sent_bytes: bytes of gradients that this worker sends in a step, before
    compression.
    """

    began: float
    shards: int
    samples: int
    sent_bytes: int


class BenchFinished(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The measurement is complete."""


Record = Block | Exchanges | Unfit | RunFacts | BenchFinished
_decoder = msgspec.json.Decoder(Block | Exchanges | Unfit | RunFacts | BenchFinished)


def terms_of(text: str) -> BenchTerms:
    """Return the terms from the environment variable's `text`."""
    return msgspec.json.decode(text, type=BenchTerms)


def environment(terms: BenchTerms) -> dict[str, str]:
    return {VARIABLE: msgspec.json.encode(terms).decode()}


def write(record: Record) -> None:
    """Write a record into this worker's log. The line begins by itself, whatever the script has printed before."""
    os.write(STDOUT, b"\n" + PREFIX + msgspec.json.encode(record) + b"\n")


class BenchReports:
    """The reports of the workers of the run in `folder` so far: `records`, by worker. `read` adds the new ones."""

    def __init__(self, folder: Path) -> None:
        self.records: dict[str, list[Record]] = {}
        self._folder = folder / LOGS
        self._read: dict[str, int] = {}  # bytes of each log that were read

    def read(self) -> bool:
        """Read the new reports. Returns True if there were any."""
        more = False
        for path in sorted(self._folder.glob("*.log")):
            at = self._read.get(path.stem, 0)
            with open(path, "rb", opener=files.opener) as file:
                file.seek(at)
                *whole, torn = file.read().split(b"\n")
                self._read[path.stem] = file.tell() - len(torn)
            if new := [_decoder.decode(line.removeprefix(PREFIX)) for line in whole if line.startswith(PREFIX)]:
                self.records.setdefault(path.stem, []).extend(new)
                more = True
        return more

    def rounds(self, terms: BenchTerms) -> int:
        """Return the number of rounds that all workers have finished: each has begun the next one, or is done."""
        if len(self.records) < terms.workers:
            return 0
        return min(_rounds(records, terms) for records in self.records.values())


def _rounds(records: Iterable[Record], terms: BenchTerms) -> int:
    newest = 0
    for record in records:
        if isinstance(record, BenchFinished):
            return terms.rounds
        newest = record.round if isinstance(record, Block) else newest
    return newest
