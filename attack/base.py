"""What an attack is: a name, who makes it, and a function that does it to a live run and says what was seen.

The function raises `Succeeded` where the attacker got what it wanted. What holds for every attack (the run goes on in
its view, no secret is in what strangers received) it need not look at: `live.Live.complaints` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attack.live import Live

STRANGER = "stranger on the network"
USER = "another local user"
HOLDER = "ticket holder"
MEMBER = "member"
AUTHOR = "a file's author"


class Succeeded(Exception):
    """The attacker got what it wanted: the message says what."""


class NotMade(Exception):
    """The attack could not be made, so it shows nothing: the message says why."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`act` returns what was seen, in a few words.

    `needs_root`: without another user's process it shows nothing. `own_network`: it goes for every port that it finds,
    so there must be nobody else's. `kills_coordinator`: that one is another afterwards. `short`: part of what `make
    test` shows.
    """

    name: str
    who: str
    act: Callable[[Live], str]
    needs_root: bool = False
    own_network: bool = False
    kills_coordinator: bool = False
    short: bool = False
