"""Who holds a ticket and is no member: guests that connect, say what is not theirs to say, and never ask in."""

from __future__ import annotations

import asyncio

from attack import lines
from attack.base import HOLDER, Attack, Succeeded
from attack.live import Live
from farandole.control.paths import METRICS


def forging(live: Live) -> str:
    """Lines of steps and events that never were, and what no reader expects: see `lines.py`."""
    wrong = asyncio.run(lines.forge(live.ticket))
    live.go_on()
    status = live.run.command("status")
    live.until(lambda: status.poll() is not None, 20, "an answer to `farandole status`")
    if lines.forged((live.folder / METRICS).read_bytes()):
        raise Succeeded("forged lines are in metrics.jsonl")
    if wrong or status.returncode != 0:
        raise Succeeded("; ".join(wrong) or "`farandole status` failed")
    return f"{len(lines.NOT_ITS_OWN)} lines left out, {len(lines.NONE_AT_ALL)} connections closed"


ATTACKS = (Attack(name="holder: forged lines of metrics", who=HOLDER, act=forging, short=True),)
