"""Settings that a script alters while it trains: noticed as the next inner loop begins, and the same on all workers.

What counts is what is in force where shards are computed, so each step looks as its inner loop begins, when the loop's
body has done what it does. What was altered since the worker asked in belongs to the run's state like any value that a
script sets: joiners and resumed runs get it. All settings are in the digest of the next step, so one that is altered on
one worker alone ends the run as any replica does that differs, by its name (`training/digest.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.numerics import settings


class Alterations:
    """Of the training thread. Begins with the settings as they are."""

    def __init__(self) -> None:
        self._first = dict(settings.facts())
        self._known = dict(self._first)
        self._values = settings.values()

    @property
    def known(self) -> Mapping[str, str]:
        """All settings, as they were when last looked at."""
        return self._known

    @property
    def altered(self) -> dict[str, str]:
        """Those that are others than in the beginning."""
        return {name: value for name, value in self._known.items() if self._first[name] != value}

    def look(self) -> list[tuple[str, str, str]]:
        """What was altered since the last look: names, and their values before and now."""
        values = settings.values()
        if values == self._values:
            return []
        self._values = values
        found = [(name, self._known[name], now) for name, now in settings.facts() if self._known[name] != now]
        self._known.update((name, now) for name, _, now in found)
        return found

    def take(self, altered: Mapping[str, str]) -> None:
        """Set what the run had altered by then, and nothing else: the rest is as it was when this worker asked in."""
        for name, first in self._first.items():
            value = altered.get(name, first)
            if self._known[name] != value:
                settings.put(name, value)
                self._known[name] = value
        self._values = settings.values()
