"""What each of this worker's rounds is for, and which come after a call round; `calls` says why."""

from __future__ import annotations

from farandole.membership.values import Call


class CallRounds:
    """Knows the sizes of the newest training step's messages, as all members of its view do."""

    def __init__(self) -> None:
        self._sizes = ""

    def enter(self) -> None:
        """This worker comes in anew: the others know the sizes of its first step."""
        self._sizes = ""

    def due(self, sizes: str, step: int, *, trains: bool, doing: str) -> tuple[Call | None, Call]:
        """The call round that has to come first, if one has to, and the round itself.

        `sizes`: of the round's messages. `doing`: what was called, where that is no training step, in words that are
        equal on all workers.
        """
        if not trains:
            call = Call.of(doing or f"something after step {step}", sizes)
            return call, call
        known, self._sizes = self._sizes or sizes, sizes
        other = Call.of(f"step {step}, of which other parameters are trained", sizes)
        return (other if sizes != known else None), Call.of(f"step {step}", sizes)
