"""Bugs for the order of an exchange, its tags, the member and the session: a place in the shipped file, and what is put
there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from farandole.collective import schedule
from farandole.protocol.worker import session, state_machine

TAKES, COMMITS = (
    "serve += [*map(Take, gathered if routes.near else spread if routes.far else shared)]",
    "serve += [MakeCommitMessage(), SendMessages(routes.own_commits()), Take(commits)]",
)
SHARE = "yield SendMessages(_of_cuts(results, cuts))"
GATHER = "yield SendMessages(routes.to_gather(bucket))"
SPREAD = "yield Take(shared[bucket])\n            yield SendMessages(routes.to_spread(bucket))"
SCATTER = "scatter=tuple(routes.scattered(bucket) for bucket in numbers),"
IN_THE_ORDER = (
    ("if isinstance(act, SendMessages):", "if False:  # settles no slice and no word"),
    ("if not scattered[bucket]:", "if False:  # settles no partial sum"),
    ("yield Take(near[bucket])", "pass  # folds what is not here"),
    ("yield SendMessages(routes.across(bucket))", "pass  # keeps the host's sums"),
    ("yield Take(taken)", "pass  # sums up what is not here"),
    ("yield Take(taken)", f"{SHARE}; yield Take(taken)"),
    ("yield Take(spread[bucket] if routes.far else shared[bucket])", "pass  # passes on what is not here"),
    (SHARE, "yield from [SendMessages(_of_cuts(results, cuts))][:bucket]"),
    (GATHER, "yield from [SendMessages(routes.to_gather(bucket))][:bucket]"),
    ("*near[:LANDINGS]", "*near[: LANDINGS + 1]"),
    ("*across[:LANDINGS]", "*across[: LANDINGS + 1]"),
    ("all_begun=routes.all_begun,", "all_begun=True,  # overwrites what those who have no shard may use"),
    ("held = lineage.assign(shards) if", "held = view.lineage(view.members).assign(shards) if"),
    (SCATTER, SCATTER.replace("for bucket", "if len(lineage.sets) < 2 else () for bucket")),
    (
        f"{TAKES}\n    {COMMITS}",
        f"{COMMITS}\n    {TAKES}".replace(", SendMessages(routes.own_commits()), Take(commits)]", "]")
        + "\n    serve += [SendMessages(routes.own_commits()), Take(commits)]",
    ),
    (TAKES, TAKES.replace("gathered if", "gathered[:-1] if")),
    (COMMITS, COMMITS.replace(", Take(commits)", "")),
    ("Take(passed_on), ", ""),
)
IN_THE_ROUTES = (
    ("in enumerate(self.own)", "in enumerate(reversed(self.own))"),
    ("*self.stretch(bucket), node, next(landing)\n", "*self.stretch(bucket), node, min(next(landing), 1)\n"),
    ("*self.stretch(bucket), node, next(landing)\n", "*self._stretch_of(bucket, peer), node, next(landing)\n"),
    ("where = 0 if cut in first else next(landing)", "where = min(next(landing), 1)"),
    ("self._of_hosts[self._levels.host(sender)]", "self.nodes_of_host"),
    ("for number, whose in enumerate(self._senders(self._worker), start=1)",
     "for number, whose in enumerate(self._senders(self._worker)[::-1], start=1)"),
    ("(peer, self._worker) if own else", "(peer, self._worker) if not own else"),
)  # fmt: skip
BETWEEN_ZONES = (
    ("yield Take(across[bucket])", "pass  # adds up what is not here"),
    (SPREAD, SPREAD.replace("yield Take(shared[bucket])", "pass  # spreads what is not here")),
    (SPREAD, "yield Take(shared[bucket])  # keeps its strips"),
    ("if routes.one_zone else routes.to_share(bucket)", "if routes.one_zone else ()"),
    ("yield SendMessages(routes.out_of_zone(bucket))", "pass  # keeps the zone's sums"),
    ("*of_zones[:LANDINGS]", "*of_zones[: LANDINGS + 1]"),
    ("return self._across(bucket) if self.far else self._out_of_zone(bucket)", "return self._across(bucket)"),
    ("self._of_zones[levels.zone(sender)]", "self.nodes_of_zone"),
    ("+ len(self.sums_of_hosts(bucket)))", ")  # what comes from its zone and from others lands in one place"),
    ("column, strip, self._worker if own else peer", "column, strip, peer"),
)  # fmt: skip
IN_PIECES = (
    ("if number == len(portions):", "if number == 1:  # overwrites pieces that are not added yet"),
    ("_of_cuts(arrivals[bucket], cuts)", "_of_cuts(arrivals[bucket], portions[0])"),
    ("_of_cuts(results, cuts)", "_of_cuts(results, portions[-1])"),
    ("where = 0 if cut in first else next(landing)", "where = 0"),
    ("self._strips_of(bucket, c, receiver)", "self._strips_of(bucket, c, sender)"),
)  # fmt: skip
PLANTED: tuple[tuple[ModuleType, str, str, dict[str, Any]], ...] = (  # a module, a place in it, a bug, options
    (state_machine, "if (view, round_) != (self.view.number, self.round):", "if round_ != self.round:", {}),
    (
        state_machine,
        "elif message.commit:\n            self._next(None)",
        "elif message.commit:\n            self.lineage = None",
        {},
    ),
    *((schedule, place, by, {}) for place, by in IN_THE_ORDER),
    *((schedule, place, by, {}) for place, by in IN_THE_ROUTES),
    *((schedule, place, by, {"zones": True}) for place, by in BETWEEN_ZONES),
    *((schedule, place, by, {"pieces": True}) for place, by in IN_PIECES),
    (schedule, "self.serve[served:]", "self.serve[served + 1 :]", {"focus": ("kill",)}),
    (schedule, "view.number % VIEWS << 21 | ", "", {}),
    (schedule, "bucket << 9 | ", "", {"focus": ("break",)}),
)
PLANTED += (
    (session, "or self._lease.over(now)", "", {"focus": ("resets",)}),
    (
        session, "if repeats and message not in self._repeated:",
        "if stands and not isinstance(message, m.Differs):", {"focus": ("resets", "coordinator"), "drift": True},
    ),
    (session, "self._outgoing.extend(self._repeated)", "pass", {}),
    (session, "self.attempt += 1", "self.attempt = 1", {"focus": ("reset", "dumb")}),
)  # fmt: skip
