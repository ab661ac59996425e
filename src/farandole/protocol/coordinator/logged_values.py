"""Compares what workers pass to `run.log`.

metrics.jsonl has the lines of rank 0. Every worker calls `run.log` with the same values, unless the script computes one
from its own micro-batches only, such as a Python sum in the inner loop: then rank 0's value is a part of the true one.
The other workers send their newest lines with their heartbeats, and a value that differs becomes the event
`values differ`, once for each name. It is a warning only: a script may log its own time of a step. The other
workers also send their lines before their last message. What is kept is bounded, and forgotten when the run continues
from a checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping

from farandole.protocol import events
from farandole.protocol import messages as m

MOST_NAMES = 16  # names that become an event
MOST_WRITTEN = 1000  # newest lines of rank 0 that are kept for the comparison
MOST_WAITING = 8 * m.MAX_COMPARED  # lines of one worker that wait for rank 0's
Place = tuple[int, int]  # step and index of a line


class LoggedValues:
    """The lines of `run.log` that are written, and those of other workers that wait for them."""

    def __init__(self) -> None:
        self._written: OrderedDict[Place, m.Line] = OrderedDict()
        self._waiting: defaultdict[str, OrderedDict[Place, m.Line]] = defaultdict(OrderedDict)
        self._told: set[str] = set()

    def clear(self) -> None:
        """Forget all lines: the run goes on from an earlier step."""
        self._written.clear()
        self._waiting.clear()

    def written(self, line: m.Line) -> Iterator[events.ValuesDifferEvent]:
        """Compare a line that is written with those that wait for it."""
        place = line.step, line.index
        self._written[place] = line
        if len(self._written) > MOST_WRITTEN:
            self._written.popitem(last=False)
        for worker, lines in [*self._waiting.items()]:
            while lines and next(iter(lines)) < place:  # nobody writes these any more
                lines.popitem(last=False)
            if own := lines.pop(place, None):
                yield from self._differences(worker, own, line)
            if not lines:
                del self._waiting[worker]

    def on_lines(self, worker: str, lines: tuple[m.Line, ...], newest: Place) -> Iterator[events.ValuesDifferEvent]:
        """Compare lines of another worker. `newest`: the newest line that is written."""
        for line in lines:
            place = line.step, line.index
            if theirs := self._written.get(place):
                yield from self._differences(worker, line, theirs)
            elif place > newest:
                waiting = self._waiting[worker]
                waiting[place] = line
                if len(waiting) > MOST_WAITING:
                    waiting.popitem(last=False)

    def _differences(self, worker: str, own: m.Line, theirs: m.Line) -> Iterator[events.ValuesDifferEvent]:
        if not (isinstance(own.fields, Mapping) and isinstance(theirs.fields, Mapping)):
            return
        for name, value in own.fields.items():
            written = theirs.fields.get(name, value)
            both_nan = value != value and written != written
            if value != written and not both_nan and name not in self._told and len(self._told) < MOST_NAMES:
                self._told.add(name)
                yield events.ValuesDifferEvent(
                    worker=worker, step=own.step, name=name, value=str(value), written=str(written)
                )
