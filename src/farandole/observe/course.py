"""What a run has come to, from its lines: what the summary at its end says. Pure.

`take` the whole lines of metrics.jsonl, oldest first: those of earlier sessions of a resumed run are part of it. What
is taken a second time, after `resumed` or a lost state, counts once, and how much that was is kept. Of a million steps
the numbers and sample counts are kept, and nothing else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import msgspec

from farandole.membership import events
from farandole.membership.metrics import LogLine, StepLine
from farandole.membership.values import StepTime
from farandole.observe.lines import Lines
from farandole.observe.past import Past, after, goes_on, with_step

Save = events.Saved | events.SavedElsewhere | events.NotSaved
NAMES = 100  # given to `run.log`, the first ones


class Course(Lines):
    """Attributes, beside those of `Lines`:
    past: how it stands.
    resumed: it has been on before.
    logged: the newest of what the script has logged as numbers.
    again: (steps, samples) that were taken once more. lost: the state is, and nothing has come in its place.
    steps: that were taken, also those whose lines were still to come when the run ended.
    lines_lost: of metrics, that are missing.
    after: what followed the last step of a script that has run to its end, else None.
    save: what became of the last checkpoint, None: nothing has said it. saved_step: that of the newest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past = Past(run="")
        self.resumed = False
        self.logged: dict[str, int | float] = {}
        self.again = (0, 0)
        self.lost = False
        self.save: Save | None = None
        self.saved_step: int | None = None
        self._left = 0  # steps that had been taken when everyone left
        self._steps = array("q")
        self._samples = array("q")
        self._times = {name: array("d") for name in StepTime.__struct_fields__}
        self.lines_lost = 0
        self.after: StepTime | None = None

    @property
    def steps(self) -> int:
        return max(self.past.steps, self._left)

    @property
    def samples(self) -> int | None:
        """In steps that count; None where a step's line is missing."""
        whole = bool(self._steps) and self._steps[0] == 0 and self._steps[-1] == len(self._steps) - 1
        return sum(self._samples) if whole else None

    @property
    def took(self) -> StepTime:
        """All steps that count and whose lines are there."""
        return StepTime(**{name: sum(seconds) for name, seconds in self._times.items()})

    def throughput(self, seconds: float) -> float | None:
        """Samples a second of these steps, if they had taken that long."""
        return sum(self._samples) / seconds if seconds > 0 else None

    def _on_again(self, ended: float) -> None:
        del ended
        self.resumed = True
        self.after = None

    def _step(self, line: StepLine) -> None:
        if self.past.code is not None:
            self.past = goes_on(self.past)
        self.past = with_step(self.past, line)
        self.lost = False
        self._cut(line.step)
        self._steps.append(line.step)
        self._samples.append(line.samples)
        for name, seconds in self._times.items():
            seconds.append(getattr(line, name))

    def _logged(self, line: LogLine) -> None:
        for name, value in line.fields.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self.logged.pop(name, None)  # the newest is no number
            elif name in self.logged or len(self.logged) < NAMES:
                self.logged[name] = value

    def _event(self, event: events.Event) -> None:
        self.past = after(self.past, event)
        match event:
            case events.Starting():
                self.save = None
            case events.View(members=()):
                self._left = event.step
            case events.Resumed(step=step):
                self.resumed = True
                self.after = None
                self._left = 0
                self.lost = False
                self.saved_step = max(step, 0)
                self._cut(max(step, 0))
                self.past = msgspec.structs.replace(self.past, steps=max(step, 0), checkpoint=event.path)
            case events.StateLost():
                self.lost = True
            case events.Checkpoint(step=step):
                self.saved_step = step
            case events.LinesLost(lines=lines):
                self.lines_lost += lines
            case events.Finished():
                self.after = StepTime(**{name: getattr(event, name) for name in StepTime.__struct_fields__})
            case events.Saved() | events.SavedElsewhere() | events.NotSaved():
                self.save = event
                if isinstance(event, events.Saved) and event.whole:
                    self.saved_step = None  # it is that of the end
            case _:
                pass

    def _cut(self, step: int) -> None:
        """Of `step` and later ones what was taken does not count any more."""
        if self._steps and step <= self._steps[-1]:
            at = bisect_left(self._steps, step)
            steps, samples = self.again
            self.again = steps + len(self._steps) - at, samples + sum(self._samples[at:])
            del self._steps[at:], self._samples[at:]
            for seconds in self._times.values():
                del seconds[at:]
