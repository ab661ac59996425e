"""A run to a page, piece by piece: the first `Tick` has everything, each one after it what is new. Pure.

One `Telling` stands for one page that is open. It remembers how far that is, so that nothing is said twice; what has
not changed is None, or empty.
"""

from __future__ import annotations

import msgspec

from farandole.control.status import Status
from farandole.observe.pauses import Pause
from farandole.observe.story.facts import Bill, Head, head
from farandole.observe.story.series import Patch, Seen
from farandole.observe.story.stays import Stay
from farandole.observe.story.story import Happened, Story

EVENTS = 500  # at once
Event = tuple[int, float, str, str]  # number, Unix time, kind, words
Row = tuple[str, str, float | None, int, int]  # state, host, speed of the fastest's, shards, of how many


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """`now`: Unix time. `stays` by their numbers; `sizes`: (Unix time, workers), more of them. `workers`: rows of those
    there that have changed, None: it is gone.
    """

    now: float
    head: Head | None
    series: dict[str, Patch]
    stays: dict[str, Stay]
    sizes: list[tuple[float, int]]
    events: list[Event]
    pauses: list[Pause] | None
    unfinite: list[tuple[int, str]] | None
    workers: dict[str, Row | None]
    bill: Bill | None


class Telling:
    """Of `story`, the run named `run`, to one page."""

    def __init__(self, run: str, story: Story, events: int = EVENTS) -> None:
        self._run, self._story, self._most = run, story, events
        self._seen: dict[str, Seen] = {}
        self._stays = self._sizes = self._events = 0
        self._head: Head | None = None
        self._unfinite: list[tuple[int, str]] = []
        self._workers: dict[str, Row] = {}

    def tick(self, now: float, status: Status | None = None, paid: Bill | None = None, *, live: bool) -> Tick:
        """`paid`: the bill, where it is another one than before."""
        story = self._story
        changed = sorted(set(story.stays.changes[self._stays :]))
        self._stays = len(story.stays.changes)
        sizes, self._sizes = story.sizes[self._sizes :], len(story.sizes)
        return Tick(
            now=now,
            head=self._new_head(head(self._run, story, status, live=live)),
            series=self._patches(),
            stays={str(number): story.stays.all[number] for number in changed},
            sizes=sizes,
            events=(events := self._new_events()),
            pauses=story.pauses.found() if events else None,
            unfinite=self._new_unfinite(),
            workers=self._rows(status, live=live),
            bill=paid,
        )

    def _patches(self) -> dict[str, Patch]:
        found: dict[str, Patch] = {}
        for name, series in self._story.series.items():
            if (patch := series.patch(self._seen.setdefault(name, Seen()))) is not None:
                found[name] = patch
        return found

    def _new_head(self, now: Head) -> Head | None:
        if now == self._head:
            return None
        self._head = now
        return now

    def _new_events(self) -> list[Event]:
        new: list[Happened] = []
        for each in reversed(self._story.happened):
            if each.number <= self._events or len(new) == self._most:
                break
            new.append(each)
        self._events = self._story.count
        return [(each.number, each.time, each.kind, each.words) for each in reversed(new)]

    def _new_unfinite(self) -> list[tuple[int, str]] | None:
        if self._story.unfinite == self._unfinite:
            return None
        self._unfinite = list(self._story.unfinite)
        return self._unfinite

    def _rows(self, status: Status | None, *, live: bool) -> dict[str, Row | None]:
        """Without the coordinator's word they stay as they were, while the run is on."""
        if status is None and live:
            return {}
        rows: dict[str, Row] = {
            w.id: (w.state, w.host, None if w.speed is None else round(w.speed, 2), w.shards, w.of)
            for w in (status.workers if status else ())
        }
        changed: dict[str, Row | None] = {id: row for id, row in rows.items() if self._workers.get(id) != row}
        changed |= dict.fromkeys(self._workers.keys() - rows.keys())
        self._workers = rows
        return changed


def first(run: str, story: Story, now: float, *, account: Bill, live: bool) -> Tick:
    """Everything at once, for a page that will hear no more."""
    return Telling(run, story, events=len(story.happened)).tick(now, paid=account, live=live)
