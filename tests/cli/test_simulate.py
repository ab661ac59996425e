"""`farandole simulate`: the table, the figures for programs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from farandole.cli.commands import app
from farandole.errors import UsageError
from farandole.market.chart import LEFT, RIGHT, cost_chart
from farandole.market.comparison import BOUND, CHEAPEST, JobOutcome, StrategyResult, compare, windows
from farandole.market.play import PlannedJob, Price
from farandole.market.speeds import MachineSpeeds, speeds_of
from farandole.market.strategies import BY_NAME, STRATEGIES
from farandole.market.traces import read_zone
from farandole.protocol.metrics import StepLine
from tests.support.market import market, typed
from tests.support.mentioned import mentions

PRICES = ("--on-demand", "3.06", "--spot", "0.97")
SCALING = [
    {"contestant": "farandole", "run": {"workers": workers}, "samples_per_s": rate}
    for workers, rate in ((1, 100.0), (2, 190.0), (4, 350.0))
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "zone.json"
    counts = [(0, 2, 3, 1, 4, 4)[place // 7 % 6] for place in range(500)]
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": counts}))
    return path


def simulate(*words: str | Path) -> str:
    answer = CliRunner().invoke(app, ["simulate", *map(str, words)], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_with_a_budget_its_strategy_is_played_and_counted(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    job = ("--work", "20h", "--machines", "4", *PRICES, "--beginnings", "3", "--json", file)
    printed = simulate(trace, *job, "--budget", "70")
    rows = json.loads(file.read_text())
    assert [row["strategy"] for row in rows] == [BOUND, CHEAPEST, *BY_NAME]
    assert all(each["dollars"] <= 70 for each in rows[-1]["outcomes"])
    assert printed.splitlines()[-1].split()[-3:] == ["3", "of", "3"]
    simulate(trace, *job)
    assert [row["strategy"] for row in json.loads(file.read_text())] == [BOUND, CHEAPEST, *STRATEGIES]


def test_the_figures(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    job = ("--work", "20h", "--deadline", "12h", "--machines", "4")
    printed = simulate(trace, *job, *PRICES, "--beginnings", "3", "--json", file)
    rows = json.loads(file.read_text())
    assert [row["strategy"] for row in rows] == [BOUND, CHEAPEST, *STRATEGIES]
    assert all(row["strategy"] in printed for row in rows)
    by_name = {row["strategy"]: row for row in rows}
    assert by_name["greedy"]["machines"] == 2, "the fewest that make it on demand"
    assert by_name["farandole, deadline"]["machines"] == 4
    for row in rows:
        assert [each["begins_h"] for each in row["outcomes"]] == pytest.approx([0, 14.8333, 29.6667], abs=0.05)
        assert all(each["trace"] == "zone" for each in row["outcomes"])
    for bound, ours in zip(by_name[BOUND]["outcomes"], by_name["farandole, deadline"]["outcomes"], strict=True):
        assert ours["hours"] <= 12
        assert ours["over_bound"] == pytest.approx(ours["dollars"] / bound["dollars"])
        assert ours["dollars"] == pytest.approx(ours["spot_h"] * 0.97 + ours["on_demand_h"] * 3.06)
    assert all(each["hours"] is None for each in by_name["spot, restarts"]["outcomes"])


def test_zones_of_one_market(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    simulate(trace, trace, "--together", "--work", "20h", *PRICES, "--beginnings", "2", "--json", file)
    rows = json.loads(file.read_text())
    assert {each["trace"] for row in rows for each in row["outcomes"]} == {"zone + zone"}
    assert all(len(row["outcomes"]) == 2 for row in rows)


def test_the_state_takes_its_time_in_a_start_and_in_a_checkpoint(trace: Path, tmp_path: Path) -> None:
    """25 GB at 10 Gbit/s take 20 s."""
    file = tmp_path / "rows.json"
    job = ("--work", "2h", "--machines", "1", *PRICES, "--beginnings", "1", "--checkpoint", "10m", "--json", file)
    names = ("--strategy", "spot, restarts", "--strategy", "farandole, spot")
    simulate(trace, *job, *names)
    *_, restarts, ours = json.loads(file.read_text())
    assert (restarts["outcomes"][0]["save_h"], ours["outcomes"][0]["save_h"]) == (0, 0)
    printed = simulate(trace, *job, *names, "--state", "25")
    *_, longer, ours_longer = json.loads(file.read_text())
    assert "save, machine-hours" in printed
    saved_s = longer["outcomes"][0]["save_h"] * 3600
    assert saved_s == pytest.approx(11 * 20, abs=21), "one after each ten minutes of two hours"
    assert ours_longer["outcomes"][0]["save_h"] == 0
    for row, before in ((longer, restarts), (ours_longer, ours)):
        starts_s = row["outcomes"][0]["start_h"] * 3600
        assert starts_s * 180 == pytest.approx(before["outcomes"][0]["start_h"] * 3600 * 200, rel=0.01)


def test_prices_of_a_file(trace: Path, tmp_path: Path) -> None:
    file, prices = tmp_path / "rows.json", tmp_path / "prices.csv"
    prices.write_text("# 2026-11-01\ntype,zone,market,dollars\ng5.xlarge,,spot,0.97\ng5.xlarge,,on-demand,3.06\n")
    job = ("--work", "20h", "--machines", "2", "--beginnings", "2", "--json", file)
    simulate(trace, *job, *PRICES)
    before = json.loads(file.read_text())
    simulate(trace, *job, "--prices", prices)
    assert json.loads(file.read_text()) == before
    simulate(trace, *job, "--prices", prices, "--on-demand", "30.6")
    dearer = {row["strategy"]: row for row in json.loads(file.read_text())}["on demand"]
    assert dearer["outcomes"][0]["dollars"] == pytest.approx(20.1 * 30.6, rel=0.01)
    simulate(trace, *job, "--prices", prices, "--spot", "0.5")
    other = json.loads(file.read_text())
    simulate(f"{trace},spot=0.5", *job, "--prices", prices)
    assert json.loads(file.read_text()) == other != before
    with pytest.raises(UsageError) as caught:
        simulate(f"{trace},type=g6.xlarge", *job, "--prices", prices)
    assert mentions(str(caught.value), "g6.xlarge", "g5.xlarge")


def test_a_history_begins_with_each_market(tmp_path: Path) -> None:
    """Alone, the first zone has the price of its first day; in one market both begin on the second zone's day."""
    file, history = tmp_path / "rows.json", tmp_path / "history.json"
    entries = [("us-west-2a", "2026-11-01", "1"), ("us-west-2a", "2026-11-05", "2"), ("us-west-2b", "2026-11-06", "1")]
    rows = [
        {
            "AvailabilityZone": zone, "InstanceType": "g5.xlarge", "ProductDescription": "Linux/UNIX",
            "SpotPrice": dollars, "Timestamp": f"{day}T00:00:00Z",
        }
        for zone, day, dollars in entries
    ]  # fmt: skip
    history.write_text(json.dumps({"SpotPriceHistory": rows}))
    traces = [tmp_path / "us-west-2a.json", tmp_path / "us-west-2b.json"]
    for path, count in zip(traces, (1, 0), strict=True):
        path.write_text(json.dumps({"metadata": {"gap_seconds": 3600}, "data": [count] * 50}))
    job = ("--work", "9h", "--start", "1h", "--machines", "1", "--on-demand", "3", "--beginnings", "1", "--json", file)
    for words, dollars in (((), 10), (("--together",), 20)):
        simulate(*traces, *job, "--prices", history, "--strategy", "farandole, spot", *words)
        [ours] = [row for row in json.loads(file.read_text()) if row["strategy"] == "farandole, spot"]
        assert ours["outcomes"][0]["dollars"] == pytest.approx(dollars)


def test_the_cheapest_way_is_not_below_the_bound_where_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.market.optimum.MOST_STEPS", 30)
    place = typed(market([1] * 50, gap_s=3600), (0.3, 0.2))
    job = PlannedJob(work_s=24_000, start_s=60)
    bound, cheapest, *_ = compare(job, windows([place], job, 1), Price(on_demand=3.06), [])
    assert cheapest.dollars[0] >= bound.dollars[0]


def test_chosen_strategies_without_a_deadline(trace: Path) -> None:
    printed = simulate(trace, "--work", "20h", *PRICES, "--machines", "2", "--strategy", "farandole, spot")
    assert "farandole, spot" in printed
    assert "greedy" not in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--work", "20h"), ("--on-demand", "unknown")),
        (("--work", "20h", "--on-demand", "3"), ("--spot", "unknown")),
        (("--work", "20h", "--on-demand", "3", "--spot", "0"), ("--spot", "0")),
        (("--work", "20h", "--on-demand", "nan", "--spot", "1"), ("--on-demand", "nan")),
        (("--work", "soon", *PRICES), ("--work", "soon")),
        (("--work", "20h", *PRICES, "--machines", "0"), ("--machines", "0")),
        (("--work", "20h", *PRICES, "--beginnings", "0"), ("--beginnings", "0")),
        (("--work", "20h", *PRICES, "--strategy", "clever"), ("--strategy", "clever", "greedy")),
        (
            ("--work", "20h", *PRICES, "--machines", "2", "--deadline", "10h"),
            ("10 hours", "2 machines", "10.05 hours", "0.05 more"),
        ),
        (("--work", "20h", *PRICES, "--deadline", "50h"), ("zone", "41.7 hours", "50.00 hours")),
        (("--work", "20h", *PRICES, "--speeds", "no.json"), ("--speeds", "no.json")),
        (("--work", "20h", *PRICES, "--json", "no/rows.json"), ("--json", "no/rows.json")),
        (("--work", "20h", *PRICES, "--plot", "cost.gif"), ("--plot", "cost.gif")),
        (("--work", "20h", *PRICES, "--budget", "-1"), ("--budget", "-1")),
        (("--work", "20h", *PRICES, "--strategy", "farandole, budget"), ("farandole, budget", "--budget")),
        (("--work", "20h", *PRICES, "--drawn", "-1"), ("--drawn", "-1")),
        (("--work", "20h", *PRICES, "--state", "0"), ("--state", "0")),
        (("--work", "20h", *PRICES, "--state", "1", "--bandwidth", "0"), ("--bandwidth", "0")),
        (("--work", "20h", *PRICES, "--bandwidth", "1"), ("--bandwidth", "--state")),
        (("--work", "20h", *PRICES, "--state", "100", "--checkpoint", "1m"), ("--checkpoint", "1m", "80 s")),
        (("--work", "20h", *PRICES, "--prices", "prices.csv"), ("prices.csv", "--on-demand", "--spot")),
        (("--work", "20h", "--prices", "no.csv"), ("no.csv",)),
        (PRICES, ("--work", "--samples")),
        (("--work", "20h", "--samples", "9", *PRICES), ("--work", "--samples")),
        (("--samples", "9", *PRICES), ("--samples", "--speeds")),
    ],
)
def test_what_it_refuses(trace: Path, words: tuple[str, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["simulate", str(trace), *words], catch_exceptions=False)
    assert mentions(str(caught.value), *named)


def test_speeds_of_a_measurement(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps([*SCALING, {"contestant": "ddp", "run": {"workers": 1}, "samples_per_s": 9.0}]))
    speeds = speeds_of(path, 6)
    assert speeds.relative == pytest.approx((1.0, 1.9, 2.7, 3.5, 4.3, 5.1))
    assert (speeds.fewest, speeds.most, speeds.samples_per_s) == (1, 4, 100.0)
    assert speeds_of(None, 3) == MachineSpeeds(relative=(1.0, 2.0, 3.0), fewest=1, most=3)


def test_speeds_of_a_published_table(tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text('{"4": 3012, "8": 5874}')
    speeds = speeds_of(path, 8)
    assert (speeds.fewest, speeds.most, speeds.samples_per_s) == (4, 8, 753)
    assert speeds.relative == pytest.approx((1, 2, 3, 4, 4.95, 5.9, 6.85, 7.8), abs=1e-3)


def test_a_table_with_one_size_says_what_is_extrapolated(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "published.json"
    path.write_text('{"2": 200}')
    options = ("--work", "10h", *PRICES, "--machines", "4", "--beginnings", "1", "--strategy", "farandole, spot")
    printed = simulate(trace, *options, "--speeds", path)
    assert mentions(printed, "more than 2 machines", "extrapolated")
    assert mentions(printed, "one machine", "1/2")


def test_speeds_of_a_run(tmp_path: Path) -> None:
    """Pauses and what runs once are not in them, evaluations are."""
    line = StepLine(
        step=0, epoch=0, samples=96, loss=1.0, seconds=1.0, samples_per_s=96.0, view=1, workers=1, time=1.0,
        total=None, factor=None,
    )  # fmt: skip
    lines = [
        line,
        msgspec.structs.replace(line, step=1, seconds=3.0, evaluation_s=1.0, pause_s=1.0),
        msgspec.structs.replace(line, step=2, workers=3, seconds=0.5),
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    speeds = speeds_of(tmp_path, 3)
    assert (speeds.fewest, speeds.most) == (1, 3)
    assert speeds.samples_per_s == pytest.approx(64)
    assert speeds.relative == pytest.approx((1, 2, 3))


@pytest.mark.parametrize(("text", "named"), [('{"0": 5}', "0: 5"), ('{"2": -1}', "2: -1"), ('{"a": 1}', "--speeds")])
def test_a_table_without_sense_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "published.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        speeds_of(path, 2)
    assert mentions(str(caught.value), "published.json", named)


def test_a_folder_that_is_no_run_or_has_no_step_is_refused(tmp_path: Path) -> None:
    for content in (None, b""):
        if content is not None:
            (tmp_path / "metrics.jsonl").write_bytes(content)
        with pytest.raises(UsageError) as caught:
            speeds_of(tmp_path, 2)
        assert mentions(str(caught.value), "--speeds", str(tmp_path))


def test_what_is_computed_again_is_counted_where_machines_restart(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    printed = simulate(
        trace, "--work", "20h", "--machines", "4", *PRICES, "--beginnings", "3", "--checkpoint", "1h", "--json", file
    )
    lost = {row["strategy"]: [each["again_h"] for each in row["outcomes"]] for row in json.loads(file.read_text())}
    assert sum(lost["elastic, restarts"]) > 0
    assert set(lost["farandole, spot"]) == {0}
    assert lost[BOUND] == [None] * 3
    [last] = [line for line in printed.splitlines() if line.startswith("elastic, restarts")]
    assert float(last.split()[-1]) == pytest.approx(sum(lost["elastic, restarts"]) / 3, abs=0.05)


def test_a_job_by_its_samples(trace: Path, tmp_path: Path) -> None:
    """As much as ten hours of one machine at 100 a second."""
    path, file = tmp_path / "published.json", tmp_path / "rows.json"
    path.write_text('{"1": 100, "4": 400}')
    options = (*PRICES, "--machines", "4", "--beginnings", "1", "--strategy", "farandole, spot", "--speeds", path)
    printed = simulate(trace, "--samples", "3.6e6", *options, "--json", file)
    by_samples = json.loads(file.read_text())
    dollars = by_samples[-1]["outcomes"][0]["dollars"]
    assert printed.splitlines()[-1].split()[-1] == f"{3.6e6 / dollars:,.0f}"
    simulate(trace, "--work", "10h", *options, "--json", file)
    assert json.loads(file.read_text()) == by_samples


def test_of_both_modes_the_scripts_batch_counts_and_other_doubles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    weak = [{"run": {"workers": n, "mode": "weak"}, "samples_per_s": 100.0 * n} for n in (1, 2, 4)]
    path.write_text(json.dumps([*SCALING, *weak]))
    assert speeds_of(path, 4).relative == pytest.approx((1.0, 1.9, 2.7, 3.5))
    path.write_text(json.dumps(weak))
    assert speeds_of(path, 4).relative == pytest.approx((1.0, 2.0, 3.0, 4.0))
    path.write_text(json.dumps([*SCALING, SCALING[1]]))
    with pytest.raises(UsageError) as caught:
        speeds_of(path, 4)
    assert mentions(str(caught.value), "--speeds", "scaling.json", "codec")


def test_speeds_that_fall_beyond_the_last_number_stay(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps([SCALING[0], {"run": {"workers": 2}, "samples_per_s": 90.0}]))
    assert speeds_of(path, 3).relative == pytest.approx((1.0, 1.0, 1.0))


def test_machines_of_another_type_do_their_part_of_the_work_for_their_price(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    job = ("--work", "10h", "--machines", "8", *PRICES, "--beginnings", "1", "--strategy", "farandole, spot")

    def outcome(*traces: str) -> dict[str, float]:
        simulate(*traces, "--together", *job, "--json", file)
        return json.loads(file.read_text())[-1]["outcomes"][0]

    one, slow, both = (
        outcome(f"{trace}"),
        outcome(f"{trace},speed=0.5,spot=0.1"),
        outcome(f"{trace}", f"{trace},speed=0.5"),
    )
    assert slow["hours"] > 1.5 * one["hours"]
    assert slow["dollars"] == pytest.approx(slow["spot_h"] * 0.1)
    assert both["hours"] < one["hours"]
    assert both["dollars"] == pytest.approx(both["spot_h"] * 0.97)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("speed=fast", "speed=fast"),
        ("speed=0", "speed=0"),
        ("spot=nan", "spot=nan"),
        ("spot=1,spot=2", "spot=2"),
        ("price=1", "price=1"),
        ("", "spot=DOLLARS"),
    ],
)
def test_options_of_a_trace_that_it_refuses(trace: Path, options: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["simulate", f"{trace},{options}", "--work", "1h", *PRICES], catch_exceptions=False)
    assert mentions(str(caught.value), str(trace), named)


def test_a_trace_whose_name_has_a_comma(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "one,speed=2.json"
    path.write_text(trace.read_text())
    assert read_zone(str(path)).speed == 1


@pytest.mark.parametrize("text", ["", "{}", "[{}]", json.dumps(SCALING[1:])])
def test_a_file_without_speeds_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        speeds_of(path, 2)
    assert mentions(str(caught.value), "--speeds", "scaling.json")


def test_a_chart_has_a_row_for_each_strategy(trace: Path, tmp_path: Path) -> None:
    chart = tmp_path / "cost.svg"
    simulate(
        trace, "--work", "20h", "--deadline", "12h", *PRICES, "--machines", "4", "--beginnings", "3", "--plot", chart
    )
    drawn = ElementTree.fromstring(chart.read_text())
    texts = [(float(each.attrib["y"]), each.text or "") for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    named = [text for _, text in sorted(texts) if text in (BOUND, CHEAPEST, *STRATEGIES)]
    assert named == [BOUND, CHEAPEST, *STRATEGIES]
    late = [y for y, text in texts if text == "late in 3 of 3"]
    assert late == [y for y, text in texts if text == "spot, restarts"]


def test_a_row_of_the_chart_has_the_least_the_mean_and_the_most() -> None:
    done = JobOutcome(trace="zone", begins_h=0.0, dollars=15.0, hours=1.0, lost=0)
    outcomes = [done, done, msgspec.structs.replace(done, dollars=60.0)]
    drawn = ElementTree.fromstring(cost_chart([StrategyResult(strategy="greedy", machines=1, outcomes=outcomes)]))
    lines = [each.attrib for each in drawn.iter("{http://www.w3.org/2000/svg}line")]
    lines = [each for each in lines if each["y1"] == each["y2"]]
    marks = [each.attrib for each in drawn.iter("{http://www.w3.org/2000/svg}rect") if each.attrib["width"] == "4"]
    wide = RIGHT - LEFT
    assert [(float(each["x1"]), float(each["x2"])) for each in lines] == [(LEFT + wide / 4, RIGHT)]
    assert [float(each["x"]) + 2 for each in marks] == [LEFT + wide / 2]


def test_the_chart_of_nothing_that_was_done() -> None:
    never = JobOutcome(trace="zone", begins_h=0.0, dollars=5.0, lost=0)
    drawn = ElementTree.fromstring(cost_chart([StrategyResult(strategy="greedy", machines=1, outcomes=[never])]))
    assert "late in 1 of 1" in {each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")}


def test_a_measured_number_of_machines_is_said_to_be_extrapolated(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps(SCALING))
    words = (trace, "--work", "20h", *PRICES, "--speeds", path, "--strategy", "on demand", "--beginnings", "1")
    assert "4 machines" in simulate(*words, "--machines", "6")
    assert "4 machines" not in simulate(*words, "--machines", "4")


def test_fixed_sizes_make_the_deadline_of_the_tightest_window() -> None:
    """Two machines make 43,290 s; the window ends at 43,200 s, which takes three."""
    place = market((0,) * 200, gap_s=300)
    job = PlannedJob(work_s=86_150, start_s=180, deadline_s=43_290, speeds=(1.0, 2.0, 3.0))
    *_, result = compare(job, windows([place], job, 1), Price(on_demand=3.06, spot=0.97), ["on demand"])
    assert (result.machines, result.missed) == (3, 0)


def test_a_row_knows_what_was_missed() -> None:
    assert StrategyResult(strategy="greedy", machines=1, outcomes=[]).missed == 0


def test_a_deadline_within_an_interval_is_met_at_its_beginning() -> None:
    place = market((0,) * 200, gap_s=300)
    job = PlannedJob(work_s=40_100, start_s=180, deadline_s=43_290)
    results = compare(
        job, windows([place], job, 2), Price(on_demand=3.06, spot=0.97), ["greedy", "farandole, deadline"]
    )
    for result in results:
        assert result.missed == 0
        assert all(each.hours is None or each.hours <= 43_200 / 3600 for each in result.outcomes)
