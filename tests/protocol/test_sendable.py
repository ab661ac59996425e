"""Whatever a script asks for, the coordinator takes what its worker sends; or the script ends, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farandole.errors import UsageError
from farandole.evaluation.metrics import number
from farandole.protocol import messages as m
from farandole.protocol.messages import Computed, fitting
from farandole.protocol.metrics import as_written, metrics_line, parse_line
from farandole.protocol.values import MAX_COUNT, MAX_NAMED, abridged
from farandole.protocol.view import Lineage, View
from farandole.protocol.worker.driver import Activity
from farandole.protocol.worker.session import Session
from farandole.protocol.worker.state_machine import Checking, WorkerStateMachine
from tests.support.metric_lines import stepped
from tests.support.played_session import welcome
from tests.support.scene import SIGNATURE, trained

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
whole = st.integers() | st.integers(0, 100) | st.sampled_from((MAX_COUNT, MAX_COUNT + 1, 2**63, 2**64, -1))
texts = st.text(st.characters(), max_size=20) | st.integers(250, 70_000).map(lambda n: "\U0001f600" * n)
anything = whole | texts | st.floats() | st.none() | st.booleans() | st.sampled_from((np.float32(1), np.int64(3), 1j))
METRICS = ("epoch", "samples", "loss", "seconds", "samples_per_s", "view", "workers", "time", "total", "learning_rate")

MESSAGES = st.one_of(
    st.builds(m.Ready, signature=st.just(SIGNATURE), unreached=texts),
    st.builds(m.LeaveRequest, reason=texts, within_s=st.none() | st.floats()),
    st.builds(m.ScriptFailed, traceback=texts),
    st.builds(m.DataUnavailable, reason=texts),
    st.builds(m.Unrecorded, reason=texts),
    st.builds(m.LoaderEnded, reason=texts),
    st.builds(m.CannotStart, view=whole, reason=texts),
    st.builds(m.Suspect, view=whole, peer=st.just("b"), reason=texts, waited_s=whole),
    st.builds(m.NotFinite, step=whole, loss=texts),
    st.builds(m.SettingChanged, step=whole, setting=texts, before=texts, now=texts),
    st.builds(m.UnknownOperator, operator=texts),
    st.builds(m.Saved, path=texts, error=texts),
    st.builds(m.Checkpointed, step=whole, path=texts, error=texts, bytes=whole, seconds=st.floats()),
    st.builds(m.Restored, step=whole, path=texts, damaged=st.lists(texts).map(tuple)),
    st.builds(m.Restored, step=whole, differences=st.lists(texts).map(tuple)),
    st.builds(m.Digests, step=whole, names=st.lists(texts).map(tuple), digests=st.lists(whole).map(tuple)),
    st.builds(m.Finished, fingerprint=texts, round=whole, step=whole),
)  # fmt: skip


def session_of(**activity: Any) -> Session:
    """A worker's, whose connection stands, in the first view."""
    hello = m.Hello(kind="worker", session="s")
    session = Session(hello, WorkerStateMachine(""), lambda: Activity(**activity), lambda: None, 0.0)
    session.on_message(session.on_connected(0.0).attempt, welcome(worker="a"), 0.0)
    return session


def arrives(message: m.Message) -> m.Message:
    """Raises msgspec.ValidationError, as the coordinator does before it expels the sender."""
    return m.decode_from_worker(m.encode(message))


@pytest.mark.failure(
    "The training loop",
    (
        "a worker sends more than the coordinator accepts: an exception of megabytes, a rate that is no number, over "
        "100,000 tensors"
    ),
    seen="texts are shortened, long facts get a digest; for the rest an error names the field, the value and the limit",
    outcome="with an error the script fails, exit code 1; the state is saved; no worker is removed",
)
@FAST
@given(MESSAGES)
def test_the_coordinator_takes_whatever_a_worker_sends(message: m.Message) -> None:
    session = session_of()
    session.tell(message, 0.0)
    said = [arrives(each) for each in session.take()]
    assert type(said[-1]) in (type(message), m.ScriptFailed)
    session.on_connected(1.0)
    session.on_message(session.attempt, welcome(worker="a"), 1.0)
    assert [arrives(each) for each in session.take()] == [s for s in said if not isinstance(s, m.Heartbeat)][
        : len(session._repeated)
    ]


@FAST
@given(st.fixed_dictionaries(dict.fromkeys(("epoch", "shards_computed", "shard_us", "shards", "shards_total"), whole)))
def test_the_coordinator_takes_whatever_a_heartbeat_would_hold(activity: dict[str, int]) -> None:
    session = session_of(**activity)
    session.beat(0.0)
    session.tell(m.ScriptFailed(traceback="why"), 0.0)
    assert all(isinstance(arrives(message), m.Heartbeat | m.ScriptFailed) for message in session.take())


@pytest.mark.failure(
    "The training loop",
    (
        "a worker sends more than the coordinator accepts: an exception of megabytes, a rate that is no number, over "
        "100,000 tensors"
    ),
)
def test_what_cannot_be_sent_ends_the_run_with_the_reason_and_expels_nobody() -> None:
    session = session_of()
    session.tell(m.NotFinite(step=2**60, loss="nan"), 0.0)
    scene = trained("a", "b")
    for message in session.take():
        scene.say("a", arrives(message))
    failed = next(fields for name, fields in scene.fields.items() if "traceback" in fields)
    assert failed["worker"] == "a"
    for said in ("NotFinite.step", str(2**60), str(2**53)):
        assert said in failed["traceback"]
    assert set(scene.coordinator.workers) == {"a", "b"}
    assert scene.closed == []


def test_a_long_reason_keeps_its_beginning_and_its_end() -> None:
    session = session_of()
    session.tell(m.ScriptFailed(traceback="first" + "x" * 200_000 + "\udcff" + "last"), 0.0)
    said = arrives(session.take()[-1])
    assert isinstance(said, m.ScriptFailed)
    assert said.traceback.startswith("first")
    assert said.traceback.endswith("?last")


@FAST
@given(st.dictionaries(st.sampled_from(METRICS), anything))
def test_a_steps_line_is_taken_or_is_an_error(fields: dict[str, Any]) -> None:
    try:
        line = stepped(3, **fields)
    except UsageError:
        return
    read_back(line)


@FAST
@given(st.dictionaries(texts, anything, max_size=4), st.integers(0, 10))
def test_a_line_of_run_log_is_taken_or_is_an_error(fields: dict[str, Any], index: int) -> None:
    try:
        line = m.Line(step=3, index=index + 1, fields={name: number(name, value) for name, value in fields.items()})
    except UsageError:
        return
    read_back(line)


def read_back(line: m.Line) -> None:
    beat = arrives(m.Heartbeat(lines=(line,)))
    assert isinstance(beat, m.Heartbeat)
    assert parse_line(as_written(metrics_line(beat.lines[0]))) is not None


class Number(float):
    pass


@pytest.mark.parametrize(
    "value", [np.float64(0.5), np.float32(0.5), Number(0.5), np.int64(3), np.str_("x"), np.bool_(1)]
)
def test_numbers_of_others_are_logged_as_pythons_own(value: Any) -> None:
    logged = number("it", value)
    assert type(logged) in (float, int, str, bool)
    assert logged == value


def test_an_error_names_the_field_the_value_and_the_limit() -> None:
    with pytest.raises(UsageError) as error:
        stepped(3, total=2**60)
    for said in ("total", str(2**60), str(2**53)):
        assert said in str(error.value)


@FAST
@given(st.lists(st.tuples(texts, texts), max_size=5))
def test_the_coordinator_takes_any_facts(facts: list[tuple[str, str]]) -> None:
    ready = arrives(m.Ready(signature=m.Signature.of(facts), unreached="x" * 60_000))
    assert isinstance(ready, m.Ready)
    assert ready.signature == m.Signature.of(facts)


def test_long_facts_that_differ_stay_different() -> None:
    one, other = abridged("x" * 1_000_000 + "a"), abridged("x" * 1_000_000 + "b")
    assert one != other
    assert len(one) < 2000


@pytest.mark.failure(
    "The training loop",
    (
        "a worker sends more than the coordinator accepts: an exception of megabytes, a rate that is no number, over "
        "100,000 tensors"
    ),
)
@pytest.mark.parametrize("facts", [[("p", "(2,) float32")] * 100_001, [("p" * 100, "x")] * 50_000])
def test_too_many_facts_are_an_error(facts: list[tuple[str, str]]) -> None:
    with pytest.raises(UsageError, match=f"{len(facts)} facts"):
        m.Signature.of(facts)


@pytest.mark.parametrize("name", ["x", "\U0001f600" * 180], ids=["short", "long"])
def test_a_report_of_many_checked_shards_fits_into_a_message(name: str) -> None:
    member = WorkerStateMachine("a")
    member.view = View(number=1, members=("a", "b"), group=1)
    checking = Checking(member, m.RunTerms(audit=1.0))
    shards = 60
    found = [(shard, [f"{name}{i}" for i in range(400)], list(range(400))) for shard in range(shards)]

    def computed(changed: int) -> Computed:
        checking.begin()
        checking.arrange(Lineage(sets=(("a", "b"),)), 2 * shards, 3)
        for shard, names, digests in found:
            checking.on_digests(shard, names, [*digests[:-1], changed])
            checking.on_check(shard + shards, names, digests)
        return member.own_results

    held = computed(1)
    assert len(held.shards) == shards
    assert fitting(held.names) == len(held.names) <= MAX_NAMED
    lineage = Lineage(sets=(("a", "b"),))
    arrives(
        m.Stopped(stop=1, view=None, round=3, step=3, has_result=True, synced=True, lineage=lineage, own_results=held,
                  check_results=member.check_results)
    )  # fmt: skip
    assert held.number != computed(2).number, "also by a digest that has no place of its own"
