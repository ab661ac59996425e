"""Bugs for the order of an exchange, its tags, the member and the session: a place in the shipped file, and what is put
there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.collective import order, tags
from farandole.membership import member, session

SERVE = "serve += [Await(bucket), Take(landing[bucket]), Add(bucket, *cut(bucket, worker), landing[bucket])]"
WORDS = "serve += [*map(Take, gathered), Vouch(), Send(words), Take(words), End()]"
OWN = "serve.append(Send(sums(bucket, own=True)))"
POST = "serve.append(Post(landing[bucket + LANDINGS]))"
SCATTER = "scatter=tuple(scattered(bucket) for bucket in numbers),"
IN_THE_ORDER = (
    ("if isinstance(act, Send):", "if False:  # settles no slice and no word"),
    ("if not scattered[bucket]:", "if False:  # settles no partial sum"),
    (SERVE, SERVE.replace("Take(landing[bucket]), ", "")),
    (SERVE, f"serve.append(Send(sums(bucket, own=True))); {SERVE}"),
    (OWN, "serve.append(Send(sums(bucket, own=False)))"),
    (OWN, "serve += [Send(sums(bucket, own=True))][:bucket]"),
    (POST, "serve.insert(-1, Post(landing[bucket + LANDINGS]))"),
    ("in enumerate(own)", "in enumerate(reversed(own))"),
    ("*cut(bucket, worker), node, landing)", "*cut(bucket, worker), node, min(landing, 1))"),
    ("*cut(bucket, worker), node, landing)", "*cut(bucket, peer), node, landing)"),
    ("held = lineage.assign(shards) if", "held = view.lineage(view.members).assign(shards) if"),
    (SCATTER, SCATTER.replace("for bucket", "if len(lineage.sets) < 2 else () for bucket")),
    (WORDS, "serve += [Vouch(), *map(Take, gathered), Send(words), Take(words), End()]"),
    (WORDS, "serve += [*map(Take, gathered[:-1]), Vouch(), Send(words), Take(words), End()]"),
    (WORDS, "serve += [*map(Take, gathered), Vouch(), Send(words), End()]"),
)
PLANTED: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (  # a module, a place in it, a bug, options
    (member, "if (view, round_) != (self.view.number, self.round):", "if round_ != self.round:", {}),
    (
        member,
        "elif message.commit:\n            self._next(None)",
        "elif message.commit:\n            self.lineage = None",
        {},
    ),
    *((order, place, by, {}) for place, by in IN_THE_ORDER),
    (order, "self.serve[served:]", "self.serve[served + 1 :]", {"focus": ("kill",)}),
    (tags, "view.number % VIEWS << 21 | ", "", {}),
    (tags, "bucket << 9 | ", "", {"focus": ("break",)}),
)
PLANTED += (
    (session, "or self._lease.over(now)", "", {"focus": ("resets",)}),
    (
        session, "if stands and message not in self._standing:",
        "if stands and not isinstance(message, m.Differs):", {"focus": ("resets", "coordinator"), "drift": True},
    ),
    (session, "self._outgoing.extend(self._standing)", "pass", {}),
    (session, "self.attempt += 1", "self.attempt = 1", {"focus": ("reset", "dumb")}),
)  # fmt: skip
