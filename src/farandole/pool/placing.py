"""On which host of a pool the next worker is started; pure, times are the caller's, in seconds.

- The first of the pool's hosts that has room, has no notice or advice, and is at rest from no trouble.
- A start that failed is trouble of its host, and so is a worker that ended, unasked, before it had stood for `STOOD_S`.
  The host is then left alone, twice as long each time up to `LONGEST_S`, until a worker has stood there for so long.
- After ends of workers alone a host is used nevertheless where no other one is left: what is wrong may be the script,
  and when that is tried again is for the whole run to say (`keeper.pause`).
- A host that could not get a worker its data (a full disk, a store out of reach) is left alone too, twice as long each
  time up to `LONGEST_S`, even if it is the only one; from its end on it is tried again. Others may stand there
  meanwhile, with what they have, and prove nothing: only `LONGEST_S` of peace after a rest have it begin anew.
- A pool without capacity is asked again after a while, twice as long each time, whichever host it was asked for.
- A host on which a worker computed wrong is not asked again.
- Notice counts until the host has gone, or has stayed for `OVERDUE_S` beyond its deadline; advice until it has gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from farandole.pool.base import Advice, Host, Notice

STOOD_S = 60.0
FIRST_S, LONGEST_S = 1.0, 600.0  # of rest
OVERDUE_S = 30.0
SAME_S = 1.0  # between two deadlines that are the same one, told twice


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`count` times in a row, to be left alone until `until`. `start`: the newest was a start that failed."""

    count: int = 0
    until: float = 0.0
    start: bool = False

    def again(self, now: float, *, start: bool) -> Trouble:
        rest_s = min(FIRST_S * 2.0**self.count, LONGEST_S)
        return replace(self, count=self.count + 1, until=now + rest_s, start=start)


class Placing:
    """What is known of a pool's hosts."""

    def __init__(self) -> None:
        self._troubles: dict[str, Trouble] = {}
        self._unfed: dict[str, Trouble] = {}
        self._capacity = Trouble()
        self._noticed: dict[str, float] = {}  # until when that counts
        self._advised: set[str] = set()
        self._wrong: Collection[str] = ()

    def host(self, hosts: Sequence[Host], workers: Mapping[str, int], now: float) -> str | None:
        """Where to start one, None for nowhere now. `workers`: how many there are on each host."""
        if self.is_short(now):
            return None
        open_ = [host for host in hosts if host.room(workers.get(host.name, 0)) and host.name not in self._wrong]
        room = [host.name for host in open_ if not self.goes(host.name, now) and not self.is_unfed(host.name, now)]
        rested = [name for name in room if self._trouble(name).until <= now]
        tried = [name for name in room if not self._trouble(name).start]
        return next(iter(rested or tried), None)

    def capacity(self, hosts: Sequence[Host], workers: Mapping[str, int], now: float) -> int | None:
        """How many workers there can be, `workers` of them there; None: no limit is known."""
        if self.is_short(now):
            return sum(workers.values())
        open_ = [host for host in hosts if host.name not in self._wrong and not self.goes(host.name, now)]
        slots = [workers.get(host.name, 0) if self.is_unfed(host.name, now) else host.slots for host in open_]
        return None if None in slots else sum(slot or 0 for slot in slots)

    def goes(self, host: str, now: float) -> bool:
        """Whether it will go, or may."""
        return host in self._advised or self._noticed.get(host, now) > now

    def computed_wrong(self, hosts: Collection[str]) -> None:
        """All such, as the run knows them."""
        self._wrong = hosts

    def noticed(self, notice: Notice, now: float) -> bool:
        """Whether it goes sooner than was known."""
        until = now + notice.deadline_s + OVERDUE_S
        known = self._noticed.get(notice.host, now)
        self._noticed[notice.host] = until
        return known <= now or until < known - SAME_S

    def advised(self, advice: Advice) -> bool:
        """Whether that is new."""
        new = advice.host not in self._advised
        self._advised.add(advice.host)
        return new

    def failed(self, host: str, now: float, *, start: bool) -> None:
        """A start there has failed, or a worker has ended too soon."""
        self._troubles[host] = self._trouble(host).again(now, start=start)

    def unfed(self, host: str, now: float) -> float:
        """A worker there could not get its data. How long the host is left alone, in s; 0: it is so already."""
        known = self._unfed.get(host, Trouble())
        if now < known.until:
            return 0.0
        known = known if now - known.until < LONGEST_S else Trouble()
        self._unfed[host] = again = known.again(now, start=True)
        return again.until - now

    def is_unfed(self, host: str, now: float) -> bool:
        """It is left alone for that."""
        return now < self._unfed.get(host, Trouble()).until

    def is_short(self, now: float) -> bool:
        """It had no capacity, and is not to be asked yet."""
        return now < self._capacity.until

    def short(self, now: float) -> bool:
        """The pool has no capacity. Whether that is new."""
        new = not self._capacity.count
        self._capacity = self._capacity.again(now, start=True)
        return new

    def started(self) -> None:
        """The pool has capacity."""
        self._capacity = Trouble()

    def stood(self, host: str) -> None:
        """A worker there has stood."""
        self._troubles.pop(host, None)

    def there(self, hosts: Sequence[Host]) -> None:
        """What was said of a host goes with it; who comes under that name is another one."""
        names = {host.name for host in hosts}
        self._noticed = {name: until for name, until in self._noticed.items() if name in names}
        self._advised &= names

    def _trouble(self, host: str) -> Trouble:
        return self._troubles.get(host, Trouble())
