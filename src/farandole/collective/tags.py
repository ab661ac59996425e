"""The tags of messages: what tells one from another between the same two workers.

A tag is 31 bits, since Gloo's is a C int:

    purpose 1   a training step, or anything else
    view    9   modulo 512
    round   2   modulo 4
    kind    2   partial sum, reduced slice, control word, state
    bucket  8
    node    9   which of its sender's partial sums

The last three, the *place*, are the same in every round; the first three, the *round's*, are added to it.

Where a message and what waits for it differ in size, Gloo ends the process. So their tags must differ where their sizes
might: what the purpose is for says `membership/calls.py`. Within a view rounds go in lockstep, at most one apart, so
two bits tell them apart.

What goes on over the connections of an earlier view (R3) leaves receives behind in them that nothing ends: a message of
a later view that had the same tag would be taken for theirs. The connections are made anew, ahead of the switch, when
they have served half of the 512 numbers (`membership/planned.py`), and that is tried again for as long as the other
half lasts. No view uses connections that have served all of them: `of_round` refuses.
"""

from __future__ import annotations

from farandole.errors import ProtocolError
from farandole.membership.view import View

# Kinds.
PARTIAL, REDUCED, WORD, STATE = range(4)

# Purposes of a round: a training step (or waiting for one), or anything else.
TRAINING, OTHER = range(2)

VIEWS = 512  # numbers that the tags of one group's messages tell apart
ROUNDS = 4
MOST_BUCKETS = 256  # of a layout, which makes them larger rather than more
MOST_SUMS = 512  # of a worker in a round: a contiguous range of shards has at most 62, each loss in a step adds some


def place(kind: int, bucket: int = 0, node: int = 0) -> int:
    """What is the same of a message's tag in every round."""
    assert bucket < MOST_BUCKETS, f"bucket {bucket}: at most {MOST_BUCKETS} buckets"
    assert node < MOST_SUMS, f"node {node}: at most {MOST_SUMS} partial sums a worker"
    return kind << 17 | bucket << 9 | node


def of_round(view: View, round_: int, purpose: int = TRAINING) -> int:
    """What all tags of one round have in common.

    Raises:
        ProtocolError: the tags of this view's group have been used up.
    """
    if view.number - view.group >= VIEWS:
        raise ProtocolError(
            f"view {view.number} is to use the connections of view {view.group}, which are good for {VIEWS} numbers: "
            f"its members could not be connected anew for that long; see what keeps them apart, then resume the run"
        )
    return purpose << 30 | view.number % VIEWS << 21 | round_ % ROUNDS << 19
