"""The run's state as a whole: handed to joiners, written to checkpoints, taken back from either.

Beside what is replicated it says where the run is, how many workers began each step so far (its history, which a replay
needs: lines of metrics die with who has not sent them yet), and which `origin` it comes from. An origin is a beginning
of the state, from nothing or from a checkpoint: everyone who was handed the state has the origin of who began it. The
ledger needs it, to tell steps that count from those that a resumed run has taken again.
"""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import Any

from farandole import digest
from farandole.checkpoint import restore
from farandole.checkpoint.restore import Found
from farandole.checkpoint.saver import Saver
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import Manifest, Store, reaching
from farandole.control.client import Client
from farandole.control.paths import CHECKPOINTS
from farandole.data.ledger import Ledger
from farandole.digest import StepDigest
from farandole.errors import FarandoleError, RunEnded, UsageError
from farandole.membership.messages import Checkpoints, Digests, Restored, Signature
from farandole.plan.shards import Position
from farandole.rates import Rates
from farandole.replica import Replica


class RunState:
    """One worker's.

    Attributes:
        position: the step that the state is the beginning of.
        whole: whether it is that of a whole step; not so between a step's end and the next one's beginning.
    """

    def __init__(
        self,
        replica: Replica,
        client: Client,
        settings: Checkpoints,
        *,
        folder: Path | None,
        seed: int,
        signature: Signature,
        epochs: int,
        ledger: Ledger | None,
        rates: Rates,
    ) -> None:
        self.position = Position()
        self.whole = True
        self._replica = replica
        self._digest = StepDigest(replica)
        self._rates = rates
        self._client = client
        self._run = folder.name if folder else ""
        self._seed = seed
        self._facts = signature.facts
        self._epochs = epochs
        self._ledger = ledger
        self._origin = ""
        self._history: list[tuple[int, int]] = []
        self._found = Found()
        self._has_state = False  # other than the script's own beginning
        own = settings.url or (str(folder / CHECKPOINTS) if folder else "")
        self._places = [place for place in (own, settings.resume) if place]
        self._saver: Saver | None = None
        if own:
            every = Every.parse(settings.every)
            self._saver = Saver(Store(own), every, settings.keep, describe=self._manifest, tell=client.tell)

    # --- at a step's beginning and end -----------------------------------------------------------------------

    def digest(self) -> int:
        """Of the replica as the step in hand began."""
        return self._digest.at(self.position.step)

    def digests(self) -> Digests:
        """Of everything in the replica as it is between two steps, or as the step in hand began."""
        if not self.whole:
            self._replica.keep_buffers()
        try:
            names, digests = digest.each(self._replica)
        except (RuntimeError, FarandoleError) as error:  # the others are not to wait for it
            print(f"farandole: no digests of the replica: {error}", file=sys.stderr, flush=True)
            names, digests = (), ()
        return Digests(step=self.position.step, names=names, digests=digests)

    def begin(self, position: Position) -> None:
        self._replica.keep_buffers()
        self.position, self.whole = position, True

    def began(self, workers: int) -> None:
        """So many workers have begun the step in hand."""
        if not self._history or self._history[-1][1] != workers:
            self._history.append((self.position.step, workers))

    def checkpoint(self, *, leads: bool) -> None:
        """Copy the state for a checkpoint, if one is due and this worker `leads`."""
        if self._saver:
            self._saver.step_begins(self.position, self.snapshot, leads=leads)

    # --- handed on and taken over ----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The state by reference, as of the step's beginning."""
        before = [[step, workers] for step, workers in self._history if step < self.position.step]
        return {**self._replica.state(), "rates": self._rates.state(), "history": before, "origin": self._origin}

    def take(self, state: dict[str, Any]) -> None:
        """Take over what others hold."""
        self._load(state)
        self._enter(state["origin"])

    def restore(self) -> Position:
        """The newest checkpoint, for who has to begin the first view; the script's own beginning if there is none.

        Raises:
            FarandoleError: there are checkpoints that can't be used, or can't be reached.
            RunEnded: there is none, and this worker has taken over a state before.
        """
        with reaching(" and ".join(self._places)):
            found = self._found = restore.find(self._places)
        if found.manifest is None:
            if self._has_state:
                raise RunEnded("the state that this worker had taken over is no longer the run's; start it again")
            return Position()
        found.differences = restore.compare(found.manifest, self._facts, self._seed, found.path)
        if found.position.epoch >= self._epochs:
            raise UsageError(
                f"{found.path}: of epoch {found.position.epoch}, and the script asks for {self._epochs}: nothing is "
                f"left to train; ask run.steps for more epochs"
            )
        self._load(found.state)
        self._has_state = True
        return found.position

    def _load(self, state: dict[str, Any]) -> None:
        self._replica.load(state)
        if "rates" in state:  # not so in a checkpoint from before there were rules
            self._rates.load(state["rates"])
            self._history = [(step, workers) for step, workers in state["history"]]

    def begin_run(self, position: Position) -> None:
        """The first view begins with the state that `restore` has left here."""
        found, self._found = self._found, Found()
        origin = secrets.token_hex(8)
        if self._ledger:
            parent = found.state["origin"] if found.state else ""
            self._ledger.resumed(origin=origin, step=position.step, parent=parent)
        self._enter(origin, position)
        if found.path or found.damaged:
            self._client.tell(
                Restored(
                    step=position.step,
                    path=found.path,
                    damaged=tuple(found.damaged),
                    differences=tuple(found.differences),
                )
            )

    def _enter(self, origin: str, position: Position | None = None) -> None:
        self._origin, self._has_state = origin, True
        if self._ledger:
            self._ledger.entered(origin=origin)
        if self._saver:
            self._saver.enter((position or self.position).step)

    # --- the last one ----------------------------------------------------------------------------------------

    def save(self, between: bool) -> str:
        """Write the last checkpoint and return its path; "" if the state is that between two steps and `between` is
        false. With `between` it is none to go on from, whole or not.

        Raises:
            OSError: its place is full or can't be reached.
            FarandoleError: it has none.
        """
        if self._saver is None:
            raise FarandoleError("this worker has no run folder to save to")
        if not self.whole and not between:
            return ""
        if not self.whole:
            self._replica.keep_buffers()
        return self._saver.save(self.position, self.snapshot(), whole=self.whole and not between)

    def _manifest(self, position: Position, whole: bool) -> Manifest:
        return Manifest(
            epoch=position.epoch,
            offset=position.offset,
            step=position.step,
            whole=whole,
            run=self._run,
            worker=self._client.worker,
            seed=self._seed,
            facts=self._facts,
            time=time.time(),
        )
