"""Who is in the view: a fourth worker that computes what it should, and tells the coordinator what is not so."""

from __future__ import annotations

import sys
from functools import partial

from attack.base import MEMBER, Attack, Succeeded
from attack.insider import KINDS, SAID
from attack.live import Live
from farandole.control.run_folder import TICKET

JOIN_S, SAY_S = 60.0, 30.0
MOST_VIEWS = 30  # that all that it says may lead to


def misbehaving(kind: str, live: Live) -> str:
    watch = live.run.watch
    command = [sys.executable, "-m", "attack.insider", kind, str(live.folder / TICKET), *live.run.job]
    said = live.run.output.read_text(errors="replace").count(SAID)
    external_worker = live.run.start(command)
    live.run.external_workers.append(external_worker)
    try:
        live.until(
            lambda: len(watch.members) > len(live.honest) or external_worker.poll() is not None,
            JOIN_S,
            "a fourth worker",
        )
        views, lost = watch.seen["view"], watch.seen["lost"]

        def over() -> bool:
            said_all = live.run.output.read_text(errors="replace").count(SAID) > said
            return said_all or watch.seen["lost"] > lost or external_worker.poll() is not None

        live.until(over, SAY_S, "the end of what it says")
        live.go_on()
        came, out = watch.seen["view"] - views, watch.seen["lost"] > lost
        if came > MOST_VIEWS:
            raise Succeeded(f"{came} views were made for it")
        return f"{came} views; it {'is put out' if out else 'may stay'}"
    finally:
        external_worker.kill()
        external_worker.wait()


ATTACKS = tuple(
    Attack(name=f"member: {kind}", who=MEMBER, act=partial(misbehaving, kind), short=kind == "far-ahead")
    for kind in KINDS
)
