"""From a seed to the faults of one run. Pure: the same seed gives the same schedule, on any machine.

A blow says what is done, when, and to whom. *When* is a delay after an event of the run, most of them those of the
protocol itself ("right after a view is proposed"), because that is where the interesting interleavings are; or after
the blow before. *To whom* is a role, since ids and ranks are known only when it is struck.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

# What the version under test does not survive. Each is one of KINDS, and chosen once it is taken out of here.
OFF: frozenset[str] = frozenset()

KINDS = {
    "kill": 8,  # kill -9
    "freeze": 3,  # SIGSTOP for less than is ever suspected
    "freeze at the limit": 0.7,  # for about as long
    "freeze for long": 0.7,  # for longer: it is evicted, and wakes up as a stranger
    "notice": 2,  # SIGTERM
    "release": 2,
    "scale": 3,
    "join": 3,  # by hand
    "refusals": 1,  # external workers that are not let in: one with other data, then one whose replica is unlike
    "freeze coordinator": 2,
    "kill coordinator": 3,
    "kill everyone": 0.7,
    "hang": 0.7,  # the script of one stands still for good: its peers report it
    "hang up": 1,  # SIGHUP, as when a terminal is closed
    "kill loader": 2,  # a loader process of one
    "edit": 1,  # the script's file is another from now on
    "fill disk": 0.7,  # of the run's folder, for a while; where one may mount a small one
    "second run": 0.7,  # one with this one's place for checkpoints, and a script by itself in this one's folder
    "lie": 1,  # the store acknowledges the next state, and keeps half of it
}
WORKERS_STRUCK = (
    "kill", "freeze", "freeze at the limit", "freeze for long", "notice", "release", "hang", "hang up", "kill loader",
)  # fmt: skip
LONG = ("freeze at the limit", "freeze for long", "hang")  # take seconds: at most one of them a run
FLOOR_S, HEARTBEAT_TIMEOUT_S = 1.0, 5.0  # `protocol/failure_detector.py`, and its ceiling
START_S = 6.0
FREEZE_S = {
    "freeze": (0.02, 0.9),
    "freeze at the limit": (FLOOR_S - 0.1, FLOOR_S + 1.0),  # the next heartbeat was due within half a second
    "freeze for long": (HEARTBEAT_TIMEOUT_S + 0.5, HEARTBEAT_TIMEOUT_S + 2.0),
    "freeze coordinator": (0.02, 3.0),
    "fill disk": (0.5, 3.0),
}

# What a blow brings about, as events of metrics.jsonl: the next blow waits for one of them, to hit the midst of what
# the one before began. "" is the blow itself, "log" an epoch's end, when everyone has just evaluated.
START = ("", "", "ready", "proposed", "view", "log")
FOLLOWING = {
    "kill": ("", "lost", "lost", "view", "view", "ready", "proposed"),
    "freeze": ("", "", "log"),
    "freeze at the limit": ("", "lost", "view"),
    "freeze for long": ("", "lost", "view"),
    "notice": ("", "notice", "proposed", "proposed", "view", "left"),
    "release": ("", "notice", "proposed", "proposed", "view", "left"),
    "scale": ("", "scale", "notice", "proposed", "view", "ready"),
    "refusals": ("", "", "proposed", "log"),
    "join": ("", "ready", "proposed", "proposed", "view", "view"),
    "freeze coordinator": ("", "", "log"),
    "kill coordinator": ("", "", "", "log"),
    "kill everyone": ("", "lost", "state lost", "ready", "view"),
    "hang": ("", "lost", "view"),
    "hang up": ("", "notice", "proposed", "proposed", "view", "left"),
    "kill loader": ("", "", "log"),
    "edit": ("", "", "log"),
    "fill disk": ("", "", "log"),
    "second run": ("", "", "log"),
    "lie": ("", "", "log", "lost"),
}
ROLES = {"rank 0": 2, "last rank": 1, "member": 4, "joiner": 3, "leaver": 1, "starting": 1}


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One fault. `event`, `delay_s`: when. `role`, `choice`: to whom, `choice` in [0, 1) among several that have it.

    seconds: of a freeze, or of a full disk. workers: of a scale.
    """

    kind: str
    event: str
    delay_s: float
    role: str
    choice: float
    seconds: float
    workers: int

    def __str__(self) -> str:
        after = f"{self.delay_s:.3f} s after {self.event or 'the blow before'}"
        what = {"scale": f" to {self.workers}"}.get(self.kind, f" {self.role}" if self.kind in WORKERS_STRUCK else "")
        return f"{self.kind}{what}{f' for {self.seconds:.2f} s' if self.seconds else ''}, {after}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    workers: int
    minimum: int
    blows: tuple[Blow, ...]


def schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    workers = draw.choice((2, 3, 3, 3, 4))
    minimum = draw.choice((1, 1, 1, 2))
    blows: list[Blow] = []
    for _ in range(draw.randint(3, 6)):
        slow = any(blow.kind in LONG for blow in blows)
        before = blows[-1].kind if blows else ""
        blow = _blow(draw, before, minimum, [*OFF, *(LONG if slow else ())])
        if not blows and not blow.event:  # the first one's delay is from the very start: while processes start
            blow = replace(blow, delay_s=draw.uniform(0.0, START_S))
        blows.append(blow)
    return Schedule(seed=seed, workers=workers, minimum=minimum, blows=tuple(blows))


def _blow(draw: random.Random, before: str, minimum: int, left_out: list[str]) -> Blow:
    kind = _weighted(draw, {kind: weight for kind, weight in KINDS.items() if kind not in left_out})
    event = draw.choice(FOLLOWING[before] if before else START)
    # after an event, mostly within the few milliseconds in which the protocol acts on it
    delay_s = draw.uniform(0.0, 1.5) if not event else draw.choice((0.0, draw.uniform(0, 0.02), draw.uniform(0, 0.3)))
    return Blow(
        kind=kind,
        event=event,
        delay_s=delay_s,
        role=_weighted(draw, ROLES),
        choice=draw.random(),
        seconds=draw.uniform(*FREEZE_S[kind]) if kind in FREEZE_S else 0.0,
        workers=draw.randint(minimum, 4),
    )


def _weighted(draw: random.Random, weights: dict[str, float]) -> str:
    return draw.choices(list(weights), list(weights.values()))[0]
