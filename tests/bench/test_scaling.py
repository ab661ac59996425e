"""What `farandole bench scaling` runs, and its figures, from what made-up workers have told."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console

import farandole
from farandole.bench.scaling import (
    ScalingResult,
    ScalingRow,
    ScalingRun,
    arguments_of,
    batch_in,
    choices_of,
    contestants_of,
    default_workers,
    filled,
    measured,
    predictions,
    prices_of,
    rows_of,
    runs_of,
    samples_of,
    workers_of,
)
from farandole.bench.scaling_table import chart, notes, scaling_table
from farandole.bench.terms import DDP, FARANDOLE, MODES, Block, Exchanges, Record, RunFacts, StepSeconds, Unfit
from farandole.errors import UsageError
from tests.support.mentioned import mentions

# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, (1, 2)), (2, (1, 2)), (6, (1, 2, 4)), (8, (1, 2, 4, 8)), (15, (1, 2, 4, 8))]
)
def test_the_default_is_powers_of_two_up_to_the_cores(cores: int, counts: tuple[int, ...]) -> None:
    assert default_workers(cores) == counts


def test_lists_are_read_in_order() -> None:
    assert workers_of("4, 1,2") == (1, 2, 4)
    assert choices_of("--mode", "weak,strong", MODES) == MODES
    assert prices_of(["a=0.5", "b=2"]) == {"a": 0.5, "b": 2}
    assert prices_of(["0.4"]) == {"": 0.4}
    assert prices_of([]) == {}


@pytest.mark.parametrize("text", ["0", "-1", "1,x", "", "2,2", "1,,2", "1.5", "99999999999", "²"])
def test_what_is_no_list_of_workers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^--workers {text}: "):
        workers_of(text)


@pytest.mark.parametrize("texts", [["-1"], ["0"], ["nan"], ["inf"], ["much"], ["a=-2"], ["1", "2"], ["a=1", "a=1"]])
def test_what_is_no_price_is_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match=f"^--price {texts[-1]}: "):
        prices_of(texts)


@pytest.mark.parametrize("text", ["both", "strong,strong", "strong,", ""])
def test_what_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--mode {text}: "):
        choices_of("--mode", text, MODES)


def test_all_combinations_of_arguments_are_filled_in() -> None:
    words = ["--batch", "{batch}", "--net={net}", "{other}"]
    combinations = arguments_of(["batch=32,64", "net=a"], words)
    assert combinations == ({"batch": "32", "net": "a"}, {"batch": "64", "net": "a"})
    assert filled(words, combinations[1]) == ("--batch", "64", "--net=a", "{other}")
    assert arguments_of([], words) == ({},)


@pytest.mark.parametrize("texts", [["batch"], ["batch="], ["=1"], ["batch=1", "batch=2"], ["batch=1,1"], ["lr=1"]])
def test_arguments_without_a_place_or_a_value_are_refused(texts: list[str]) -> None:
    with pytest.raises(UsageError, match=f"^--argument {texts[-1]}: "):
        arguments_of(texts, ["{batch}"])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_one_worker_runs_once_for_all_modes_and_transports() -> None:
    runs = runs_of((1, 2), MODES, ("none", "bf16"), ("shared-memory", "gloo"))
    assert len(runs) == len({*runs}) == 2 + 2 * 2 * 2
    assert [(run.mode, run.codec, run.transport) for run in runs if run.workers == 1] == [
        ("strong", "none", "shared-memory"), ("strong", "bf16", "shared-memory"),
    ]  # fmt: skip


def test_ddp_runs_with_one_codec_and_transport() -> None:
    runs = runs_of((1, 2), MODES, ("none", "bf16"), ("gloo",))
    with_ddp = [run for run in runs if DDP in contestants_of(run, "none", "gloo", ddp=True)]
    assert with_ddp == [run for run in runs if run.codec == "none"]
    assert not [run for run in runs if DDP in contestants_of(run, "none", "gloo", ddp=False)]


def test_the_batch_is_constant_or_grows_with_the_workers() -> None:
    whole = farandole.GlobalBatch(64, micro=16)
    each = farandole.PerWorkerBatch(64, micro=16, min_batch=100)
    assert [batch_in(mode, whole, 4).samples(4) for mode in MODES] == [64, 256]
    assert [batch_in(mode, each, 4).samples(4) for mode in MODES] == [100, 256]
    assert {batch_in(mode, batch, 4).micro for mode in MODES for batch in (whole, each)} == {16}


def test_a_training_is_as_long_as_its_epochs_or_its_base_steps() -> None:
    assert samples_of(epochs=3, base_steps=0, epoch_samples=70, base=16) == 210
    assert samples_of(epochs=0, base_steps=5, epoch_samples=70, base=16) == 70, "the last of an epoch is short"
    assert samples_of(epochs=0, base_steps=7, epoch_samples=70, base=16) == 102


# --- figures ----------------------------------------------------------------------------------------------------------

WARM = {"data": 1.0, "compute": 80.0, "folding": 4.0, "landing": 1.0, "update": 9.0}  # ms; of a step of one worker


def steps(ms: float, **parts: float) -> tuple[StepSeconds, ...]:
    return (StepSeconds(step=ms / 1e3, **{name: part / 1e3 for name, part in parts.items()}),) * 4


def report(ms: float, *, began: float, samples: int = 64, waiting: float = 0.0, sent: int = 0) -> list[Record]:
    """What one worker tells: a step with farandole of so many milliseconds, and of 90 under ddp."""
    return [
        RunFacts(began=began, shards=samples // 16, samples=36_000, sent_bytes=sent),
        *([Exchanges(round=0, seconds=(0.005, 0.004 + waiting / 1e3))] if sent else []),
        Block(round=0, contestant=FARANDOLE, samples=samples, spent=steps(ms, waiting=waiting, **WARM)),
        Block(round=0, contestant=DDP, samples=samples, spent=steps(90)),
    ]


def a_run(workers: int, mode: Any = "strong", **facts: Any) -> ScalingRun:
    return ScalingRun(mode=mode, workers=workers, codec="none", transport="shared-memory", **facts)


ONE, TWO, WEAK = a_run(1), a_run(2), a_run(2, "weak")
BOTH = (FARANDOLE, DDP)


@pytest.fixture
def results() -> list[ScalingResult]:
    """100 ms a step of 64 samples with one worker; with two 64 ms, and 128 ms of 128 samples."""
    two = {"w1": report(64, began=1012, waiting=8, sent=10_000_000), "w2": report(64, began=1015, waiting=4, sent=8)}
    weak = {name: report(128, began=1020, samples=128, waiting=4, sent=8) for name in ("w1", "w2")}
    return [
        measured(ONE, {"w1": report(100, began=1010)}, 1000.0, BOTH),
        measured(TWO, two, 1000.0, BOTH),
        measured(WEAK, weak, 1000.0, BOTH),
    ]


def rows(results: Sequence[ScalingResult], **prices: float) -> list[ScalingRow]:
    return rows_of(results, [ONE, TWO, WEAK], MODES, ("shared-memory",), prices, 1, 2)


def test_what_is_measured_of_a_run(results: list[ScalingResult]) -> None:
    alone, two, weak = (result.contestants[FARANDOLE] for result in results)
    assert (two.batch, two.shards, two.samples, two.step_ms) == (64, 4, 36_000, pytest.approx(64))
    assert two.startup_s == 15, "until the last worker has its first step"
    assert two.exposed == pytest.approx(4 / 64), "what even the last one waits"
    assert two.sent_mb == 10, "of the worker that sends most"
    assert two.exchange_ms == pytest.approx((5 + 8) / 2), "the median, each from the last one"
    assert (weak.batch, weak.shards) == (128, 8)
    assert (alone.exposed, alone.sent_mb, alone.exchange_ms) == (None, 0, None)
    ddp = results[1].contestants[DDP]
    assert (ddp.step_ms, ddp.exposed, ddp.sent_mb) == (pytest.approx(90), None, None)


def test_speed_up_efficiency_and_time(results: list[ScalingResult]) -> None:
    one, two, *_, weak_one, weak, _, weak_ddp = rows(results)
    assert (one.samples_per_s, two.samples_per_s, weak.samples_per_s) == pytest.approx((640, 1000, 1000))
    assert (one.speed_up, two.speed_up, weak.speed_up) == pytest.approx((1, 1.5625, 1.5625))
    assert (one.efficiency, two.efficiency) == pytest.approx((1, 0.78125))
    assert two.training_s == pytest.approx(15 + 36), "36,000 samples, after the start"
    assert (weak_one.run.mode, weak_one.measured) == ("weak", one.measured), "it ran once"
    assert (weak_ddp.contestant, weak_ddp.run.workers) == (DDP, 2)
    assert weak_ddp.efficiency == pytest.approx(1)


def test_speed_up_is_over_the_smallest_number_of_workers() -> None:
    four = measured(a_run(4), {"w1": report(50, began=1, sent=8)}, 0.0, (FARANDOLE,))
    two = measured(TWO, {"w1": report(64, began=1, sent=8)}, 0.0, (FARANDOLE,))
    first, second = rows_of([two, four], [TWO, a_run(4)], ("strong",), ("shared-memory",), {}, 1, 4)
    assert (first.over, first.speed_up, first.efficiency, first.predicted) == (2, 1, 1, None)
    assert (second.over, second.speed_up, second.efficiency) == (2, pytest.approx(1.28), pytest.approx(0.64))
    assert second.predicted is None, "no step of one worker is known"


def test_dollars_are_of_all_workers_and_unknown_without_a_price(results: list[ScalingResult]) -> None:
    two = rows(results, cheap=0.5, dear=4.0)[1]
    hours = 2 * 51 / 3600
    assert two.dollars == pytest.approx({"cheap": 0.5 * hours, "dear": 4 * hours})
    assert two.samples_per_dollar == pytest.approx({"cheap": 1000 * 3600 / (2 * 0.5), "dear": 1000 * 3600 / (2 * 4)})
    free = rows(results)[1]
    assert free.dollars == free.samples_per_dollar == {"": None}


def test_the_prediction_takes_the_step_of_one_worker_apart(results: list[ScalingResult]) -> None:
    """Strong: half of 85 ms, 15 ms that do not scale (5 of them the rest), and the exchange."""
    one, two, *_, weak, _, _ = rows(results)
    assert two.predicted == pytest.approx(64 / (85 / 2 + 15 + 6.5) / (64 / 100) / 2)
    assert weak.predicted == pytest.approx(128 / (85 + 15 + 6.5) / (64 / 100) / 2)
    assert one.predicted is None
    assert {row.predicted for row in rows(results) if row.contestant == DDP} == {None}


def test_a_prediction_does_not_know_what_it_predicts(results: list[ScalingResult]) -> None:
    """That of four workers comes from the exchange of two; cores that they share make all of it slower."""
    one, two = (result.contestants[FARANDOLE] for result in results[:2])
    four = msgspec.structs.replace(two, exchange_ms=1e9)
    assert predictions([(1, one), (2, two), (4, four)], 1, 8)[4] == pytest.approx(
        100 / (85 / 4 + 15 + 6.5 * (3 / 4) / (1 / 2)) / 4
    )
    slow = predictions([(1, one), (2, two), (4, four)], 1, 2)[4]
    assert slow == pytest.approx(100 / (2 * (85 / 4 + 15) + 2 * 6.5 * 1.5) / 4)
    uneven = msgspec.structs.replace(four, shards=5)
    assert (
        predictions([(1, one), (2, two), (4, uneven)], 1, 8)[4] < predictions([(1, one), (2, two), (4, four)], 1, 8)[4]
    )


def test_ddp_that_is_left_out_has_no_row() -> None:
    reports = {"w1": [*report(100, began=1), Unfit(reason="it trains two")]}
    left = measured(ONE, reports, 0.0, BOTH)
    assert [*left.contestants] == [FARANDOLE]
    found = rows([left])
    assert {row.contestant for row in found} == {FARANDOLE}
    assert mentions("\n".join(notes(found, [left], 1, 2, 0.0)), DDP, "it trains two")


# --- table ------------------------------------------------------------------------------------------------------------


def cells(found: Sequence[ScalingRow]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=300)
    console.print(scaling_table(found))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_a_row_has_its_figures(results: list[ScalingResult]) -> None:
    found = cells([row for row in rows(results, m5=3600.0) if row.contestant == FARANDOLE])
    assert ["strong", "2", "1000", "1.56", "78%", "78%", "15.0", "6.2%", "10.00", "51", "s", "102", "500"] in found
    unknown = cells([row for row in rows(results) if row.contestant == FARANDOLE])
    assert [line[-2:] for line in unknown[1:]] == 4 * [["unknown", "unknown"]]


def test_what_differs_has_a_column(results: list[ScalingResult]) -> None:
    [one, *_] = rows(results)
    other = msgspec.structs.replace(one, run=a_run(1, arguments="net=[bold]b"))
    assert cells([one, other])[0][:2] == ["scaling", "arguments"]
    assert [line[1] for line in cells([other, one])[1:2]] == ["net=[bold]b"]
    assert "by" in cells(rows(results))[0]


def test_shared_cores_and_idle_workers_are_told(results: list[ScalingResult]) -> None:
    found = rows(results)
    assert mentions("\n".join(notes(found, results, 1, 1, 0.0)), "2 workers", "1 core")
    assert not mentions("\n".join(notes(found, results, 1, 2, 0.4)), "2 cores")
    assert mentions("\n".join(notes(found, results, 1, 2, 1.25)), "1.2", "2 cores")
    uneven = [msgspec.structs.replace(row, measured=msgspec.structs.replace(row.measured, shards=3)) for row in found]
    assert mentions("\n".join(notes(uneven, results, 1, 2, 0.0)), "2 workers", 3, 1, 2)


def test_the_chart_has_a_line_for_each_series(results: list[ScalingResult]) -> None:
    odd = [msgspec.structs.replace(row, run=a_run(row.run.workers, arguments="<&")) for row in rows(results)[:2]]
    root = ElementTree.fromstring(chart([*rows(results), *odd]))
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ideal", "ddp weak ", "farandole strong <&"} & {*texts} == {"ideal", "ddp weak ", "farandole strong <&"}
    assert len([*root.iter("{http://www.w3.org/2000/svg}circle")]) == 10
