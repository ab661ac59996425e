"""A random model of a spot market, fitted to a trace: other histories of the same kind.

A trace is a sequence of *stays*: how many machines there were, and for how many intervals. Fitted to it is a
semi-Markov chain: of each number of machines it knows all stays of the trace, each with its length and the number that
came next. A drawn trace begins as the trace does. It draws one of the stays at that number, all with the same
probability, goes on with the number that came next, and so on. So it has the trace's numbers, lengths and changes, in
another order; it does not have the trace's hours of the day.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import groupby

from farandole.market.traces import MarketTrace


def drawn(trace: MarketTrace, seed: int) -> MarketTrace:
    """Return a trace of the same length, drawn from the model that is fitted to `trace`.

    The same seed gives the same trace; zones with other names differ.
    """
    stays = [(count, sum(1 for _ in same)) for count, same in groupby(trace.counts)]
    chain = defaultdict[int, list[tuple[int, int]]](list)
    for place, (count, length) in enumerate(stays):
        following = stays[(place + 1) % len(stays)][0]  # after the last stay comes the first
        chain[count].append((length, following))
    rng = random.Random(f"{seed} {trace.name}")
    counts, now = list[int](), trace.counts[0]
    while len(counts) < len(trace.counts):
        length, following = rng.choice(chain[now])
        counts += [now] * length
        now = following
    return replace(trace, counts=tuple(counts[: len(trace.counts)]))
