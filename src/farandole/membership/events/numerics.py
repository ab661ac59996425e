"""What the bits of a run depend on, and when they are not promised any more."""

from __future__ import annotations

from farandole.membership.events.base import Names, Recorded, Step


class Numerics(Recorded, frozen=True, kw_only=True):
    """Those of the run's first worker, which hold for the run: versions, settings, and what each operation gives."""

    worker: str
    facts: dict[str, str]


class OtherVersions(Recorded, frozen=True, kw_only=True):
    """It is let in although it has other libraries: all operations of the fingerprint agree."""

    worker: str
    what: Names


class SettingChanged(Recorded, frozen=True, kw_only=True):
    """The script has altered a setting of torch's; `worker` was the first to say so. Once for all who say the same."""

    worker: str
    step: Step
    setting: str
    before: str
    now: str


class UnknownOperator(Recorded, frozen=True, kw_only=True):
    """It is not known to have the same bits on all CPUs; `worker` was the first to say that it runs."""

    worker: str
    operator: str


class BitsNotPromised(Recorded, frozen=True, kw_only=True):
    """Of the steps after `step`, since `worker` differs in `what`."""

    worker: str
    step: Step
    what: Names
