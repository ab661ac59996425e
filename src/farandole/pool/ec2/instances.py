"""What is known of an instance and of a request for such, and what is due: values, without any rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from farandole.pool.base import Event
from farandole.pool.ec2.market import ON_DEMAND, Offer


@dataclass(frozen=True, kw_only=True)
class Row:
    """An instance as AWS lists it. `tagged`: it bears the run's tag. `state` is AWS's, `shown` the tag that we set."""

    id: str
    state: str
    type: str = ""
    zone: str = ""
    market: str = ON_DEMAND
    tagged: bool = True
    run: str = ""
    request: str = ""
    group: str = ""
    shown: str = ""
    reason: str = ""
    launched: float = 0.0  # Unix time


@dataclass(kw_only=True)
class Instance:
    """`since`: it was launched, or began anew. `heard`: AWS has listed it. `state`: queued, preparing, joined, failed,
    leaving, gone.
    """

    id: str
    since: float
    heard: float
    state: str = "queued"
    reason: str = ""
    row: Row | None = None
    type: str = ""
    zone: str = ""
    market: str = ""
    request: str = ""
    connected: bool = False
    workers: int = 0
    idle: float = math.inf  # since when
    ended: float = -math.inf  # when AWS was last asked to end it
    ending: bool = False

    @property
    def coming(self) -> bool:
        return self.state in ("queued", "preparing") and not self.ending


@dataclass(kw_only=True)
class Request:
    """`open`: instances of it that have not shown yet."""

    token: str
    number: int
    offer: Offer
    asked: float
    open: int
    doubt: float = math.inf  # until when


@dataclass(kw_only=True)
class Due:
    """What is to be done; it is taken to be. `shown`: tags that are to say another state."""

    asks: list[Request] = field(default_factory=list[Request])
    ends: list[str] = field(default_factory=list[str])
    lets_go: list[str] = field(default_factory=list[str])  # agents that are to end
    starts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    shown: dict[str, str] = field(default_factory=dict[str, str])
    forget: list[str] = field(default_factory=list[str])  # hosts that are gone, for certain
    events: list[Event] = field(default_factory=list[Event])
