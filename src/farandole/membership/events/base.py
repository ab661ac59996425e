"""What all events have: a name and a time."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from farandole.membership.values import Seconds

Step = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]  # -1: before the first
Names = tuple[str, ...]


def _in_words(struct: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", struct).lower()


class Recorded(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="event",
    tag=_in_words,
):
    """`time`: Unix time in seconds, set by whoever writes the event down; who decides has no clock."""

    time: Seconds = 0.0
