"""What a bench's workers and its verb tell each other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from farandole.bench.terms import (
    CONTESTANTS,
    PREFIX,
    VARIABLE,
    BenchFinished,
    BenchReports,
    BenchTerms,
    Block,
    Record,
    StepSeconds,
    environment,
    terms_of,
    write,
)
from farandole.errors import UsageError
from farandole.settings import Settings
from tests.support.bench_log import log_of

TERMS = BenchTerms(workers=2, steps=4, rounds=3)


def block(round_: int, contestant: str = "alone") -> Block:
    return Block(round=round_, contestant=contestant, samples=8, spent=(StepSeconds(step=0.5, data=0.25),))


def test_each_contestant_comes_first_as_often() -> None:
    orders = [TERMS.order(CONTESTANTS, round_) for round_ in range(6)]
    assert Counter(order[0] for order in orders) == dict.fromkeys(CONTESTANTS, 2)
    assert all(sorted(order) == sorted(CONTESTANTS) for order in orders)


def test_terms_travel_in_the_environment() -> None:
    environ = environment(TERMS)
    assert [*environ] == [VARIABLE]
    assert terms_of(Settings.read(environ).bench) == TERMS


@pytest.mark.parametrize("name", ["workers", "steps", "rounds"])
def test_what_is_below_its_limit_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--{name} 0\b.*\b1\b"):
        msgspec.structs.replace(TERMS, **{name: 0})


def report(folder: Path, worker: str, record: Record) -> None:
    with log_of(folder, worker):
        write(record)


def test_what_is_told_is_read_once_and_whole(tmp_path: Path) -> None:
    told = BenchReports(tmp_path)
    assert not told.read()
    with log_of(tmp_path, "w1") as log:
        log.write_bytes(b"the script prints something, and no end of the line")
        write(block(0))
    report(tmp_path, "w2", block(0))
    with log_of(tmp_path, "w3") as other:
        other.write_bytes(b"{}\n")
    assert told.read()
    assert not told.read(), "nothing is new"
    with log.open("ab") as file:
        torn = PREFIX + msgspec.json.encode(block(1))
        file.write(torn[:40])
        file.flush()
        assert not told.read()
        file.write(torn[40:] + b"\n")
        file.flush()
    assert told.read()
    assert told.records == {"w1": [block(0), block(1)], "w2": [block(0)]}


def test_a_round_is_told_of_when_all_workers_have_begun_the_next_or_are_done(tmp_path: Path) -> None:
    told = BenchReports(tmp_path)

    def rounds() -> int:
        told.read()
        return told.rounds(TERMS)

    report(tmp_path, "w1", block(0))
    report(tmp_path, "w1", block(1, "ddp"))
    assert rounds() == 0, "of w2 nothing is known"
    report(tmp_path, "w2", block(0))
    assert rounds() == 0
    report(tmp_path, "w2", block(1))
    assert rounds() == 1
    report(tmp_path, "w1", BenchFinished())
    assert rounds() == 1
    report(tmp_path, "w2", BenchFinished())
    assert rounds() == TERMS.rounds
