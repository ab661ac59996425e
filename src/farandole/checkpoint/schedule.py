"""When a checkpoint is due: every so many minutes, or every so many steps, or never. Pure; times are the caller's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from farandole.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)|(\d+)steps?")


@dataclass(frozen=True)
class Every:
    """A period in seconds or in steps; neither: never."""

    seconds: float = 0.0
    steps: int = 0

    @staticmethod
    def parse(text: str) -> Every:
        """ "10m", "30s", "2h", "500steps", "never".

        Raises:
            UsageError: anything else, or a period of zero.
        """
        if text == "never":
            return Every()
        form = _FORM.fullmatch(text) if len(text) <= 16 else None
        number, unit, steps = form.groups() if form else ("", "", "")
        every = Every(steps=int(steps)) if steps else Every(seconds=float(number or 0) * _UNITS.get(unit or "s", 0))
        if every == Every():
            raise UsageError(f'checkpoint every {text!r}: say "10m", "30s", "2h", "500steps" or "never"')
        return every

    def due(self, step: int, now: float, *, last_step: int, last_time: float) -> bool:
        """At the beginning of `step`, the last one having been made or missed at `last_step` and `last_time`.

        Steps are counted by their numbers, so that whoever leads makes checkpoints of the same ones.
        """
        if self.steps:
            return step // self.steps > last_step // self.steps
        return self.seconds > 0 and now - last_time >= self.seconds
