"""A faulty member of a simulated run: at a random moment a value in its messages to the coordinator is wrong.

There is one such member in a run, with one wrong value or a few of one kind, in a view of three or more. After a wrong
answer to a stop it freezes, because it would not act on that answer: so the effect of the wrong answer shows in what
the others do. With wrong accusations, heartbeats and claims of a switch it continues to train.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View
from farandole.simulate.process import Process

WRONG = "a wrong value"
IN_A_REPORT = ("round", "round", "has_result", "view", "view", "lineage", "proposed", "beat")
AT_ONCE = ("accuse", "accuse", "storm", "waits", "switched", "differs", "not finite")


@dataclass
class Mistaken:
    """The faulty member, and the kind of its wrong value."""

    worker: Process
    kind: str
    remaining: int = 1

    @property
    def name(self) -> str:
        return self.worker.name

    def twist(self, rng: random.Random, message: m.Message) -> m.Message:
        """Returns the message that it sends instead of `message`."""
        if (
            isinstance(message, m.Heartbeat)
            and self.kind == "waits"
            and self.remaining
            and self.worker.state_machine.view
        ):
            self.remaining -= 1
            peers = [peer for peer in self.worker.state_machine.view.members if peer != self.name]
            return msgspec.structs.replace(message, blocked_on=rng.choice(peers) if peers else "")
        if (
            not isinstance(message, m.Stopped)
            or self.kind not in IN_A_REPORT
            or not self.remaining
            or not message.synced
        ):
            return message
        self.remaining = 0
        self.worker.after(0.0, self.worker.freeze, 1e9)
        return msgspec.structs.replace(message, **getattr(self, f"_{self.kind}")(rng, message))

    def _round(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        away = rng.choice((-2, -1, 1, 1, 2, 3, 1000, 2**50))
        return {"round": max(0, report.round + away), "has_result": rng.random() < 0.5}

    def _beat(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        del rng, report
        return {"round": max(0, self.worker.state_machine.round - 1), "has_result": True}

    def _has_result(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        del rng
        return {"has_result": not report.has_result, "cannot_end": not report.cannot_end}

    def _view(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        view = report.view
        assert view is not None
        members = rng.choice((view.members[1:], view.members[::-1], (self.name,), view.members))
        number = view.number + rng.choice((0, 1, 5))
        forged = View(number=number, members=members, group=rng.choice((view.group, number)), shares=())
        return {"view": forged, "lineage": forged.lineage(members)}

    def _lineage(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        first = report.lineage.sets[0] if report.lineage.sets else ()
        sets = rng.choice(((first, (self.name,)), ((self.name,) * 3,), (first, first, first), (first[::-1],)))
        return {"lineage": Lineage(sets=sets)}

    def _proposed(self, rng: random.Random, report: m.Stopped) -> dict[str, Any]:
        """Reports as if the proposed view were in force."""
        pending = self.worker.state_machine.pending
        if pending is None:
            return {}
        away = rng.choice((0, 1))
        return {
            "view": pending,
            "round": report.round + away,
            "lineage": pending.lineage(pending.synced),
            "has_result": False,
        }


class Mistakes:
    """The part of `World` that has a faulty member. Subclasses transport the messages."""

    rng: random.Random
    mistaken: Mistaken | None = None
    workers: dict[str, Process]
    say: Callable[[str, str], None]

    def wrong(self, target: Process) -> str:
        """Makes `target` faulty, if it is one of three or more members. Returns the kind of fault, "" for none."""
        view = target.state_machine.view
        if self.mistaken or view is None or view.size < 3 or not target.state_machine.synced:
            return ""
        synced = [name for name in view.members if self.workers[name].alive and self.workers[name].state_machine.synced]
        if len(synced) < 3:
            return ""
        kind = self.rng.choice((*IN_A_REPORT, *AT_ONCE))
        self.mistaken = Mistaken(target, kind, remaining=6 if kind == "waits" else 1)
        self.say("fate", f"{target.name} is wrong: {kind}")
        if kind in AT_ONCE:
            for message in self._wrong_messages(target, view, kind):
                target.tell(message)
        return kind

    def _wrong_messages(self, target: Process, view: View, kind: str) -> list[m.Message]:
        peers = [name for name in view.members if name != target.name]
        machine = target.state_machine
        several = self.rng.sample(peers, self.rng.randint(1, len(peers)))
        if kind == "storm":
            several = self.rng.choices([*peers, target.name, *self.workers], k=30)
        if kind in ("accuse", "storm"):
            return [m.Suspect(view=view.number, peer=peer, reason=WRONG) for peer in several]
        if kind == "switched" and machine.pending:
            round_ = self.rng.choice((0, machine.round, machine.round + 1, 2**40))
            return [
                m.Switched(view=machine.pending.number, round=round_, step=self.rng.choice((0, target.step, 2**40)))
            ]
        if kind == "differs":
            return [m.Differs(step=target.step, workers=tuple(several))]
        if kind == "not finite":
            return [m.NotFinite(step=self.rng.choice((target.step, 2**40)), loss="nan")]
        return []
