"""Strangers, tickets, and the record itself."""

from __future__ import annotations

from farandole.membership.events.base import Names, Recorded, Step
from farandole.membership.values import Count


class Stranger(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class Strangers(Recorded, frozen=True, kw_only=True):
    """`more` of what `reason` says were not written down one by one."""

    reason: str
    more: Count


class Malformed(Recorded, frozen=True, kw_only=True):
    source: str
    reason: str


class NotTold(Recorded, frozen=True, kw_only=True):
    reason: str


class TicketIssued(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketRevoked(Recorded, frozen=True, kw_only=True):
    ticket: str


class TicketsDamaged(Recorded, frozen=True, kw_only=True):
    reason: str


class RunStarted(Recorded, frozen=True, kw_only=True):
    """A coordinator has started that knows of none before it: views are numbered from 1 again, and no worker, view or
    stop of an earlier start of the run is in force. `version`: farandole's.
    """

    version: str


class CodeEdited(Recorded, frozen=True, kw_only=True):
    """What is not what it was when the run was on before."""

    files: Names


class LinesLost(Recorded, frozen=True, kw_only=True):
    """So many `lines` of metrics are missing, at least. `step`, `index`: of the last of them, where they stood here.

    `worker`: who was to send them, "" where that is not known.
    """

    worker: str
    lines: Count
    reason: str
    step: Step = -1
    index: Count = 0


class MetricsDamaged(Recorded, frozen=True, kw_only=True):
    lines: Count


class JournalDamaged(Recorded, frozen=True, kw_only=True):
    reason: str


class NotRecorded(Recorded, frozen=True, kw_only=True):
    reason: str


class NotShipped(Recorded, frozen=True, kw_only=True):
    """The books are not beside the checkpoints: another machine could not take the run over as it is now."""

    reason: str


class RecordedAgain(Recorded, frozen=True, kw_only=True):
    """`missing` events are not in the journal."""

    missing: Count
