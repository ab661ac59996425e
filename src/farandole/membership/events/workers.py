"""Workers come and go."""

from __future__ import annotations

import msgspec

from farandole.membership.classes import TimeClass
from farandole.membership.events.base import Names, Recorded, Step
from farandole.membership.values import Count, Dollars, Seconds


class Starting(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    pid: Count


class Waits(Recorded, frozen=True, kw_only=True):
    """A guest is there before the first of the run's own workers, with which it is to be compared."""

    worker: str
    host: str


class Ready(Recorded, frozen=True, kw_only=True):
    """It asks in. `unreached`: why it can't write checkpoints."""

    worker: str
    host: str
    pid: Count
    unreached: str = ""


class Refused(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class OtherCode(Recorded, frozen=True, kw_only=True):
    """It is let in although its code differs: in `what`."""

    worker: str
    what: Names


class Exited(Recorded, frozen=True, kw_only=True):
    """Its process has ended before it had asked in."""

    worker: str
    host: str
    reason: str


class StartFailed(Recorded, frozen=True, kw_only=True):
    """No process came of what was to be `worker`: nobody was lost."""

    worker: str
    host: str
    reason: str


class NoCapacity(Recorded, frozen=True, kw_only=True):
    """The pool would start more than it can. Once, until it could."""

    pool: str
    reason: str


class Host(Recorded, frozen=True, kw_only=True):
    """What has become of a host of the pool; `host` "" for none, or all. `state`: joined, idle, leaving, gone, ..."""

    pool: str
    host: str
    state: str
    reason: str = ""


class Priced(Recorded, frozen=True, kw_only=True):
    """A host of the pool is paid for by the hour since Unix time `since`; `dollars` are as of `day`, None: unknown."""

    pool: str
    host: str
    dollars: Dollars | None
    since: Seconds
    day: str


class Advice(Recorded, frozen=True, kw_only=True):
    """A host of the pool may go. Its workers stay."""

    pool: str
    host: str
    reason: str


class Notice(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class Left(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Lost(Recorded, frozen=True, kw_only=True):
    worker: str
    host: str
    reason: str


class Unfed(Recorded, frozen=True, kw_only=True):
    """Its host can't get it the data: it goes, or where nobody else is left the run ends."""

    worker: str
    host: str
    reason: str


class Died(Recorded, frozen=True, kw_only=True):
    """What has become of the process of one that was lost before."""

    worker: str
    reason: str


class Expelled(Recorded, frozen=True, kw_only=True):
    worker: str
    reason: str


class Scale(Recorded, frozen=True, kw_only=True):
    wanted: Count
    before: Count


class NoReplacements(Recorded, frozen=True, kw_only=True):
    wanted: Count
    reason: str


class WorkerTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's time has gone to since its process began. `step`: that it was in, -1 for none."""

    host: str
    pool: str
    step: Step
    seconds: dict[TimeClass, Seconds]


class TimeSpent(Recorded, frozen=True, kw_only=True):
    """By worker. Those in `ended` are gone, and it is the last that is written down of them: see `accounting`."""

    workers: dict[str, WorkerTime]
    ended: Names
