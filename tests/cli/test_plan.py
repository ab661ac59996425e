"""`farandole plan`: which plans are tried, which one is recommended, and the command that carries it out."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farandole.cli.commands import app
from farandole.errors import UsageError
from farandole.market.batches import BatchTable
from farandole.market.planning import (
    PlanRow,
    advice,
    command,
    markets_of,
    ranked,
    rows,
    rows_by_batch,
    sizes,
)
from farandole.market.play import PlannedJob, Price
from farandole.market.traces import MarketTrace
from tests.support.mentioned import mentions

PRICES = ("--on-demand", "3.06", "--spot", "0.97")
PRICE = Price(on_demand=3.06, spot=0.97)
JOB = PlannedJob(work_s=20 * 3600, start_s=180, deadline_s=12 * 3600, speeds=(1.0, 2.0, 3.0, 4.0))


def trace(name: str, *pattern: int, gap_s: int = 300) -> MarketTrace:
    return MarketTrace(name=name, gap_s=gap_s, counts=pattern * (400 // len(pattern)))


EAST, WEST_A, WEST_B = trace("us-east-1a_v100", 0, 0, 2), trace("us-west-2a_v100", 4), trace("us-west-2b_v100", 0)


def row(
    strategy: str, dollars: float | None, *, in_time: int = 10, certain: bool = True, within: int = 0,
    machines: int = 4, zones: str = "us-west-2a_v100 + us-west-2b_v100", batch: str = "",
    largest_batch: int | None = None,
) -> PlanRow:  # fmt: skip
    return PlanRow(
        strategy=strategy, zones=zones, machines=machines, windows=10, dollars=dollars, dollars_of_9=dollars, hours=1.0,
        hours_of_9=2.0, in_time=in_time, within_budget=within, certain=certain, batch=batch,
        largest_batch=largest_batch,
    )  # fmt: skip


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert sizes(1) == [1]
    assert sizes(8) == [1, 2, 4, 8]
    assert sizes(12) == [1, 2, 4, 8, 12]


def test_zones_of_one_region_are_tried_together() -> None:
    assert [market.name for market in markets_of([EAST, WEST_A, WEST_B])] == [
        EAST.name, WEST_A.name, WEST_B.name, f"{WEST_A.name} + {WEST_B.name}",
    ]  # fmt: skip
    assert len(markets_of([WEST_A, trace("us-west-2c", 1, gap_s=60)])) == 2, "their intervals differ"
    assert len(markets_of([trace("one", 1), trace("other", 1)])) == 3, "without a region"


def test_the_plans_of_a_job() -> None:
    found = [*rows(JOB, [EAST, WEST_A], PRICE, 3, 60.0)]
    assert {each.machines for each in found} == {2, 4}, "one machine is not in time"
    assert [each.zones for each in found if each.strategy == "on demand"] == ["", ""], "once for each size"
    always = next(each for each in found if each.zones == WEST_A.name and each.strategy == "farandole, deadline")
    assert (always.in_time, always.windows, always.certain, always.within_budget) == (3, 3, True, 3)
    assert always.dollars == pytest.approx(0.97 * 20, rel=0.05)
    spot = next(each for each in found if each.zones == EAST.name and each.strategy == "farandole, spot")
    assert not spot.certain
    assert (spot.in_time, spot.dollars, spot.dollars_of_9, spot.hours) == (0, None, None, None)
    assert ranked(found)[0].zones == WEST_A.name


def test_a_deadline_within_an_interval_is_met_at_its_beginning() -> None:
    job = PlannedJob(work_s=40_000, start_s=180, deadline_s=43_400, speeds=(1.0,))
    found = [*rows(job, [trace("never", 0, gap_s=3_000)], PRICE, 3, None)]
    certain = [each for each in found if each.certain]
    assert [each.in_time for each in certain] == [3, 3]
    assert all((each.hours or 99) * 3600 <= 42_000 for each in certain)


def test_without_a_deadline_no_plan_has_one() -> None:
    found = [*rows(PlannedJob(work_s=3600, start_s=10, speeds=(1.0, 2.0)), [WEST_A], PRICE, 2, None)]
    assert "farandole, deadline" not in {each.strategy for each in found}
    assert not any(each.certain for each in found)


def test_the_best_is_certain_then_within_the_budget_then_cheap() -> None:
    cheap = row("farandole, spot", 10.0, in_time=9, certain=False)
    within = row("farandole, deadline", 30.0, within=9)
    less = row("on demand", 20.0, within=3)
    never = row("farandole, spot", None, in_time=0, certain=False)
    assert ranked([never, cheap, less, within]) == [within, less, cheap, never]


def test_the_advice_names_what_is_cheaper_and_not_certain() -> None:
    spot = row("farandole, spot", 20.0, in_time=7, certain=False)
    found = ranked([row("farandole, deadline", 30.0), row("on demand", 60.0), spot])
    said = "\n".join(advice(found, "52h", 25.0, "3m", None))
    assert mentions(said, "farandole, deadline", "4")
    assert mentions(said, "30.00")
    assert mentions(said, "60.00", "50")
    assert mentions(said, "33", "farandole, spot", "7 of 10")
    assert mentions(said, "25", "0 of 10")
    assert "SCRIPT" in said
    hopeless = "\n".join(advice([row("farandole, spot", None, in_time=0, certain=False)], None, None, "3m", None))
    assert mentions(hopeless, "10 windows")
    assert "SCRIPT" not in hopeless


@pytest.mark.parametrize(
    ("strategy", "budget", "pools", "others"),
    [
        ("on demand", None, ["ec2,name=reserve,template=TEMPLATE,market=on-demand,size=12"], []),
        ("farandole, spot", None, ["ec2,name=spot,template=TEMPLATE,size=12,zones=us-west-2a+us-west-2b"], []),
        (
            "farandole, core", None,
            [
                "ec2,name=reserve,template=TEMPLATE,market=on-demand,size=2",
                "ec2,name=spot,template=TEMPLATE,size=10,zones=us-west-2a+us-west-2b",
            ],
            [],
        ),
        (
            "farandole, deadline", 300.0,
            [
                "ec2,name=spot,template=TEMPLATE,size=12,zones=us-west-2a+us-west-2b,prices=prices.csv",
                "ec2,name=reserve,template=TEMPLATE,market=on-demand,size=12,prices=prices.csv",
            ],
            ["--deadline", "52h", "--start", "3m", "--speeds", "scaling.json", "--max-cost", "300"],
        ),
    ],
)  # fmt: skip
def test_the_command(strategy: str, budget: float | None, pools: list[str], others: list[str]) -> None:
    zones = "" if strategy == "on demand" else "us-west-2a_v100 + us-west-2b_v100"
    said = command(row(strategy, 1.0, machines=12, zones=zones), "52h", budget, "3m", Path("scaling.json"))
    words = shlex.split(said.replace("\\\n", " "))
    assert words[:2] == ["farandole", "run"]
    assert words[-1] == "SCRIPT"
    assert [word for before, word in pairwise(words) if before == "--pool"] == pools
    assert words[4 + 2 * len(pools) : -1] == others


def test_the_command_has_the_prices_and_the_start_of_the_plan(tmp_path: Path) -> None:
    """25 GB at 10 Gbit/s take 20 s."""
    trace, prices = tmp_path / "us-west-2a.json", tmp_path / "of today.csv"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 4, 4, 1] * 100}))
    prices.write_text("# 2026-11-01\ntype,zone,market,dollars\np3,us-west-2a,spot,0.97\np3,,on-demand,3.06\n")
    words = ["plan", trace, "--work", "20h", "--deadline", "12h", "--machines", "4", "--state", "25"]
    answer = CliRunner().invoke(app, [*map(str, words), "--prices", str(prices)], catch_exceptions=False)
    said = shlex.split(answer.stdout.partition("farandole run")[2].replace("\\\n", " "))
    assert [word.partition("prices=")[2] for word in said if "prices=" in word] == [str(prices)] * 2, "of both pools"
    assert said[said.index("--start") + 1] == "200s"


# --- batches ----------------------------------------------------------------------------------------------------------

TABLE = BatchTable(samples={100: 1000.0, 200: 1200.0}, target="accuracy>=0.9")


def test_plans_with_both_kinds_of_batch() -> None:
    slow = PlannedJob(work_s=20 * 3600, start_s=180, deadline_s=13 * 3600, speeds=(1.0, 1.5, 1.8, 2.0))
    found = [*rows_by_batch(slow, (1.0, 2.0, 3.0, 4.0), TABLE, [WEST_A], PRICE, 2, None)]
    constant = [each for each in found if each.batch == "constant"]
    follows = [each for each in found if each.batch == "follows"]
    assert [*constant, *follows] == found
    assert {each.machines for each in constant} == {4}, "two are 1.5 times as fast as one, too slow for the deadline"
    assert {each.machines: each.largest_batch for each in follows} == {2: 200, 4: 400}
    assert {each.largest_batch for each in constant} == {None}
    [fixed, follower] = [[e for e in part if e.strategy == "on demand"][-1] for part in (constant, follows)]
    assert fixed.hours == pytest.approx(10 + 0.05)
    assert follower.hours == pytest.approx(20 * 1.6 / 4 + 0.05), "a batch of 400 needs 1600 samples"


def test_the_advice_weighs_the_batches() -> None:
    follows = row("farandole, deadline", 30.0, batch="follows", largest_batch=400)
    constant = row("farandole, deadline", 50.0, batch="constant", machines=2)
    said = "\n".join(advice([follows, constant], "52h", None, "3m", Path("scaling.json"), table=TABLE))
    assert mentions(said, "accuracy>=0.9")
    assert mentions(said, "50.00", "constant", "2 machines")
    assert mentions(said, "PerWorkerBatch(100", "max_batch=400", "1.60")
    assert mentions(said, "200", "extrapolated")
    assert "scaling.json" not in said, "its speeds are those of the constant batch"
    said = "\n".join(advice([constant, follows], "52h", None, "3m", Path("scaling.json"), table=TABLE))
    assert mentions(said, "30.00", "follows")
    assert "PerWorkerBatch" not in said
    assert "scaling.json" in said


def scaling(folder: Path, *modes: str) -> str:
    runs = [{"run": {"workers": n, "mode": mode}, "samples_per_s": 10.0 * n} for mode in modes for n in (1, 2)]
    (folder / "scaling.json").write_text(json.dumps(runs))
    return str(folder / "scaling.json")


def planned_by_batch(folder: Path, *words: str) -> list[dict[str, object]]:
    (folder / "zone.json").write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [4] * 400}))
    (folder / "batches.json").write_text(json.dumps([{"batch": b, "samples": b + 900} for b in (100, 200)]))
    files = (str(folder / "zone.json"), "--batches", str(folder / "batches.json"), "--json", str(folder / "plans.json"))
    job = ("--work", "20h", "--deadline", "12h", "--machines", "4", *PRICES)
    answer = CliRunner().invoke(app, ["plan", *files, *job, *words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return json.loads((folder / "plans.json").read_text())


def test_batches_from_files(tmp_path: Path) -> None:
    found = planned_by_batch(tmp_path, "--speeds", scaling(tmp_path, "strong", "weak"))
    assert {each["batch"] for each in found} == {"constant", "follows"}
    assert found[0]["batch"] == "constant", "it scales as well, and needs fewer samples"


@pytest.mark.parametrize(("modes", "named"), [((), "--speeds"), (("strong",), "no weak"), (("weak",), "no strong")])
def test_batches_without_both_kinds_of_scaling_are_refused(tmp_path: Path, modes: tuple[str, ...], named: str) -> None:
    words = ("--speeds", scaling(tmp_path, *modes)) if modes else ()
    with pytest.raises(UsageError) as caught:
        planned_by_batch(tmp_path, *words)
    assert mentions(str(caught.value), named)


def test_the_table_and_the_figures(tmp_path: Path) -> None:
    path, file = tmp_path / "us-west-2a.json", tmp_path / "plans.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 4, 4, 1] * 100}))
    words = [
        "plan",
        str(path),
        "--work",
        "20h",
        "--deadline",
        "12h",
        "--machines",
        "4",
        *PRICES,
        "--budget",
        "30",
        "--json",
        str(file),
    ]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    found = json.loads(file.read_text())
    assert found[0]["strategy"] == "farandole, deadline"
    assert found[0]["certain"] is True
    assert [each["certain"] for each in found] == sorted((each["certain"] for each in found), reverse=True)
    assert "--deadline 12h" in answer.stdout


def test_no_plan_has_machines_of_different_speeds(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1] * 400}))
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["plan", f"{path},speed=0.5", "--work", "20h", *PRICES], catch_exceptions=False)
    assert mentions(str(caught.value), "zone", "speed=0.5", "farandole simulate")


def test_no_plan_has_machines_of_different_types(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1] * 400}))
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(
            app, ["plan", f"{path},type=a1", f"{path},type=b2", "--work", "20h", *PRICES], catch_exceptions=False
        )
    assert mentions(str(caught.value), "a1, b2", "farandole simulate")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), ("--on-demand", "unknown")),
        ((*PRICES, "--budget", "0"), ("--budget", "0")),
        ((*PRICES, "--budget", "nan"), ("--budget", "nan")),
        ((*PRICES, "--deadline", "1h", "--machines", "2"), ("1 hours", "10.05 hours")),
        ((*PRICES, "--machines", "0"), ("--machines", "0")),
    ],
)
def test_what_it_refuses(tmp_path: Path, words: tuple[str, ...], named: tuple[str, ...]) -> None:
    path = tmp_path / "zone.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1] * 400}))
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["plan", str(path), "--work", "20h", *words], catch_exceptions=False)
    assert mentions(str(caught.value), *named)
