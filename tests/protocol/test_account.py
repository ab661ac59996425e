"""The account of a run from its lines: every worker-second in one class, whatever became of the run."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from farandole.observe.summary import account_table
from farandole.protocol import events
from farandole.protocol.coordinator.account import Account, account
from farandole.protocol.cost import GB, HostTraffic, Prices
from farandole.protocol.events import SentBytes, WorkerTime
from farandole.protocol.metrics import Line, as_written
from farandole.protocol.values import CLASSES, MEANING, TimeClass
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line

Seconds = dict[TimeClass, float]


def of(*lines: Line | bytes, prices: Prices | None = None) -> Account:
    return account("r", [line if isinstance(line, bytes) else as_written(line) for line in lines], prices)


def came(worker: str, time: float = 100.0, host: str = "h") -> events.StartingEvent:
    return events.StartingEvent(worker=worker, host=host, pid=1, time=time)


def spent(
    time: float, workers: Mapping[str, tuple[int, Seconds]], *ended: str, host: str = "h"
) -> events.TimeSpentEvent:
    """`workers`: the step that each is in, and its seconds."""
    told = {w: WorkerTime(host=host, pool="local", step=step, seconds=s) for w, (step, s) in workers.items()}
    return events.TimeSpentEvent(workers=told, ended=ended, time=time)


def seconds(found: Account, worker: str) -> Seconds:
    return next(each.seconds for each in found.workers if each.worker == worker)


def shown(found: Account, *, workers: bool = True) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(account_table(found, workers=workers))
    return capture.get()


def test_the_newest_line_of_a_worker_says_all_of_it() -> None:
    found = of(
        came("a"), came("b"),
        spent(110.0, {"a": (1, {"start": 2.0, "compute": 8.0}), "b": (1, {"start": 3.0})}),
        spent(120.0, {"a": (9, {"start": 2.0, "compute": 16.0, "exchange": 2.0})}),
        spent(121.0, {"a": (9, {"start": 2.0, "compute": 17.0, "exchange": 2.0}), "b": (9, {"start": 3.0, "few": 6.0})},
              "a", "b"),
        an(events.OverEvent, code=0, time=121.0),
    )  # fmt: skip
    assert seconds(found, "a") == {"start": 2.0, "compute": 17.0, "exchange": 2.0}
    assert found.seconds == {**dict.fromkeys(CLASSES, 0.0), "start": 5.0, "compute": 17.0, "exchange": 2.0, "few": 6.0}
    assert found.total_s == 30.0
    assert found.goodput == pytest.approx(17 / 30)
    assert found.worker_hours == pytest.approx(30 / 3600)
    assert found.over
    assert found.as_of == 121.0
    assert all(each.ended for each in found.workers)


def test_the_tables_fit_a_narrow_terminal_and_have_every_class() -> None:
    host = "ip-10-0-12-34.eu-central-1.compute.internal"
    spent_s: Seconds = {name: 10_000.0 + number for number, name in enumerate(CLASSES)}
    found = of(came("w1"), spent(1e6, {"w1": (9, spent_s)}, host=host))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(account_table(found, workers=True))
    rows = capture.get().splitlines()
    assert max(map(len, rows)) <= 80
    titles = [name for row in rows if row.startswith("worker ") for name in row.split()[1:]]
    assert titles == ["host", "seconds", *CLASSES]
    values = [word for row in rows if row.startswith("w1 ") for word in row.split()[1:]]
    assert values[2:] == [f"{value:.1f}" for value in spent_s.values()]


def test_a_run_of_another_version_has_none_of_it() -> None:
    """It is unknown, and never 0."""
    found = of(came("a"), step_line(3), an(events.OverEvent, code=0, time=121.0))
    assert (found.seconds, found.total_s, found.goodput, found.worker_hours, found.dollars) == (None,) * 5
    assert found.silent == ("a",)
    said = shown(found)
    assert said.count("unknown") >= 3
    assert mentions(said, "silent", "a")


def test_no_lines_at_all() -> None:
    assert of().as_of is None
    assert "unknown" in shown(of())


# --- who could not say more -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "rest"), [(events.LostEvent, "lost"), (events.LeftEvent, "end")])
def test_a_last_word_that_the_coordinator_could_not_write(
    event: type[events.LostEvent] | type[events.LeftEvent], rest: TimeClass
) -> None:
    told = spent(110.0, {"a": (1, {"start": 2.0, "compute": 8.0})})
    gone = event(worker="a", host="h", reason="", time=113.5)
    assert seconds(of(came("a"), told, gone), "a") == {"start": 2.0, "compute": 8.0, rest: 3.5}
    word = spent(113.6, {"a": (1, {"start": 2.0, "compute": 8.0, "lost": 3.25})}, "a")
    assert seconds(of(came("a"), told, gone, word), "a") == {"start": 2.0, "compute": 8.0, "lost": 3.25}
    jumped = event(worker="a", host="h", reason="", time=50.0)
    assert seconds(of(came("a"), told, jumped), "a") == {"start": 2.0, "compute": 8.0}, "a clock that went back"


def test_one_name_two_processes() -> None:
    found = of(
        came("guest-1"), spent(110.0, {"guest-1": (1, {"start": 2.0, "compute": 8.0})}, "guest-1"),
        came("guest-1", 200.0), spent(203.0, {"guest-1": (1, {"start": 3.0})}),
    )  # fmt: skip
    assert [each.total_s for each in found.workers] == [10.0, 3.0]
    assert [each.ended for each in found.workers] == [True, False]
    alone = of(spent(10.0, {"alone": (5, {"compute": 9.0})}), spent(99.0, {"alone": (7, {"compute": 4.0})}))
    assert [each.total_s for each in alone.workers] == [9.0, 4.0], "what has shrunk is another one's"


# --- again ------------------------------------------------------------------------------------------------------


def lost_and_resumed(step: int, *after: events.TimeSpentEvent) -> Account:
    """Steps up to 19 were taken when the state was lost; the run goes on from `step`."""
    return of(
        came("a"), spent(110.0, {"a": (10, {"compute": 10.0})}), *(step_line(n) for n in (18, 19)),
        an(events.LostEvent, worker="a", time=120.0), an(events.StateLostEvent, time=120.0),
        spent(120.1, {"a": (20, {"compute": 19.0, "lost": 1.0})}, "a"),
        came("b", 121.0), an(events.ResumedEvent, worker="b", step=step, time=122.0), *after,
    )  # fmt: skip


def test_steps_that_are_taken_once_more_are_computed_again() -> None:
    found = lost_and_resumed(
        10, spent(130.0, {"b": (14, {"compute": 4.0})}), spent(140.0, {"b": (24, {"compute": 14.0})})
    )
    assert seconds(found, "a") == {"compute": 19.0, "lost": 1.0}, "it counts as computed the first time"
    assert seconds(found, "b") == {"compute": 5.0, "again": 9.0}, "4 up to step 14, and half of the 10 up to step 24"


def test_steps_beyond_are_not() -> None:
    found = lost_and_resumed(10, spent(130.0, {"b": (40, {"compute": 30.0})}))
    assert seconds(found, "b") == {"compute": 21.0, "again": 9.0}, "9 steps of 30"
    found = lost_and_resumed(10, spent(130.0, {"b": (19, {"compute": 9.0})}))
    assert seconds(found, "b") == {"again": 9.0}


def test_a_resumed_run_is_one_account() -> None:
    found = of(
        came("a"), spent(110.0, {"a": (20, {"compute": 9.0})}), step_line(19),  # everything is killed
        came("b", 500.0), an(events.ResumedEvent, worker="b", step=20, time=501.0),
        spent(510.0, {"b": (29, {"compute": 9.0})}),
    )  # fmt: skip
    assert found.total_s == 18.0
    assert not found.over
    assert seconds(found, "b") == {"compute": 9.0}, "nothing is lost of a run that was saved at its end"


# --- what a pool pays for ---------------------------------------------------------------------------------------


def test_a_run_that_was_killed_and_began_again_computes_its_steps_again() -> None:
    found = of(
        came("a", 99.0), spent(110.0, {"a": (9, {"compute": 10.0})}), step_line(9),
        an(events.RunStartedEvent, time=400.0), came("b", 400.0), spent(410.0, {"b": (19, {"compute": 10.0})}),
    )  # fmt: skip
    assert seconds(found, "a") == {"compute": 10.0}, "of which nobody knows what came after its newest line"
    assert seconds(found, "b") == {"compute": pytest.approx(100 / 19), "again": pytest.approx(90 / 19)}
    assert [each.ended for each in found.workers] == [True, False]


def priced(host: str, dollars: float | None, since: float, day: str = "2026-11-01") -> events.PricedEvent:
    return events.PricedEvent(pool="ec2", host=host, dollars=dollars, since=since, day=day, time=since)


def test_an_instance_is_paid_for_from_its_launch_until_it_is_gone() -> None:
    """With workers or without; what the pool says comes before the file."""
    found = of(
        priced("i-1", 36.0, 1000.0), priced("i-2", 3.6, 1100.0),
        came("a", 1050.0, "i-1"), spent(1060.0, {"a": (1, {"start": 20.0})}, host="i-1"),
        an(events.HostEvent, pool="ec2", host="i-1", state="gone", time=1200.0), priced("i-1", 36.0, 1000.0),
        an(events.OverEvent, code=0, time=1300.0), prices=Prices(date="2026-10-01", pools={"local": 1e5, "ec2": 1e5}),
    )  # fmt: skip
    assert [(each.host, each.dollars) for each in found.cost.hosts] == [("i-1", 2.0), ("i-2", pytest.approx(0.2))]
    assert found.dollars == pytest.approx(2.2)
    assert mentions(found.cost.date, "2026-10-01", "2026-11-01")


def test_an_instance_without_a_price_is_not_free() -> None:
    found = of(priced("i-1", None, 1000.0, ""), an(events.OverEvent, code=0, time=1360.0))
    assert found.dollars is None
    assert found.cost.unknown == ("i-1",)
    named = of(
        priced("i-1", None, 1000.0, ""), an(events.OverEvent, code=0, time=1360.0),
        prices=Prices(date="2026-10-01", pools={"ec2": 10.0}),
    )  # fmt: skip
    assert named.dollars == pytest.approx(1.0)


# --- bad input --------------------------------------------------------------------------------------------------


def test_torn_and_foreign_lines_are_passed_over_and_counted() -> None:
    good = spent(110.0, {"a": (1, {"start": 2.0})})
    bad = as_written(good)
    found = of(
        came("a"), good, bad[:30], bad.replace(b'"start"', b'"dreams"'), bad.replace(b"2.0", b"-2.0"),
        bad.replace(b"2.0", b"NaN"), b'{"event":"time spent","time":1.0}\n',
    )  # fmt: skip
    assert seconds(found, "a") == {"start": 2.0}
    assert found.damaged == 5
    assert mentions(shown(found), "damaged", 5, "metrics.jsonl")


def test_sums_that_can_not_be_are_passed_over() -> None:
    found = of(came("a"), spent(110.0, {"a": (1, {"start": 2.0})}), spent(120.0, {"a": (1, {"start": 1e9})}))
    assert seconds(found, "a") == {"start": 2.0}
    assert found.doubtful == 1


def test_names_are_shown_and_not_read() -> None:
    found = of(came("[red]x[/red]\x1b[31m"), spent(110.0, {"[red]x[/red]\x1b[31m": (1, {"start": 2.0})}))
    assert "[red]x[/red]" in shown(found)
    assert "\x1b[31m" not in shown(found)


# --- whatever happened -------------------------------------------------------------------------------------------

gone = st.sampled_from((events.LostEvent, events.LeftEvent)).flatmap(
    lambda kind: st.builds(
        kind, worker=st.sampled_from("ab"), host=st.just("h"), reason=st.just(""), time=st.floats(1, 500)
    )
)
times = st.dictionaries(st.sampled_from(CLASSES), st.floats(0, 100).map(lambda s: round(s, 3)), max_size=4)
told = st.builds(
    lambda time, workers, ended: spent(time, workers, *ended),
    st.floats(1, 500), st.dictionaries(st.sampled_from("ab"), st.tuples(st.integers(-1, 50), times)),
    st.lists(st.sampled_from("ab"), max_size=1),
)  # fmt: skip
anything = st.one_of(
    told, gone, st.builds(came, st.sampled_from("ab"), st.floats(1, 500)), st.builds(step_line, st.integers(0, 50)),
    st.builds(lambda step: an(events.ResumedEvent, worker="a", step=step), st.integers(-1, 50)),
    st.just(an(events.StateLostEvent)), st.just(an(events.OverEvent, code=0)),
)  # fmt: skip


@given(st.lists(anything, max_size=25))
def test_the_classes_add_up_whatever_the_lines_say(lines: list[Line]) -> None:
    found = of(*lines)
    for each in found.workers:
        assert all(s >= 0 for s in each.seconds.values()), each
        assert sum(each.seconds.values()) == pytest.approx(each.total_s, abs=1e-6)
    if found.seconds is not None and found.total_s is not None:
        assert sum(found.seconds.values()) == pytest.approx(found.total_s, abs=1e-5)
        assert sum(each.total_s for each in found.workers) == pytest.approx(found.total_s, abs=1e-5)
        assert found.goodput is None or 0 <= found.goodput <= 1
    assert set(MEANING) == set(found.seconds or MEANING)
    assert shown(found)


# --- traffic ----------------------------------------------------------------------------------------------------------


def sent(
    time: float, worker: str, host: str, *ended: str, zone: str = "", **to: tuple[int, int]
) -> events.TimeSpentEvent:
    """`to`: for each other host, the bytes of rounds and those of the state for joiners."""
    told = WorkerTime(
        host=host, zone=zone, pool="local", step=1, seconds={"compute": time - 100.0},
        sent={name: SentBytes(exchange=exchange, state=state) for name, (exchange, state) in to.items()},
    )  # fmt: skip
    return events.TimeSpentEvent(workers={worker: told}, ended=ended, time=time)


def test_bytes_between_hosts_are_added_up_and_priced() -> None:
    found = of(
        came("a", host="x"), came("b", host="y"), step_line(0), step_line(1),
        sent(110.0, "a", "x", y=(GB, 0)), sent(112.0, "b", "y", x=(2 * GB, GB)),
        sent(120.0, "a", "x", "a", y=(3 * GB, 0), z=(GB, 0)), step_line(2),
        prices=Prices(traffic_price=0.02),
    ).traffic  # fmt: skip
    assert (found.sent_bytes, found.at_least_bytes, found.state_bytes) == (7 * GB, 7 * GB, GB)
    assert found.exchange_bytes_per_step == 3 * GB, "of the steps before the newest sums"
    assert (found.price, found.dollars, found.unknown) == (0.02, pytest.approx(0.14), ())
    assert found.between_zones_bytes is None, "no host reports a zone"
    assert found.hosts == (
        HostTraffic(host="x", sent_bytes=4 * GB, received_bytes=3 * GB),
        HostTraffic(host="y", sent_bytes=3 * GB, received_bytes=3 * GB),
        HostTraffic(host="z", sent_bytes=0, received_bytes=GB),
    )


def test_the_price_is_that_of_the_bytes_between_zones_if_a_host_reports_its_zone() -> None:
    found = of(
        came("a", host="x"), came("b", host="y"), came("c", host="z"),
        sent(110.0, "a", "x", zone="east", y=(GB, 0), z=(2 * GB, GB)), sent(110.0, "b", "y", zone="east", x=(GB, 0)),
        sent(110.0, "c", "z", x=(GB, 0), y=(0, 4 * GB)),
        prices=Prices(traffic_price=0.02),
    ).traffic  # fmt: skip
    assert (found.sent_bytes, found.between_zones_bytes) == (10 * GB, 8 * GB)
    assert found.dollars == pytest.approx(0.16)
    assert [(each.host, each.zone) for each in found.hosts] == [("x", "east"), ("y", "east"), ("z", "")]


def test_within_one_zone_nothing_is_paid() -> None:
    lines = sent(110.0, "a", "x", zone="east", y=(GB, 0)), sent(110.0, "b", "y", zone="east", x=(GB, 0))
    found = of(*lines, prices=Prices(traffic_price=0.02)).traffic
    assert (found.sent_bytes, found.between_zones_bytes, found.dollars) == (2 * GB, 0, 0.0)


def test_what_went_to_a_host_of_an_unknown_zone_has_no_price() -> None:
    found = of(sent(110.0, "a", "x", zone="east", y=(GB, 0)), prices=Prices(traffic_price=0.02)).traffic
    assert (found.sent_bytes, found.between_zones_bytes, found.dollars) == (GB, None, None)


def test_with_a_worker_whose_bytes_are_unknown_there_is_no_price_and_the_least_between_zones() -> None:
    lines = sent(110.0, "a", "x", zone="east", y=(GB, 0)), sent(110.0, "b", "y", zone="west", x=(GB, 0))
    unknown = spent(110.0, {"c": (1, {"compute": 1.0})})
    found = of(*lines, unknown, prices=Prices(traffic_price=0.02)).traffic
    assert (found.sent_bytes, found.between_zones_bytes, found.dollars) == (None, 2 * GB, None)


def test_a_process_that_comes_again_adds_its_own_bytes() -> None:
    found = of(
        came("a", host="x"), sent(110.0, "a", "x", "a", y=(5, 0)), came("a", time=111.0, host="x"),
        sent(112.0, "a", "x", y=(3, 1)), step_line(0),
    ).traffic  # fmt: skip
    assert (found.sent_bytes, found.state_bytes, found.dollars, found.exchange_bytes_per_step) == (9, 1, None, None)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], (None, 0, None, ())),
        ([came("a")], (None, 0, None, ())),
        ([sent(110.0, "a", "x")], (0, 0, 0.0, ())),  # one host: it is known to be nothing
        ([spent(110.0, {"a": (1, {"compute": 1.0})})], (None, 0, None, ("a",))),  # of an earlier version
        ([spent(110.0, {"a": (1, {"compute": 1.0})}), sent(110.0, "b", "y", x=(4, 0))], (None, 4, None, ("a",))),
    ],
)
def test_unknown_bytes_are_never_zero(lines: list[Line], expected: tuple[object, ...]) -> None:
    found = of(*lines, prices=Prices(traffic_price=1.0)).traffic
    assert (found.sent_bytes, found.at_least_bytes, found.dollars, found.unknown) == expected
