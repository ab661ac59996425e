"""What a worker's time goes to: the classes, in one table, and which of them the time between two steps' work is in.

At any moment a worker is in exactly one class, that of its training thread, and it changes from one to the next at
moments that the thread passes anyway (`worker/timing.py`). So the classes add up to the worker's time, by construction.

    who says it   a worker, of itself, in each heartbeat: so many microseconds in each class since its process began
    who keeps it  the coordinator (`accounting.py`), which adds what a worker could not say any more
    who reads it  `membership/account.py`, from the lines of metrics.jsonl

Left out: what a class costs, and which of them is worth anything; that is for whoever reads.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from farandole.membership.values import Count

TimeClass = Literal["start", "spare", "data", "compute", "again", "exchange", "pause", "few", "save", "end", "lost"]
CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)
MEANING: dict[TimeClass, str] = {
    "start": "it starts, until its first step begins",
    "spare": "ready, and no view that takes it is on its way",
    "data": "it waits for a micro-batch",
    "compute": "forward, backward, update, all else the script does",
    "again": "what had been computed before",
    "exchange": "it waits for the others of its step",
    "pause": "a view is stopped, or takes effect",
    "few": "fewer workers are there than --min",
    "save": "the state is copied for a checkpoint",
    "end": "its script has ended, or it leaves",
    "lost": "from its last word until the run let it go",
}
SAID = CLASSES[:-1]  # of itself no worker says that it is lost
Said = Annotated[tuple[Count, ...], msgspec.Meta(max_length=len(SAID))]  # microseconds, in that order; empty: nothing
