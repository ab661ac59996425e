"""A checkpoint's manifest: what is known of it unopened."""

from __future__ import annotations

from typing import Annotated

import msgspec

from farandole.membership.values import Count, Name, Text

Facts = Annotated[tuple[tuple[Text, Text], ...], msgspec.Meta(max_length=100_000)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`run`: the run's name, which is its folder's; `run_id`: its identity, "" in those of earlier versions.
    `facts`: of its signature; `finite`: all parameters, and the last loss.
    """

    epoch: Count
    offset: Count
    step: Count
    whole: bool
    run: Name
    worker: Name
    seed: int
    facts: Facts
    time: float
    size: Count = 0
    sha256: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    finite: bool = True
    run_id: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""

    def fact(self, name: str) -> str:
        return dict(self.facts).get(name, "")
