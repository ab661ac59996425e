"""A run as its lines tell it: what the dashboard and the report draw.

`take` the whole lines of metrics.jsonl, oldest first, whenever there are some: it is the same for a run that is on,
over, killed, resumed or rehearsed. Steps that are taken again, after `resumed` or a lost state, replace those before. A
line that is damaged, or of a kind that this version does not know, is passed over and counted. A clock that jumps
shifts what is drawn by time, and no order: that is the lines'.

Left out: what the coordinator knows and does not write down (speeds, who is stalled), which `Status` has.
"""

from __future__ import annotations

from collections import deque

from farandole.control.status import RATE_STEPS
from farandole.membership import events
from farandole.membership.metrics import LogLine, StepLine
from farandole.observe.display import QUIET
from farandole.observe.exports import values
from farandole.observe.lines import Lines
from farandole.observe.story.series import Series
from farandole.observe.story.stays import Stays
from farandole.observe.words import describe

DRAWN = (values.LOSS, values.SPEED, values.LEARNING_RATE, values.FACTOR, values.SAMPLES, values.SECONDS, values.WORKERS)
LOGGED = 24  # names of `run.log` that have a picture, the first ones
EVENTS = 5_000  # kept, the newest


class Happened:
    """An event in words. `number` counts all of them."""

    def __init__(self, number: int, event: events.Event) -> None:
        self.number, self.time, self.kind = number, event.time, events.name_of(event)
        self.words = describe(event)


class Story(Lines):
    """Attributes, beside those of `Lines`:
    series: by name, those of `observe/exports/values.py` and what the script has logged.
    stays: who was there. sizes: (Unix time, workers) for each view.
    happened: the newest events. count: of all.
    unfinite: (step, loss in words) of losses that were none.
    last: the newest step's line. recent: those of which the throughput and the time left are made.
    over, finished, numerics: the newest events of these names, None: there is none that counts.
    checkpoint: the newest one, Unix time, step and path. unpromised: since when bits are not.
    texts: what the script has logged that are no numbers, the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[str, Series] = {name: Series() for name in DRAWN}
        self.stays = Stays()
        self.sizes: list[tuple[float, int]] = []
        self.happened: deque[Happened] = deque(maxlen=EVENTS)
        self.count = 0
        self.unfinite: list[tuple[int, str]] = []
        self.last: StepLine | None = None
        self.over: events.Over | None = None
        self.finished: events.Finished | None = None
        self.numerics: events.Numerics | None = None
        self.checkpoint: tuple[float, int, str] | None = None
        self.unpromised: events.BitsNotPromised | None = None
        self.recent: deque[StepLine] = deque(maxlen=RATE_STEPS)
        self.texts: dict[str, str] = {}

    def _on_again(self, ended: float) -> None:
        self.over = self.finished = None
        self.recent.clear()
        self.sizes.append((ended, 0))

    def _step(self, line: StepLine) -> None:
        self.last = line
        self.stays.at(line.time)
        self.over = None
        self.recent.append(line)
        numbers = values.of_step(line)
        for name in DRAWN:
            if name in numbers:
                self.series[name].put(line.step, numbers[name])

    def _logged(self, line: LogLine) -> None:
        numbers, texts = values.of_log(line)
        self.texts.update(texts)
        for name, value in numbers.items():
            if name not in self.series and len(self.series) - len(DRAWN) < LOGGED:
                self.series[name] = Series()
            if name in self.series:
                self.series[name].put(line.step, value)

    def _event(self, event: events.Event) -> None:
        self.stays.take(event)
        if not isinstance(event, QUIET):
            self.count += 1
            self.happened.append(Happened(self.count, event))
        match event:
            case events.View(members=members):
                self.sizes.append((event.time, len(members)))
            case events.Resumed(step=step):
                self.over = self.finished = None
                self._again(max(step, 0))
            case events.StateLost():  # where it goes on, the steps that come next say
                self.recent.clear()
                self.sizes.append((event.time, 0))
            case events.NotFinite(step=step, loss=loss):
                self.unfinite.append((step, loss))
            case events.Numerics():
                self.numerics = event
            case events.BitsNotPromised():
                self.unpromised = self.unpromised or event
            case events.Checkpoint():
                self.checkpoint = (event.time, event.step, event.path)
            case events.Saved():
                self.checkpoint = (event.time, self.last.step + 1 if self.last else 0, event.path)
            case events.Finished():
                self.finished = event
            case events.Over():
                self.over = event
                self.sizes.append((event.time, 0))
            case _:
                pass

    def _again(self, step: int) -> None:
        """From now on the state is that of `step`."""
        for series in self.series.values():
            series.cut(step)
        self.recent.clear()
        self.unfinite = [each for each in self.unfinite if each[0] < step]
