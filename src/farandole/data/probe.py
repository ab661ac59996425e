"""What holds a step up, the data or the compute: timed on the user's own script, as a world of one.

The loader of the training loop is watched where micro-batches are handed over (`Loader.fetch`), in three phases of the
same length, each after a step that is not counted:

    1. *both*     the script as it is; the time within `fetch` is what the compute waits for data
    2. *compute*  one micro-batch over and over, with loader processes that do nothing
    3. *data*     micro-batches are fetched and dropped, and the script gets none; then it is ended

Left out: what other workers of the same machine take from it, and the exchange: there is one worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from farandole.data.loader import Key, Loader

ENOUGH = 0.02  # waiting, as a share of the step: less than this is not worth a change
_SPARE = 1.25  # more processes than the mean asks for: samples differ
_LEAST = 2  # steps of a phase, beside the one that is not counted


class Ended(BaseException):
    """The probe has seen enough: leaves the script past its own `except Exception`."""


@dataclass(frozen=True)
class Phase:
    """What was counted: samples, the seconds that they took, and how many of those were spent within `fetch`."""

    samples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The three phases, under so many loader processes on so many cores."""

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
    def wanted(self) -> int:
        """Loader processes that would keep up with the compute, by what one of them makes now."""
        each = self.data.rate / max(self.processes, 1)
        return math.ceil(self.compute.rate * _SPARE / each)

    def verdict(self) -> tuple[str, str]:
        """Which is the bottleneck, and what to do."""
        if self.share <= ENOUGH:
            return "compute", f"the loader keeps up with num_workers={self.processes}; leave it as it is"
        if self.wanted <= self.processes:
            return "compute", (
                f"num_workers={self.processes} would do, but data comes unevenly or shares its cores with the compute: "
                f"try prefetch_factor=4, or num_workers={self.processes + 1} where there are cores ({self.cores} here)"
            )
        if self.wanted <= self.cores:
            return "data", f"set num_workers={self.wanted}"
        return "data", (
            f"num_workers={self.wanted} would keep up, and there are {self.cores} cores: set num_workers={self.cores}, "
            f"and make a sample cheaper (`farandole data prepare --short-side`, fewer augmentations)"
        )


@dataclass
class Probe:
    """Stands between a script's loaders and its steps, as `Loader.watch`.

    Raises `Ended` out of a fetch when each phase has lasted `seconds`. The first loader asked is the training's.
    """

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    loader: Loader | None = None
    phases: list[Phase] = field(default_factory=list[Phase])
    _kept: Any = None
    _kept_samples: int = 0
    _step: tuple[int, int] = (-1, -1)
    _seen: int = 0  # steps begun in this phase
    _began: float = 0.0
    _samples: int = 0
    _waited: float = 0.0

    def findings(self, cores: int) -> Findings:
        both, compute, data = self.phases
        assert self.loader is not None
        return Findings(both=both, compute=compute, data=data, processes=self.loader.processes, cores=cores)

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
        if self._seen > _LEAST and now - self._began >= self.seconds:
            self.phases.append(Phase(self._samples, now - self._began, self._waited))
            self._seen = 0
            if len(self.phases) == 2:
                self.phases.append(self._data_alone(self.loader, key.epoch + 1, direct))
                raise Ended
            self.loader.expect(())  # the processes come to rest
        self._seen += 1
        if self._seen <= 2:  # what was before is not counted
            self._began, self._samples, self._waited = now, 0, 0.0

    def _data_alone(self, loader: Loader, epoch: int, direct: Callable[[Key], Any]) -> Phase:
        warm_up = -(-loader.batch.samples(1) // loader.batch.micro)
        loader.expect(_keys(loader, epoch))
        began, samples = self.clock(), 0
        for number, key in enumerate(_keys(loader, epoch)):
            direct(key)
            samples += key.stop - key.start
            if number + 1 == warm_up:
                began, samples = self.clock(), 0
            elif samples and self.clock() - began >= self.seconds:
                break
        return Phase(samples, self.clock() - began)


def _keys(loader: Loader, epoch: int) -> Iterator[Key]:
    """Micro-batches without end, one a step."""
    micro = loader.batch.micro
    starts = ((number, start) for number in count(epoch) for start in range(0, loader.length, micro))
    for step, (number, start) in enumerate(starts):
        yield Key(epoch=number, step=step, shard=0, start=start, stop=min(start + micro, loader.length))
