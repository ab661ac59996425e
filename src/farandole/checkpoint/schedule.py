"""The schedule of checkpoints: by time, by steps, or never. It is pure: the caller passes the time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from farandole.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)|(\d+)steps?")


@dataclass(frozen=True)
class Every:
    """The period of checkpoints, in seconds or in steps; both 0: never."""

    seconds: float = 0.0
    steps: int = 0

    @staticmethod
    def parse(text: str) -> Every:
        """Parse "10m", "30s", "2h", "500steps" or "never".

        Raises:
            UsageError: the text has another form, or the period is zero.
        """
        if text == "never":
            return Every()
        form = _FORM.fullmatch(text) if len(text) <= 16 else None
        number, unit, steps = form.groups() if form else ("", "", "")
        every = Every(steps=int(steps)) if steps else Every(seconds=float(number or 0) * _UNITS.get(unit or "s", 0))
        if every == Every():
            raise UsageError(f'checkpoint every {text!r}: use "10m", "30s", "2h", "500steps" or "never"')
        return every

    def is_due(self, step: int, now: float, *, last_step: int, last_time: float) -> bool:
        """Return True if a checkpoint is due at the beginning of `step`, at time `now` in seconds.

        The last checkpoint was made or missed at `last_step` and `last_time`. Step numbers decide, so that each worker
        that writes checkpoints chooses the same steps.
        """
        if self.steps:
            return step // self.steps > last_step // self.steps
        return self.seconds > 0 and now - last_time >= self.seconds
