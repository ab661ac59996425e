"""What pools and the coordinator say to each other: so many workers are wanted, and this is what has become of them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.membership.values import Count, Dollars, Message, Name, Seconds, Text

MAX_WORKERS = 1000  # of a host


class Roster(Message):
    """To a pool: how many of its workers the run wants, those it counts as lost for good, whether it is over.

    Their ids begin with `mark` (see `names`).
    `leaving` have notice; `released` have been let go and exit by themselves; `evicted` are to be killed: the run goes
    on without them. `losses` in a row have brought the run nowhere. `over` carries the exit code, -1 while it goes on.
    `unfed` are those of the released whose host could not get them the data: it is to be left alone for a while.
    `present` are those that have been told so: all others have no part in the run and never will. `wrong_hosts` are
    not to be used any more: a worker there computed wrong.
    """

    wanted: int
    mark: str = ""
    losses: int = 0
    leaving: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    unfed: tuple[str, ...] = ()
    wrong_hosts: tuple[str, ...] = ()
    over: int = -1
    reason: str = ""
    present: tuple[str, ...] = ()


class Exited(Message):
    """From a pool: this process of its own has ended, for certain. Said again after a break."""

    worker: Name
    reason: Text


class StartFailed(Message):
    """From a pool: no process came of what was to be `worker`. Nobody was lost."""

    worker: Name
    host: Name
    reason: Text


class NoCapacity(Message):
    """From a pool: it would start more workers than it can now. Said once, until it could start one."""

    reason: Text


class Noticed(Message):
    """From a pool: the host of these workers will go within `within_s` seconds. Said again after a break."""

    workers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_WORKERS)]
    host: Name
    within_s: Count
    reason: Text


class Advised(Message):
    """From a pool: this host may go. Its workers stay, and the pool starts others elsewhere if it can."""

    host: Name
    reason: Text


class Capacity(Message):
    """From a pool: it can have so many workers now, those that it has among them; None: no limit is known. `gathers`:
    its hosts are still on their way, so there may be more in a moment. Said again after a break.
    """

    workers: Count | None = None
    gathers: bool = False


class HostSeen(Message):
    """From a pool, for people: what has become of a host. "" stands for none, or all."""

    host: Text
    state: Name
    reason: Text = ""


class HostPriced(Message):
    """From a pool: this host is paid for by the hour since Unix time `since`, at the price of a `day`; None: it is not
    known. Said again after a break.
    """

    host: Name
    dollars: Dollars | None
    since: Seconds
    day: Name = ""


FromPool = Exited | StartFailed | NoCapacity | Noticed | Advised | Capacity | HostSeen | HostPriced
