"""`farandole probe` finds the bottleneck of a step, data or compute: it times the user's own script in one process.

`Probe` intercepts the fetches of the training loop's loader (`Loader.fetch`). The time within `fetch` is the time that
the compute waits for data, as in the class "data" of a run's account. The first step is counted separately: it starts
processes, and reads a store of which nothing is cached yet. Each micro-batch comes with the cost of making it (section
"store clock" of `object_store.py`). `ProbeResult` derives the verdict from all of that, in this order:

    1. does a step after the first wait for data at all? If not, the bottleneck is the compute
    2. on what do the processes that make samples spend most of their time: the store, computing (decoding,
       transforms), or passing on (collating, handing over)?
    3. for the latter two, would more processes be enough, and are there cores for them? Waiting for a store needs no
       core
    4. did the first step wait for data that was not cached? Then each new machine will wait for the store, whatever
       the answers above

Left out: the load by other workers of the same machine, and the exchange: there is one worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farandole.data.loader import Key, Loader
from farandole.data.object_store import NOTHING, Making, Makings

ENOUGH = 0.02  # waiting time as a fraction of the step: less than this is not worth a change
_SPARE = 1.25  # factor on the mean number of processes, because samples differ
_WAITING_EACH = 4  # processes per core, at most, that wait for a store
_LEAST = 2  # minimum steps after the first


@dataclass(frozen=True)
class StepTimes:
    """Some steps: their samples and seconds, and the seconds of these spent within `fetch`.

    `making`: the cost of all micro-batches received meanwhile, made in any process.
    """

    samples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    making: Makings = NOTHING

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    @property
    def share(self) -> float:
        """The fraction of the time that is spent waiting for data."""
        return self.waiting / self.seconds

    @property
    def compute_rate(self) -> float:
        """Samples a second, if the data did not have to be waited for."""
        return self.samples / max(self.seconds - self.waiting, 1e-9)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The first step and the steps after it, with the number of loader processes and of cores."""

    first: StepTimes
    steps: StepTimes
    processes: int
    cores: int

    @property
    def making(self) -> Makings:
        """The cost of all micro-batches."""
        return self.first.making.plus(self.steps.making)

    @property
    def needed_processes(self) -> int:
        """The number of loader processes that would keep up with the compute, at the present rate of each."""
        return math.ceil(self.steps.compute_rate * _SPARE / self._each)

    @property
    def _each(self) -> float:
        """Samples a second that one process makes."""
        spent = self.steps.making.both
        return spent.samples / max(spent.seconds, 1e-9)

    def verdict(self) -> tuple[str, str]:
        """Returns the bottleneck and the remedy."""
        which, advice = self._under_way()
        if which == "the store" or not self._begins_cold:
            return which, advice
        began = (
            f"the first step waited {self.first.waiting:.1f} s for data, as it will on each new machine "
            f"({_store(self.first.making.both)}): fetch it before a worker joins (`farandole run --prepare`), or use a "
            f"store that is nearer"
        )
        if which == "compute":
            return "the store, until its data is cached", f"{began}; from the cache {advice}"
        return which, f"{advice}; and {began}"

    def _under_way(self) -> tuple[str, str]:
        """Returns the bottleneck and the remedy for the steps after the first."""
        if self.steps.share <= ENOUGH:
            return "compute", f"the loader keeps up with num_workers={self.processes}"
        spent = self.steps.making.both
        passing_on = spent.collating + spent.handing_over
        if spent.fetching > max(spent.reading + spent.computing, passing_on):
            return self._of_the_store(spent)
        if self.needed_processes <= self.processes:
            return "compute", (
                f"num_workers={self.processes} should suffice, but data comes unevenly or shares its cores with the "
                f"compute: "
                f"try prefetch_factor=4, or num_workers={self.processes + 1} where there are cores ({self.cores} here)"
            )
        if self.needed_processes <= self.cores:
            return "too few loader processes", (
                f"one makes {self._each:.4g} samples/s, and the compute takes {self.steps.compute_rate:.4g}: "
                f"set num_workers={self.needed_processes}"
            )
        instead = (
            f"num_workers={self.needed_processes} would keep up, and there are {self.cores} cores: "
            f"set num_workers={self.cores}"
        )
        if passing_on > spent.reading + spent.computing:
            return "handing over", (
                f"collating and handing over take {_each_ms(passing_on, spent)} a sample; {instead}, and make a sample "
                f"smaller (integers such as uint8 instead of float32, converted on the model's device)"
            )
        return "decoding", (
            f"decoding and transforms take {_each_ms(spent.computing, spent)} a sample; {instead}, and make a sample "
            f"cheaper (`farandole data prepare --short-side`, fewer augmentations)"
        )

    @property
    def _begins_cold(self) -> bool:
        """True if the first step waited for data, mostly for the store."""
        waited = self.first.waiting
        long = waited > ENOUGH * (self.first.seconds + self.steps.seconds)
        return long and self.first.making.both.fetching > waited / 2

    def _of_the_store(self, spent: Making) -> tuple[str, str]:
        share = spent.fetching / spent.seconds
        processes = max(self.processes + 1, min(self.needed_processes, _WAITING_EACH * self.cores))
        warm = self.steps.making.warm
        cached = "keep all of it in the cache (cache_bytes), so that it is fetched once"
        if warm.samples:
            cached += f"; one process makes {warm.samples / max(warm.seconds, 1e-9):.4g} samples/s of what is cached"
        return "the store", (
            f"{share:.0%} of the time to make a sample is waiting for it ({_store(spent)}): use a nearer store, fetch "
            f"the data before a worker joins (`farandole run --prepare`), let more processes wait in parallel "
            f"(num_workers={processes}), {cached}"
        )


def _store(spent: Making) -> str:
    """Returns the speed of the store, from its requests."""
    if not spent.requests or not spent.request_s:
        return f"{_each_ms(spent.fetching, spent)} a sample"
    each = 1e3 * spent.request_s / spent.requests
    rate = spent.bytes / spent.request_s / 1e6
    return f"{spent.url}: {each:.0f} ms a request, {rate:.1f} MB/s each"


def _each_ms(seconds: float, spent: Making) -> str:
    return f"{1e3 * seconds / max(spent.samples, 1):.3g} ms"


# --- probe ------------------------------------------------------------------------------------------------------------


class Ended(BaseException):
    """Ends the script when the probe is done; a `BaseException`, so that `except Exception` in the script misses it."""


@dataclass
class Probe:
    """The hook of the fetches of the training's loader, see `Loader.measure`.

    Raises `Ended` from a fetch when the steps after the first have lasted `seconds`.
    """

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    loader: Loader | None = None
    first: StepTimes | None = None  # the first step
    steps: StepTimes | None = None  # those after it
    _step: tuple[int, int] = (-1, -1)
    _step_count: int = 0  # steps
    _began: float = 0.0
    _samples: int = 0
    _waited: float = 0.0

    def findings(self, cores: int) -> ProbeResult:
        assert self.loader is not None
        assert self.first is not None
        assert self.steps is not None
        return ProbeResult(first=self.first, steps=self.steps, processes=self.loader.processes, cores=cores)

    def fetch(self, key: Key, direct: Callable[[Key], Any]) -> Any:
        """Returns the script's micro-batch for `key`; `direct` fetches it."""
        if key[:2] != self._step:
            self._step = key[:2]
            self._step_begins()
        began = self.clock()
        batch = direct(key)
        self._waited += self.clock() - began
        self._samples += key.stop - key.start
        return batch

    def _step_begins(self) -> None:
        now = self.clock()
        if self._step_count == 1:
            self.first = self._counted(now)
        elif self._step_count > _LEAST and now - self._began >= self.seconds:
            self.steps = self._counted(now)
            raise Ended
        self._step_count += 1
        if self._step_count <= 2:
            self._began, self._samples, self._waited = now, 0, 0.0

    def _counted(self, now: float) -> StepTimes:
        assert self.loader is not None
        making, self.loader.making = self.loader.making, NOTHING
        return StepTimes(self._samples, now - self._began, self._waited, making)
