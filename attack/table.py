"""All attacks, in the order in which they are made."""

from __future__ import annotations

from attack import authors, door, folders, inside, listeners, thief
from attack.base import Attack

ATTACKS: tuple[Attack, ...] = (
    *door.ATTACKS,
    *thief.ATTACKS,
    *folders.ATTACKS,
    *authors.ATTACKS,
    *listeners.ATTACKS,
    *inside.ATTACKS,
)
