"""What the records of the check say: the first difference, its cause, and what is no cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farandole.check.findings import MOST_SUSPECTS, Finding, findings_of_bits, is_complete
from farandole.check.records import STEPS, ComputedShard, Leaves, Record, StateRecord
from farandole.protocol.messages import MICRO_BATCH

LOSS = "the loss"


def leaf(value: object, kind: str = "value") -> tuple[str, str]:
    return kind, str(value)


def leg(
    workers: Sequence[str], steps: Sequence[int], *, shards: int = 2, script: dict[int, Leaves] | None = None,
    unlike: tuple[int, int | None, str] | None = None,
) -> list[Record]:  # fmt: skip
    """A leg in which worker n computes shard n. `unlike`: the step, shard and name that differ."""
    found: list[Record] = []
    for step in steps:
        leaves = (script or {}).get(step, {})
        for worker in workers:
            digests = {"model.weight": 10 + step, "model.bias": 20 + step}
            if unlike and unlike[:2] == (step, None):
                digests[unlike[2]] += 1000
            found.append(StateRecord(worker=worker, step=step, digests=digests, script=leaves))
        for shard in range(shards) if step < STEPS else ():
            pairs = {MICRO_BATCH: step * 10 + shard, LOSS: step * 10 + shard}
            if unlike and unlike[:2] == (step, shard):
                pairs[unlike[2]] += 1000
            worker = workers[shard % len(workers)]
            found.append(
                ComputedShard(
                    worker=worker, step=step, shard=shard, names=tuple(pairs), digests=tuple(pairs.values()),
                    script=leaves,
                )
            )  # fmt: skip
    return found


def joined() -> list[Record]:
    """Two workers from step 0, and w2 from step 1; w0 is lost in step 2."""
    return [*leg(("w0", "w1"), (0,)), *leg(("w0", "w1", "w2"), (1, 2)), *leg(("w1", "w2"), (3,))]


def counting(*first: int) -> dict[int, Leaves]:
    """`calls` counts the steps from `first` on, and a clock runs."""
    return {step: {"calls": leaf(step - first[0])} for step in range(STEPS + 1)}


ALONE = leg(("alone",), range(STEPS + 1), script=counting(0))
ALL = ("workers", "join", "loss", "values", "resume")


def outcomes(found: Sequence[Finding]) -> dict[str, str]:
    return {each.comparison: each.outcome for each in found}


def test_equal_records_agree() -> None:
    found = findings_of_bits(ALONE, joined(), leg(("alone",), (1, 2, 3)))
    assert outcomes(found) == dict.fromkeys(ALL, "agrees")


def test_what_has_no_records_is_not_compared() -> None:
    assert outcomes(findings_of_bits(ALONE, (), ())) == dict.fromkeys(ALL, "not compared")


@pytest.mark.parametrize(
    "case",
    [
        ((0, 1, LOSS), ("differs", "not compared", "not compared")),
        ((1, None, "model.weight"), ("differs", "not compared", "not compared")),
        ((1, 1, LOSS), ("agrees", "differs", "not compared")),
        ((2, None, "model.bias"), ("agrees", "differs", "not compared")),
        ((2, 0, MICRO_BATCH), ("agrees", "agrees", "differs")),
        ((3, None, "model.bias"), ("agrees", "agrees", "differs")),
    ],
)
def test_a_difference_belongs_to_the_event_of_its_step(
    case: tuple[tuple[int, int | None, str], tuple[str, ...]],
) -> None:
    place, expected = case
    members = [(("w0", "w1"), (0,)), (("w0", "w1", "w2"), (1, 2)), (("w1", "w2"), (3,))]
    run = [each for workers, steps in members for each in leg(workers, steps, unlike=place)]
    found = findings_of_bits(ALONE, run, leg(("alone",), (1, 2, 3)))
    assert tuple(each.outcome for each in found) == (*expected, "agrees", "agrees")
    [first] = [each.first for each in found if each.first]
    assert (first.step, first.shard, first.name) == place


def test_what_nobody_has_computed_does_not_agree() -> None:
    missing = [each for each in joined() if not (isinstance(each, ComputedShard) and (each.step, each.shard) == (0, 1))]
    found = outcomes(findings_of_bits(ALONE, missing, ()))
    assert found == {**dict.fromkeys(ALL, "not compared"), "values": "agrees"}
    for step in range(1, STEPS + 1):
        states = [each for each in joined() if not (isinstance(each, StateRecord) and each.step == step)]
        assert "not compared" in outcomes(findings_of_bits(ALONE, states, ())).values()
    nobody_joins = [
        each for each in joined() if not isinstance(each, ComputedShard | StateRecord) or each.worker != "w2"
    ]
    assert outcomes(findings_of_bits(ALONE, nobody_joins, ()))["join"] == "not compared"
    nobody_dies = [*joined(), *leg(("w0",), (STEPS,))]
    assert outcomes(findings_of_bits(ALONE, nobody_dies, ()))["loss"] == "not compared"


def test_a_state_that_only_the_joiner_has_otherwise_is_the_joins() -> None:
    records = [
        each for each in joined() if not (isinstance(each, StateRecord) and (each.worker, each.step) == ("w2", 1))
    ]
    records.append(StateRecord(worker="w2", step=1, digests={"model.weight": 1, "model.bias": 21}))
    found = findings_of_bits(ALONE, records, ())
    assert outcomes(found)["workers"] == "agrees"
    first = found[1].first
    assert first is not None
    assert (first.worker, first.step, first.shard, first.name) == ("w2", 1, None, "model.weight")


def resumed(script: Leaves, name: str = LOSS, alone: Leaves | None = None, fresh: Leaves | None = None) -> Finding:
    """The finding of a resume whose shard 0 of step 1 differs, with this state of the script there.

    `alone`: that of the leg `alone` there; in its step 0 it has other values. `fresh`: that of the run in step 0.
    """
    then = alone or {}
    before: Leaves = {n: (kind, f"{value}, before") for n, (kind, value) in then.items()}
    reference = leg(("alone",), range(STEPS + 1), script={0: before, 1: then, 2: then, 3: then})
    run = leg(("w0", "w1"), (0,), script={0: before | (fresh or {})})
    return findings_of_bits(
        reference, run, leg(("alone",), (1,), script={1: script}, unlike=(1, 0, name))
    )[-1]  # fmt: skip


def test_a_counter_that_begins_anew_is_named() -> None:
    found = resumed({"calls": leaf(0), "rate": leaf(3)}, alone={"calls": leaf(1), "rate": leaf(3)})
    assert found.cause == "script state"
    assert [each.name for each in found.suspects] == ["calls"]


def test_a_constant_is_no_cause() -> None:
    reference = leg(("alone",), range(STEPS + 1), script={step: {"pid": leaf(7)} for step in range(STEPS + 1)})
    other = leg(("alone",), (1,), script={1: {"pid": leaf(8)}}, unlike=(1, 0, LOSS))
    found = findings_of_bits(reference, (), other)[-1]
    assert (found.cause, found.suspects) == ("unknown", ())


def test_a_clock_is_no_cause_and_a_generator_that_is_never_the_same_is_one() -> None:
    alone = {"began": leaf(1), "noise": leaf(1, "generator")}
    mine = {"began": leaf(2), "noise": leaf(2, "generator")}
    found = resumed(mine, alone=alone, fresh=mine)
    assert found.cause == "generator"
    assert [each.name for each in found.suspects] == ["noise"]
    assert resumed({"began": leaf(2)}, alone={"began": leaf(1)}, fresh={"began": leaf(9)}).cause == "unknown"


def test_the_likeliest_kind_comes_first() -> None:
    kinds = ("value", "tensor", "object", "generator")
    for most in range(len(kinds), 0, -1):
        alone = {kind: leaf(1, kind) for kind in kinds[:most]}
        found = resumed({kind: leaf(2, kind) for kind in kinds[:most]}, alone=alone)
        assert [each.name for each in found.suspects] == [*reversed(kinds[:most])][:MOST_SUSPECTS]
        assert found.cause == ("script state", "script state", "not replicated", "generator")[most - 1]


def test_causes_without_a_suspect() -> None:
    assert resumed({}).cause == "unknown"
    assert resumed({}, MICRO_BATCH).cause == "samples"
    run = leg(("w0", "w1"), (0,), unlike=(0, None, "model.weight"))
    assert findings_of_bits(ALONE, run, ())[0].cause == "first state"
    run = leg(("w0", "w1"), (0, 1), unlike=(1, None, "model.weight"))
    assert findings_of_bits(ALONE, run, ())[0].cause == "update"


def test_other_samples_of_loader_processes_come_from_a_generator_that_is_not_the_datasets() -> None:
    leaves = {"dataset.noise": leaf(1, "generator"), "noise": leaf(1, "generator")}
    found = resumed(leaves, MICRO_BATCH)
    assert found.cause == "generator"
    assert [each.name for each in found.suspects] == ["noise"]


def test_a_run_is_complete_with_the_last_states_of_those_who_are_left() -> None:
    records = joined()
    assert is_complete(records, 2)
    assert not is_complete(records, 3)
    assert not is_complete(records[:-1], 2)


def test_a_sum_that_the_first_workers_have_otherwise_is_each_ones_own() -> None:
    def totals(*at: object, clock: int = 0) -> dict[int, Leaves]:
        return {
            step: {"total": leaf(total), "clock": leaf(clock + step), "noise": leaf(clock + step, "generator")}
            for step, total in enumerate(at)
        }

    alone = leg(("alone",), range(STEPS + 1), script=totals(0, 4, 8, 12))
    same = [*leg(("w0",), (0, 1), script=totals(0, 4)), *leg(("w1",), (0, 1), script=totals(0, 4))]
    parts = [*leg(("w0",), (0, 1), script=totals(0, 3, clock=5)), *leg(("w1",), (0, 1), script=totals(0, 1, clock=9))]
    joiner = [*same, *leg(("w2",), (1,), script=totals(0, 0))]
    checker = ComputedShard(worker="w1", step=0, shard=0, script={"total": leaf(1), "clock": leaf(9)})
    for records, names in ((same, []), (parts, ["total"]), ([checker, *parts], ["total"]), (joiner, [])):
        [found] = [each for each in findings_of_bits(alone, records, ()) if each.comparison == "values"]
        assert found.outcome == "agrees"
        assert [suspect.name for suspect in found.suspects] == names
        assert found.cause == ("own part" if names else "")
