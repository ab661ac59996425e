"""Work that one worker does while the others wait: a round without samples, in which one shard is the work.

    with run.once() as mine:
        if mine:
            torch.save(model.state_dict(), "model.tmp")
            os.replace("model.tmp", "model.pt")

1. Every worker begins a round of as many shards as workers. Shard 0 is the work, and so that of rank 0; the others are
   empty.
2. Whoever holds the work enters the `with` with True, does it, and closes its shard when it leaves it.
3. The others close their empty shards and wait before they enter: until the round has ended, False, or until the work
   falls to them because its holder is gone, True.

So it is done *at least once*: a worker that dies in the middle leaves half of it, and another one begins it anew. Hence
the temporary name and `os.replace` above. Nobody's body runs twice: a `with` is enough.

Nobody reports the holder as stalled, however long it takes (`Rounds.begin`, `patient`). If its process dies or freezes,
it is lost as always. What it changes of its own (random state, buffers, training modes and other plain attributes of
modules) is put back: it goes on as the
others do. Left out: parameters and optimizers, which the work must leave as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from farandole.collective.buckets import Layout, Partials
from farandole.data.order import keep_random_state
from farandole.errors import UsageError
from farandole.training.module_attributes import ModuleAttributes
from farandole.training.replica import LARGEST_LANE_BUFFER, Replica
from farandole.training.step_clock import StepClock
from farandole.worker.rounds import WORK, Rounds, task


class Once:
    """See the module's head."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._partials = Partials(Layout([], lanes=1))
        self._working = False

    def refuse(self, what: str) -> None:
        """Raises UsageError while this worker is at the work: `what` needs all of them."""
        if self._working:
            raise UsageError(f"run.{what} within run.once: all workers must call it, and only one is here; move it out")

    @contextmanager
    def work(self, replica: Replica, attributes: ModuleAttributes, step: int, clock: StepClock) -> Generator[bool]:
        """See `Run.once`. An exception from within is the script's failure, which ends the run and this round."""
        with clock.apart("once"):
            yield from self._work(replica, attributes, step)

    def _work(self, replica: Replica, attributes: ModuleAttributes, step: int) -> Generator[bool]:
        what = f"run.once after step {step}"
        self._rounds.begin(task(self._partials, lambda workers: workers, step, what), patient=True)
        if not self._work_is_mine():
            yield False
            return
        put_back = _keep(replica, attributes)
        self._working = True
        yield True
        self._working = False
        put_back()
        self._close(WORK)
        again = self._work_is_mine()
        assert not again, "work that was done was dealt out again"

    def _work_is_mine(self) -> bool:
        """Go through the round: to its end, False, or to where the work is this worker's, True."""
        rounds = self._rounds
        while True:
            rounds.sync()
            todo = rounds.todo()
            if WORK in todo:
                return True
            for shard in todo:
                self._close(shard)
            if rounds.finish():
                return False

    def _close(self, shard: int) -> None:
        self._rounds.open(shard)
        self._partials.close(torch.zeros(1, dtype=torch.float64))
        self._rounds.close(shard)


def _keep(replica: Replica, attributes: ModuleAttributes) -> Callable[[], None]:
    """What puts back whatever the work may change of this worker's own. Larger buffers are constants."""
    random_state = keep_random_state()
    small = [buffer for buffer in replica.buffers.values() if buffer.numel() <= LARGEST_LANE_BUFFER]
    values = [buffer.detach().clone() for buffer in small]
    plain_attributes = attributes.put_back()

    def put_back() -> None:
        random_state()
        replica.look(whole=False)
        with torch.no_grad():
            for buffer, value in zip(small, values, strict=True):
                buffer.copy_(value)
        plain_attributes()

    return put_back
