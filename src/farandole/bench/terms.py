"""The data that `farandole bench steps` and its workers exchange: the terms, in the environment of the workers, and
their measurements, in one file for each worker in the run's folder.

A round has a block of steps for each contestant. The order rotates, so that each round starts with another contestant.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from farandole.control.run_folder import BENCH
from farandole.errors import UsageError
from farandole.platform import files

VARIABLE = "FARANDOLE_BENCH"  # the terms, in a worker's environment
ALONE, FARANDOLE, DDP = "alone", "farandole", "ddp"
CONTESTANTS = (ALONE, FARANDOLE, DDP)


class BenchTerms(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: that are timed of each block, after `warmup` others; `rounds`: blocks of each contestant.

    Raises:
        UsageError: a value is below its limit.
    """

    workers: int
    steps: int
    rounds: int
    warmup: int = 3

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: at least 1")

    @property
    def least(self) -> int:
        """The steps that the script's own loop must have: those that are not taken aside."""
        return self.warmup + self.rounds * (self.warmup + self.steps)

    def order(self, contestants: tuple[str, ...], round_: int) -> tuple[str, ...]:
        """Who comes after whom in a round."""
        first = round_ % len(contestants)
        return contestants[first:] + contestants[:first]


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where one worker's time went in one step, in seconds; what the parts leave of the `step` is the rest.

    data: it waited for micro-batches. compute: forward and backward. folding: gradients were added up and handed over.
    waiting: from its last backward pass until the sum was there. landing: the sum became `.grad`. update:
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
    """How long exchanges took that nothing hid, in seconds from this worker's last sum to the result.

    `all_reduces`: as many of Gloo's own, of as many bytes; none where it is not to be had.
    """

    round: int
    seconds: tuple[float, ...]
    all_reduces: tuple[float, ...] = ()


class Unfit(msgspec.Struct, frozen=True, kw_only=True, tag="unfit"):
    """Why DistributedDataParallel can't be one of the contestants, as this worker found."""

    reason: str


class BenchFinished(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """All that was wanted has been measured."""


Record = Block | Exchanges | Unfit | BenchFinished
_decoder = msgspec.json.Decoder(Block | Exchanges | Unfit | BenchFinished)


def terms_of(text: str) -> BenchTerms:
    """The terms that the environment of a worker holds as `text`."""
    return msgspec.json.decode(text, type=BenchTerms)


def environment(terms: BenchTerms) -> dict[str, str]:
    return {VARIABLE: msgspec.json.encode(terms).decode()}


def write(folder: Path, worker: str, record: Record) -> None:
    """Add to what a worker has told."""
    files.make(folder / BENCH)
    with files.append(folder / BENCH / f"{worker}.jsonl") as file:
        file.write(msgspec.json.encode(record) + b"\n")


class BenchReports:
    """What the workers in a folder have told so far, by worker; `read` adds what is new."""

    def __init__(self, folder: Path) -> None:
        self.records: dict[str, list[Record]] = {}
        self._folder = folder / BENCH
        self._read: dict[str, int] = {}  # bytes

    def read(self) -> bool:
        """Whether there was something."""
        more = False
        for path in sorted(self._folder.glob("*.jsonl")):
            at = self._read.get(path.stem, 0)
            with open(path, "rb", opener=files.opener) as file:
                file.seek(at)
                *whole, torn = file.read().split(b"\n")
                self._read[path.stem] = file.tell() - len(torn)
            self.records.setdefault(path.stem, []).extend(_decoder.decode(line) for line in whole)
            more = more or bool(whole)
        return more

    def rounds(self, terms: BenchTerms) -> int:
        """How many rounds all workers have told of, whole: each of them has begun the next one, or is done."""
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
