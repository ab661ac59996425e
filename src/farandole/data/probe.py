"""What holds a step up, the data or the compute: timed on the user's own script, as a world of one.

The loader of the training loop is watched where micro-batches are handed over (`Loader.fetch`), in three phases of the
same length:

    1. *both*     the script as it is; the time within `fetch` is what the compute waits for data. The first step is
                  told by itself: it starts processes, and meets a store of which nothing is cached yet
    2. *compute*  one micro-batch over and over, with loader processes that do nothing, after a step that is not counted
    3. *data*     micro-batches are fetched and dropped, and the script gets none; then it is ended

Meanwhile whoever makes micro-batches tells with each what its making took (`store_clock.py`). What all of that says is
`bottleneck.py`. Left out: what other workers of the same machine take from it, and the exchange: there is one worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from farandole.data.bottleneck import Findings, Phase
from farandole.data.loader import Key, Loader
from farandole.data.store_clock import NOTHING

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

    def findings(self, cores: int) -> Findings:
        both, compute, data = self.phases
        assert self.loader is not None
        assert self.first is not None
        return Findings(
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
