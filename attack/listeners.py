"""At the workers' own ports, where Gloo listens: while groups stand, and while new ones are made. See `gloo.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attack import gloo
from attack.base import STRANGER, Attack, Succeeded
from attack.live import Live

SPARE = 64  # descriptors that a worker may have more of, afterwards
CROWD_S, JOIN_S = 2.0, 60.0
JOINS = 2


def crowding(live: Live) -> str:
    """Two thousand connections to everybody who listens, kept as long as may be."""
    before = live.descriptors()
    with live.stranger(_for(CROWD_S, gloo.crowd)) as stranger:
        live.go_on(2)
        during = live.descriptors()
    told = json.loads(stranger.got(0))
    if max(during, live.descriptors()) > before + SPARE:
        raise Succeeded(f"a worker's descriptors went from {before} to {during}")
    return f"{told['held']} connections to {told['listeners']} ports; descriptors: {before} before, {during} then"


def racing(live: Live, *, spoil: bool) -> str:
    """Unauthenticated peers take all places of a new listener first; external workers join and leave meanwhile."""
    watch = live.run.watch
    told: list[dict[str, int]] = []
    for _ in range(1 if spoil else JOINS):
        external_workers = len(live.run.external_workers)
        with live.stranger(_while_joining(live), spoil) as stranger:
            live.run.join()
            live.until(lambda: len(watch.members) > len(live.honest), JOIN_S, "the guest in the view")
            live.go_on(1)
            _done(live).touch()
        _done(live).unlink()
        told.append(json.loads(stranger.got(0)))
        live.run.external_workers[external_workers].terminate()
        live.until(lambda: len(watch.members) == len(live.honest), JOIN_S, "the guest's leave")
    tried, taken, said = (sum(each[name] for each in told) for name in ("tried", "taken", "bytes"))
    if taken or said:
        raise Succeeded(f"a stranger had {taken} places, and was told {said} bytes")
    return f"{len(told)} joins; {tried} tries at places of peers, none had, nothing heard"


def _done(live: Live) -> Path:
    return live.place / "joined"


def _for(seconds: float, act: Callable[..., dict[str, int]]) -> Callable[[], bytes]:
    until = time.monotonic() + seconds
    return lambda: json.dumps(act(lambda: time.monotonic() > until)).encode()


def _while_joining(live: Live) -> Callable[[bool], bytes]:
    done, until = _done(live), time.monotonic() + JOIN_S
    return lambda spoil: json.dumps(gloo.race(lambda: done.exists() or time.monotonic() > until, spoil=spoil)).encode()


ATTACKS = (
    Attack(name="gloo: a crowd at every port", who=STRANGER, act=crowding, own_network=True, short=True),
    Attack(
        name="gloo: a peer's place in a new group", who=STRANGER, act=partial(racing, spoil=False), own_network=True
    ),
    Attack(name="gloo: messages that end a process", who=STRANGER, act=partial(racing, spoil=True), own_network=True),
)
