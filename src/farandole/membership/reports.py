"""The messages of an unplanned change: Stop, everyone's report, and how the round goes on."""

from __future__ import annotations

from farandole.membership.comparison import NOTHING, Computed
from farandole.membership.values import Call, Count, Message
from farandole.membership.view import Lineage, View


class Stop(Message):
    """Abandon the view and any proposed one; answer Stopped."""

    stop: int


class Stopped(Message):
    """Answer to Stop: this worker has abandoned its view and will neither end a round nor switch until told.

    `round` is the round it is in (or will begin next), `holds` whether it holds every reduced bucket of it, `view`
    the view applied in it (whole: the coordinator may be another one than proposed it), `lineage` how the round's
    shards were dealt, `synced` whether it holds the state, `step` the training step
    (for the record only), `call` what it has called in the round, if it has begun. `prepared` is the newest view that
    it is ready to switch to, as in its control word. `held` and `checked` are what it has computed of shards that two
    compute; `unproven`: it has not proved itself yet.
    """

    stop: Count
    view: View | None
    round: Count
    step: Count
    holds: bool
    synced: bool
    lineage: Lineage
    call: Call = Call()
    prepared: Count = 0
    held: Computed = NOTHING
    checked: Computed = NOTHING
    unproven: bool = False


class Resume(Message):
    """Go on from `round` in `view`. A receiver behind it commits the round before, which it holds.

    `commit`: the receiver at `round` holds it, as everyone does: it ends the round without a further exchange.
    Otherwise the round's exchange is done (again) under this view, its shards dealt by `lineage`.
    """

    view: View
    round: int
    commit: bool
    lineage: Lineage


class Demoted(Message):
    """Answer to Stopped for a joiner without state: its view is no more, it stays a candidate."""
