"""All attacks, in the order in which they are made."""

from __future__ import annotations

from attack import authors, folders, handed, inside, listeners, port, sight, telling, thief
from attack.base import Attack

PARTS = (port, sight, thief, listeners, folders, authors, handed, telling, inside)
ATTACKS: tuple[Attack, ...] = tuple(attack for part in PARTS for attack in part.ATTACKS)
