"""What holds a step up, the data or the compute: timed on the user's own script, as a world of one.

The loader of the training loop is watched where micro-batches are handed over (`Loader.fetch`), in three phases of the
same length:

    1. *both*     the script as it is; the time within `fetch` is what the compute waits for data. The first step is
                  told by itself: it starts processes, and meets a store of which nothing is cached yet
    2. *compute*  one micro-batch over and over, with loader processes that do nothing, after a step that is not counted
    3. *data*     micro-batches are fetched and dropped, and the script gets none; then it is ended

Meanwhile whoever makes micro-batches tells with each what its making took (`object_store.py`). What all of that says is
`probe.py`. Left out: what other workers of the same machine take from it, and the exchange: there is one worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from farandole.data.loader import Key, Loader
from farandole.data.object_store import NOTHING, Making, Makings

# --- bottleneck -------------------------------------------------------------------------------------------------------
#
# What a probe has timed, and what that says of the bottleneck and its remedy. Pure.
#
# The question is asked in this order:
#
#     1. does the step wait for data at all, once it is under way? If not, it is the compute
#     2. what do those who make samples spend most of their time on: the store, computing (decoding, transforms), or
#        passing on (collating, handing over)?
#     3. of the latter two, would more processes do, and are there cores for them? Who waits for a store needs no core
#     4. did the first step wait for what was not cached? Then each new machine will wait for the store, whatever
#       follows
#
# Left out: what other workers of the same machine take of the store, the cores and the cache.

ENOUGH = 0.02  # waiting, as a share of the step: less than this is not worth a change
_SPARE = 1.25  # more processes than the mean asks for: samples differ
_WAITING_EACH = 4  # processes a core, at most, that wait for a store


@dataclass(frozen=True)
class Phase:
    """What was counted: samples, the seconds that they took, and how many of those were spent within `fetch`.

    `making`: of what was made meanwhile, in whichever process.
    """

    samples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    making: Makings = NOTHING

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The first step and the three phases, under so many loader processes on so many cores."""

    first: Phase
    both: Phase
    compute: Phase
    data: Phase
    processes: int
    cores: int

    @property
    def share(self) -> float:
        """Of a step, how much is spent waiting for data."""
        return self.both.waiting / self.both.seconds

    @property
    def making(self) -> Makings:
        """Of all that was made."""
        return self.first.making.plus(self.both.making).plus(self.data.making)

    @property
    def wanted(self) -> int:
        """Loader processes that would keep up with the compute, by what one of them makes now."""
        return math.ceil(self.compute.rate * _SPARE / self._each)

    @property
    def _each(self) -> float:
        return self.data.rate / max(self.processes, 1)

    def verdict(self) -> tuple[str, str]:
        """Which is the bottleneck, and what to do."""
        which, advice = self._under_way()
        if which == "the store" or not self._begins_cold:
            return which, advice
        began = (
            f"the first step waited {self.first.waiting:.1f} s for data, as it will on each new machine "
            f"({_store(self.first.making.both)}): fetch it before a worker joins (`farandole run --prepare`), or bring "
            f"it nearer"
        )
        if which == "compute":
            return "the store, until its data is cached", f"{began}; from the cache {advice}"
        return which, f"{advice}; and {began}"

    def _under_way(self) -> tuple[str, str]:
        """The same, of the steps after the first."""
        if self.share <= ENOUGH:
            return "compute", f"the loader keeps up with num_workers={self.processes}"
        spent = self.both.making.both
        passing_on = spent.collating + spent.handing_over
        if spent.fetching > max(spent.reading + spent.computing, passing_on):
            return self._of_the_store(spent)
        if self.wanted <= self.processes:
            return "compute", (
                f"num_workers={self.processes} would do, but data comes unevenly or shares its cores with the compute: "
                f"try prefetch_factor=4, or num_workers={self.processes + 1} where there are cores ({self.cores} here)"
            )
        if self.wanted <= self.cores:
            return "too few loader processes", (
                f"one makes {self._each:.4g} samples/s, and the compute takes {self.compute.rate:.4g}: "
                f"set num_workers={self.wanted}"
            )
        instead = (
            f"num_workers={self.wanted} would keep up, and there are {self.cores} cores: set num_workers={self.cores}"
        )
        if passing_on > spent.reading + spent.computing:
            return "handing over", (
                f"collating and handing over take {_each_ms(passing_on, spent)} a sample; {instead}, and make a sample "
                f"smaller (whole numbers such as uint8 instead of float32, converted where the model is)"
            )
        return "decoding", (
            f"decoding and transforms take {_each_ms(spent.computing, spent)} a sample; {instead}, and make a sample "
            f"cheaper (`farandole data prepare --short-side`, fewer augmentations)"
        )

    @property
    def _begins_cold(self) -> bool:
        """Whether the first step waited for data, and that for the store."""
        waited = self.first.waiting
        long = waited > ENOUGH * (self.first.seconds + self.both.seconds)
        return long and self.first.making.both.fetching > waited / 2

    def _of_the_store(self, spent: Making) -> tuple[str, str]:
        share = spent.fetching / spent.seconds
        processes = max(self.processes + 1, min(self.wanted, _WAITING_EACH * self.cores))
        if self.data.making.cold.samples:
            cached = "keep all of it in the cache (cache_bytes), so that it is fetched once"
        else:
            cached = f"or wait: what is cached comes at {self.data.rate:.4g} samples/s"
        return "the store", (
            f"{share:.0%} of a sample's making is waiting for it ({_store(spent)}): bring the data nearer, fetch it "
            f"before a worker joins (`farandole run --prepare`), have more processes wait at once "
            f"(num_workers={processes}), {cached}"
        )


def _store(spent: Making) -> str:
    """How fast the store is, by what was asked of it."""
    if not spent.requests or not spent.request_s:
        return f"{_each_ms(spent.fetching, spent)} a sample"
    each = 1e3 * spent.request_s / spent.requests
    rate = spent.bytes / spent.request_s / 1e6
    return f"{spent.url}: {each:.0f} ms a request, {rate:.1f} MB/s each"


def _each_ms(seconds: float, spent: Making) -> str:
    return f"{1e3 * seconds / max(spent.samples, 1):.3g} ms"


# --- probe ------------------------------------------------------------------------------------------------------------

_LEAST = 2  # steps of a phase, beside its first
_ROUNDS = 2  # micro-batches of each process, at least, by which the data alone is timed


class Ended(BaseException):
    """The probe has seen enough: leaves the script past its own `except Exception`."""


@dataclass
class Probe:
    """Stands between a script's loaders and its steps, as `Loader.watch`.

    Raises `Ended` out of a fetch when each phase has lasted `seconds`. The first loader asked is the training's.
    """

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    loader: Loader | None = None
    first: Phase | None = None  # the step in which everything begins
    phases: list[Phase] = field(default_factory=list[Phase])
    _kept: Any = None
    _kept_samples: int = 0
    _step: tuple[int, int] = (-1, -1)
    _seen: int = 0  # steps begun in this phase
    _began: float = 0.0
    _samples: int = 0
    _waited: float = 0.0

    def findings(self, cores: int) -> ProbeResult:
        both, compute, data = self.phases
        assert self.loader is not None
        assert self.first is not None
        return ProbeResult(
            first=self.first, both=both, compute=compute, data=data, processes=self.loader.processes, cores=cores
        )

    def fetch(self, loader: Loader, key: Key, direct: Callable[[Key], Any]) -> Any:
        """What `loader` gives for `key` in the present phase; `direct` is its own answer."""
        self.loader = self.loader or loader
        if loader is not self.loader:
            return direct(key)
        if key[:2] != self._step:
            self._step = key[:2]
            self._step_begins(key, direct)
        if self.phases:
            if self._kept_samples == 0:
                self._kept, self._kept_samples = direct(key), key.stop - key.start
            self._samples += self._kept_samples
            return self._kept
        began = self.clock()
        found = direct(key)
        self._waited += self.clock() - began
        self._samples += key.stop - key.start
        return found

    def _step_begins(self, key: Key, direct: Callable[[Key], Any]) -> None:
        assert self.loader is not None
        now = self.clock()
        if self._seen == 1 and not self.phases:
            self.first = self._counted(self.loader, now)
        if self._seen > _LEAST and now - self._began >= self.seconds:
            self.phases.append(self._counted(self.loader, now))
            self._seen = 0
            if len(self.phases) == 2:
                self.phases.append(self._data_alone(self.loader, key.epoch + 1, direct))
                raise Ended
            self.loader.expect(())  # the processes come to rest
        self._seen += 1
        if self._seen <= 2:
            self._began, self._samples, self._waited = now, 0, 0.0

    def _counted(self, loader: Loader, now: float) -> Phase:
        making, loader.making = loader.making, NOTHING
        return Phase(self._samples, now - self._began, self._waited, making)

    def _data_alone(self, loader: Loader, epoch: int, direct: Callable[[Key], Any]) -> Phase:
        """From the first request on: the processes had nothing to do before, so nothing of it was made earlier."""
        least = max(loader.batch.samples(1), _ROUNDS * max(loader.processes, 1) * loader.batch.micro)
        self._began, self._samples, self._waited = self.clock(), 0, 0.0
        loader.expect(_keys(loader, epoch))
        for key in _keys(loader, epoch):
            direct(key)
            self._samples += key.stop - key.start
            if self._samples >= least and self.clock() - self._began >= self.seconds:
                break
        return self._counted(loader, self.clock())


def _keys(loader: Loader, epoch: int) -> Iterator[Key]:
    """Micro-batches without end, one a step."""
    micro = loader.batch.micro
    starts = ((number, start) for number in count(epoch) for start in range(0, loader.length, micro))
    for step, (number, start) in enumerate(starts):
        yield Key(epoch=number, step=step, shard=0, start=start, stop=min(start + micro, loader.length))
