"""What passes between a worker's training side and its session with the coordinator: two values, one each way.

The training side is told by `Instructions`, which it looks at whenever it waits or begins something; the coordinator
hears of it by an `Activity` in each heartbeat. Neither ever waits for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from farandole.membership.member import Exit, Save


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What the training side is doing, as `Heartbeat` says it."""

    epoch: int = 0
    done: int = 0
    waits: bool = False
    whole: bool = False
    shard_us: int = 0
    shards: int = 0
    of: int = 0
    time_us: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Instructions:
    """What the coordinator has told the training side, which takes up `save` and `save_at_once` by putting them back.

    Attributes:
        exit: it is to go; with `orphaned`, once it has saved the state that it holds, which nobody else may hold.
        save: the last checkpoint is asked for.
        saves: this worker writes the checkpoints while the run trains; with `save_at_once`, the first one without
            waiting until one is due, since another worker could not write it.
    """

    exit: Exit | None = None
    orphaned: bool = False
    save: Save | None = None
    saves: bool = False
    save_at_once: bool = False

    def leave(self, exit_: Exit) -> None:
        """The first reason counts."""
        self.orphaned = self.orphaned or (exit_.save and self.exit is None)
        self.exit = self.exit or exit_
