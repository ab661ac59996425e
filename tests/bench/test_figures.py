"""The figures of a bench, from what made-up workers have told."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from farandole.bench.figures import Figures, figures
from farandole.bench.table import notes, parts_table, round_line, steps_table
from farandole.bench.terms import ALONE, DDP, FARANDOLE, BenchTerms, Block, Exchanges, Record, StepSeconds, Unfit
from tests.support.mentioned import mentions

TERMS = BenchTerms(workers=2, steps=4, rounds=2)


def ms(*values: float, **parts: float) -> tuple[StepSeconds, ...]:
    """Steps of so many milliseconds, each with the same parts."""
    return tuple(
        StepSeconds(step=value / 1e3, **{name: part / 1e3 for name, part in parts.items()}) for value in values
    )


def block(round_: int, contestant: str, spent: Sequence[StepSeconds]) -> Block:
    return Block(round=round_, contestant=contestant, samples=16, spent=tuple(spent))


def worker(*, slower: float, waiting: float) -> list[Record]:
    """One that takes so much longer alone, and waits so long with farandole."""
    records: list[Record] = []
    for round_, factor in enumerate((1.0, 2.0)):
        alone = ms(*(factor * (value + slower) for value in (10, 10, 10, 50)), compute=9)
        with_it = ms(*(factor * value for value in (15, 15, 15, 15)), compute=9, folding=1, waiting=waiting)
        records += [
            Exchanges(round=round_, seconds=(0.004, 0.004 + waiting / 1e3, 0.004), all_reduces=(0.02, 0.02, 0.03)),
            block(round_, ALONE, alone),
            block(round_, FARANDOLE, with_it),
            block(round_, DDP, ms(*(4 * [factor * 20]), compute=18)),
        ]
    return records


@pytest.fixture
def found() -> Figures:
    return figures({"w1": worker(slower=0, waiting=3), "w2": worker(slower=2, waiting=1)}, TERMS, 2)


def test_a_round_is_the_median_of_all_workers_and_compared_with_the_floor_of_the_same(found: Figures) -> None:
    alone, ours, ddp = (found.contestants[name] for name in (ALONE, FARANDOLE, DDP))
    assert alone.ms == pytest.approx((12, 24))  # of 10 10 10 50 and 12 12 12 52
    assert ours.ms == pytest.approx((15, 30))
    assert ours.over == pytest.approx((1.25, 1.25)), "a slow round is slow for both"
    assert ddp.over == pytest.approx((20 / 12, 20 / 12))
    assert ours.samples_per_s == pytest.approx(16 / 0.0225)


def test_the_parts_are_those_of_the_middle_half_and_add_up(found: Figures) -> None:
    parts = found.contestants[FARANDOLE].parts
    assert parts.exposed == pytest.approx(1), "what even the last one waits"
    assert parts.slower == pytest.approx(1), "3 and 1, less that, on average"
    every = (
        parts.data, parts.compute, parts.folding, parts.slower, parts.exposed, parts.landing, parts.update, parts.rest,
    )  # fmt: skip
    assert sum(every) == pytest.approx(parts.step)
    steps = sorted([11, 11, 11, 51, 22, 22, 22, 102])  # the mean of both workers
    assert found.contestants[ALONE].parts.step == pytest.approx(sum(steps[2:6]) / 4), "51 and 102 are left out"


def test_hidden_is_what_is_not_exposed_of_an_exchange_by_itself(found: Figures) -> None:
    assert found.by_itself == pytest.approx((4, 4)), "from the last worker's sum on"
    assert found.exposed == pytest.approx((1, 1))
    assert found.all_reduce == pytest.approx((20, 20))
    assert found.hidden == pytest.approx((0.75, 0.75))
    slow = figures({"w1": worker(slower=0, waiting=9), "w2": worker(slower=0, waiting=9)}, TERMS, 2)
    assert slow.hidden == (0, 0), "more exposed than there is: none is hidden"


def test_where_one_worker_can_not_have_ddp_it_is_in_no_figure(found: Figures) -> None:
    assert found.left_out == ""
    records = {"w1": worker(slower=0, waiting=1), "w2": [Unfit(reason="it trains two"), *worker(slower=0, waiting=1)]}
    left = figures(records, TERMS, 2)
    assert [*left.contestants] == [ALONE, FARANDOLE]
    assert mentions("\n".join(notes(left, cores=2)), "ddp", "it trains two")


def test_one_worker_has_no_exchange() -> None:
    terms = BenchTerms(workers=1, steps=4, rounds=2)
    found = figures({"w1": worker(slower=0, waiting=0)}, terms, 2)
    assert found.by_itself == found.exposed == found.hidden == ()
    assert not [*notes(found, cores=1)]


def test_rounds_that_are_not_told_of_yet_are_in_no_figure() -> None:
    records = {name: worker(slower=0, waiting=1)[:4] for name in ("w1", "w2")}
    assert len(figures(records, TERMS, 1).contestants[ALONE].ms) == 1


def shown(found: Figures) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(steps_table(found))
    console.print(parts_table(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tables_have_a_row_a_contestant_and_one_a_part(found: Figures) -> None:
    lines = [line.split() for line in shown(found).splitlines()]
    assert [ALONE, "18.0", "12.0..24.0", "889"] in lines
    assert [FARANDOLE, "22.5", "15.0..30.0", "1.25", "1.25..1.25", "711"] in lines
    [exposed] = [line for line in lines if "exposed" in line]
    assert [cell for cell in exposed if cell[0].isdigit()] == ["1.00"], "it is unknown for other contestants"
    assert ["forward", "and", "backward", "9.00", "9.00", "18.00"] in lines
    assert "…" not in shown(found), "it fits into 80 columns"


def test_the_words(found: Figures) -> None:
    told = "\n".join(notes(found, cores=1))
    assert mentions(told, "4.0 ms", "4.0..4.0", "75%", "75%..75%")
    assert mentions(told, "20.0 ms", "20.0..20.0", "5.0", "5.0..5.0")
    assert mentions(told, "2 workers", "1 core")
    assert mentions(round_line(found, 1), 2, "ms", "alone 24.0", "farandole 30.0", "ddp 40.0")
