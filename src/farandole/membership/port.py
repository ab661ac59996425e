"""What a driver asks of the worker around it; the thread shell (`worker/port`) and the simulator have one each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from farandole.membership.member import Exit, Save
from farandole.membership.messages import Message, Saved
from farandole.membership.view import Lineage, View
from farandole.plan.shards import Position


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the script wants a round for.

    Attributes:
        shards: how many there are if so many workers begin it; worked out without the lock.
        sizes: of the round's messages, in words.
        trains: it is a training step's: a view that is agreed on takes effect where it begins.
        doing: what else was called, in words that are equal on all workers.
        content: what the port sums up; None: nothing.
    """

    position: Position
    shards: Callable[[int], int]
    sizes: str = ""
    trains: bool = False
    doing: str = ""
    content: Any = None


class Arriving(Protocol):
    """The state on its way; None is what is not there yet."""

    @property
    def header(self) -> tuple[int, Position, Sequence[bool]] | None:
        """The round, its position, and the veterans' requires_grad, without which the buckets would differ."""
        ...

    @property
    def state(self) -> Any: ...


class Exchange(Protocol):
    """Of one view, round after round."""

    @property
    def view(self) -> View: ...

    @property
    def ended(self) -> bool:
        """Whether the round has ended that was started last."""
        ...

    def withhold(self) -> None:
        """Give no word before `release`."""
        ...

    def release(self) -> None: ...

    def finish(self) -> None:
        """All is handed in."""
        ...

    def close(self) -> None:
        """The view is over, in order or not."""
        ...

    def settle(self) -> None:
        """Send what the abandoned round still owes, contents aside."""
        ...


class Port(Protocol):
    """The worker around the driver. The first three are called with the lock held, and must not wait."""

    def tell(self, message: Message) -> None:
        """Tell the coordinator."""
        ...

    def answer(self, save: Save) -> None:
        """Save in the background, and tell the coordinator how that went."""
        ...

    def leave(self, exit_: Exit) -> NoReturn:
        """This worker is done. Raises what ends the script."""
        ...

    def stand_back(self) -> None:
        """This worker has left the view, and only waits for its Goodbye."""
        ...

    def save(self, between: bool) -> Saved:
        """Write the last checkpoint; with `between` even a state between two steps, which is none to go on from."""
        ...

    def digest(self) -> int:
        """Of the replica, as the step in hand begins."""
        ...

    def workers(self, step: int, begun: int) -> int:
        """How many workers count as having begun `step`, when `begun` really have."""
        ...

    def take_up(self, content: Any, shards: int) -> None:
        """A round begins: partial sums of so many shards of `content`, none of them computed."""
        ...

    def open(self, view: View) -> Exchange:
        """The exchange of `view`: the one made ahead, or a new one."""
        ...

    def send_state(self, view: View, round_: int, position: Position) -> None:
        """To the joiners of `view`, as it is now; the sending goes on in the background."""
        ...

    def receive(self, view: View) -> Arriving:
        """Receive the state in the background, from those of `view` who send it."""
        ...

    def renew(self, state: Any) -> None:
        """Take over what has arrived, in place of what this worker holds as of the same step."""
        ...

    def start(self, task: Task, round_: int, shards: int, lineage: Lineage) -> None:
        """Start the round in the exchange that was opened last, over the partial sums that were taken up."""
        ...

    def hand_in(self) -> None:
        """Nothing is left to be computed here."""
        ...
