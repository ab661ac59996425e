"""Whose bits are the run's: differences of numerics, what they mean under each of `--bits`, and how they are told."""

from __future__ import annotations

import pytest

from farandole.membership import messages as m
from farandole.membership.admission import MOST_TOLD
from farandole.membership.events import BitsNotPromised, Numerics, OtherVersions, SettingChanged
from farandole.membership.likeness import REPLAYED, SINCE_THEN, Facts, refusal, unlike, unlike_then
from farandole.observe.words import describe
from tests.support.scene import Scene, trained

MATMUL, EXP, JPEG = "operation matmul of 2x3 by 3x2", "operation exp", "decoder JPEG of 8x8"
TORCH, THREADS, TF32 = "torch version", "intra-op threads", "setting TF32"
DECODING = "decoding of JPEG"
OURS = {
    "farandole version": "1", TORCH: "2.13", "numpy version": "2", "device": "CPU with AVX512", THREADS: "1",
    TF32: "off", MATMUL: "0a", EXP: "0b", JPEG: "0c", DECODING: "Pillow 13", "weight": "(2, 3) float32",
}  # fmt: skip
SEE = "; see `farandole numerics --against TICKET`, or give the run --bits any"


def facts(**changes: str | None) -> tuple[tuple[str, str], ...]:
    changed = {**OURS, **{NAMES[name]: value for name, value in changes.items()}}
    return tuple((name, value) for name, value in changed.items() if value is not None)


NAMES = {"torch": TORCH, "numpy": "numpy version", "device": "device", "threads": THREADS, "tf32": TF32,
         "matmul": MATMUL, "exp": EXP, "jpeg": JPEG, "decoding": DECODING, "weight": "weight"}  # fmt: skip

DIFFERENCES = [
    ({}, ""),
    ({"matmul": "1a"}, f"{MATMUL}: this worker computes other bits than the run{SEE}"),
    ({"exp": "1b", "matmul": "1a"}, f"{MATMUL}: this worker computes other bits than the run, as in 1 more of 2{SEE}"),
    ({"matmul": None}, f"{MATMUL}: this worker computes other bits than the run{SEE}"),
    ({"jpeg": "1c"}, f"{JPEG}: this worker computes other bits than the run{SEE}"),
    ({"jpeg": None}, ""),  # it has loaded no decoder
    ({"decoding": "Pillow 14"},
     f"{DECODING}: the run has Pillow 13, this worker has Pillow 14; install what the run has, or give it --bits any"),
    ({"decoding": None}, ""),  # it has no dataset in hand, as `farandole numerics`
    ({"tf32": "on"}, f"{TF32}: the run has off, this worker has on"),
    ({"tf32": None}, f"{TF32}: the run has off, this worker has none"),
    ({"threads": "2"}, f"{THREADS}: the run has 1, this worker has 2"),
    ({"device": "CPU with AVX2", "matmul": "1a"},
     f"device: the run has CPU with AVX512, this worker has CPU with AVX2 ({MATMUL}: this worker computes other bits "
     f"than the run){SEE}"),
    ({"torch": "2.14", "matmul": "1a"},
     f"{MATMUL}: this worker computes other bits than the run ({TORCH}: the run has 2.13, this worker has 2.14){SEE}"),
    ({"torch": "2.14", "numpy": "3"}, ""),
    ({"torch": "2.14", "matmul": None, "exp": None}, f"{TORCH}: the run has 2.13, this worker has 2.14"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), DIFFERENCES)
def test_who_differs_is_refused_by_the_name_of_what_differs(changes: dict[str, str | None], reason: str) -> None:
    found = unlike(facts(), facts(**changes))
    assert refusal(found, "same").startswith(reason) if reason else not refusal(found, "same")
    assert bool(reason) == found.bits
    assert refusal(found, "portable") == refusal(found, "same")
    assert refusal(found, "any") == ""


def test_it_does_not_matter_on_which_side_something_is_missing() -> None:
    for name in ("matmul", "tf32"):
        assert unlike(facts(**{name: None}), facts()).bits, "what the run has not computed can't have agreed"
    assert not unlike(facts(jpeg=None), facts()).bits


def test_code_data_and_shapes_refuse_whatever_is_promised_of_the_bits() -> None:
    scene = trained("a", facts=facts(), bits="any")
    scene.ready("b", facts=facts(weight="(2, 4) float32", matmul="1a"))
    assert scene.last("b", m.Refused).reason == "weight: the run has (2, 3) float32, this worker has (2, 4) float32"
    assert "bits not promised" not in scene.events


def test_by_option_other_bits_are_let_in_and_it_is_told_from_when_on() -> None:
    scene = trained("a", facts=facts(), bits="any")
    assert scene.coordinator.view
    scene.say("a", m.Heartbeat(view=scene.coordinator.view.number, step=7))
    scene.ready("b", facts=facts(matmul="1a", tf32="on"))
    what = [f"{TF32}: the run has off, this worker has on", f"{MATMUL}: this worker computes other bits than the run"]
    assert scene.fields["bits not promised"] == {"worker": "b", "step": 7, "what": what}
    assert scene.coordinator.workers["b"].state == "ready"
    scene.ready("c", facts=facts())
    assert scene.fields["bits not promised"]["worker"] == "b", "who is like the run is not told of"
    scene.ready("d", facts=facts(decoding="Pillow 14"))
    assert scene.fields["bits not promised"]["what"] == [
        f"{DECODING}: the run has Pillow 13, this worker has Pillow 14"
    ]


def test_another_version_is_let_in_where_all_operations_agree_and_it_is_told() -> None:
    scene = trained("a", facts=facts())
    scene.ready("b", facts=facts(torch="2.14"))
    assert scene.fields["other versions"] == {
        "worker": "b", "what": [f"{TORCH}: the run has 2.13, this worker has 2.14"],
    }  # fmt: skip
    assert scene.coordinator.workers["b"].state == "ready"


def test_the_runs_numerics_are_told_once_and_are_those_of_its_first_worker() -> None:
    scene = Scene()
    scene.ready("a", facts=facts())
    numerics = {name: value for name, value in OURS.items() if name not in ("farandole version", "weight")}
    assert scene.fields["numerics"] == {"worker": "a", "facts": numerics}
    scene.forget()
    scene.ready("b", facts=facts())
    assert "numerics" not in scene.events


def test_a_setting_that_all_alter_alike_is_told_once_and_not_for_ever() -> None:
    scene = trained("a", "b")
    scene.hello("stranger")
    said = m.SettingChanged(step=3, setting="setting TF32", before="off", now="on")
    scene.say("stranger", said)
    for worker in ("a", "b"):
        scene.say(worker, said)
    assert scene.events.count("setting changed") == 1
    assert scene.fields["setting changed"] == {
        "worker": "a", "step": 3, "setting": "setting TF32", "before": "off", "now": "on",
    }  # fmt: skip
    for step in range(4, 2 * MOST_TOLD):
        scene.say("b", m.SettingChanged(step=step, setting="setting TF32", before="on", now="off"))
    assert scene.events.count("setting changed") == MOST_TOLD


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (facts(), facts(), ()),
        (facts(), facts(torch="2.14"), (f"{TORCH}: 2.13 then, 2.14 now",)),
        (facts(), facts(exp="1b"), (f"{EXP}: other bits are computed now than then",)),
        (facts(exp=None, matmul=None, tf32=None), facts(), ()),  # a record from before there was a fingerprint
        (facts(exp=None, matmul=None), facts(torch="2.14"), (f"{TORCH}: 2.13 then, 2.14 now",)),
    ],
)
def test_a_record_is_compared_in_what_it_says(then: Facts, now: Facts, told: tuple[str, ...]) -> None:
    assert unlike_then(then, now).words(SINCE_THEN) == told


def test_in_words() -> None:
    assert unlike(facts(), facts(exp="1b")).words(REPLAYED) == (f"{EXP}: other bits are computed here than in the run",)
    assert describe(Numerics(worker="w1", facts=dict(facts()))) == (
        "the bits are those of CPU with AVX512, torch 2.13 on w1"
    )
    assert describe(SettingChanged(worker="w1", step=3, setting="setting TF32", before="off", now="on")) == (
        "setting TF32: off before, on from step 3 on, as the script on w1 has set it"
    )
    assert describe(OtherVersions(worker="b", what=("torch version: ...",))) == (
        "b has other libraries and computes the run's bits: torch version: ..."
    )
    assert describe(BitsNotPromised(worker="b", step=7, what=("exp: ...", "log: ..."))) == (
        "THE BITS ARE NOT PROMISED AFTER STEP 7: b is let in, exp: ...; log: ..."
    )
    assert describe(BitsNotPromised(worker="b", step=-1, what=("exp: ...",))) == (
        "THE BITS ARE NOT PROMISED FROM THE BEGINNING ON: b is let in, exp: ..."
    )


def test_an_operator_that_is_not_known_to_be_portable_is_told_of_once_whoever_runs_it() -> None:
    scene = trained("a", "b", facts=facts(), bits="portable")
    scene.say("a", m.UnknownOperator(operator="aten.roll.default"))
    assert scene.fields["unknown operator"] == {"worker": "a", "operator": "aten.roll.default"}
    scene.forget()
    scene.say("b", m.UnknownOperator(operator="aten.roll.default"))
    assert "unknown operator" not in scene.events
    scene.say("b", m.UnknownOperator(operator="aten.flip.default"))
    assert scene.fields["unknown operator"]["worker"] == "b"
    for number in range(200):
        scene.say("b", m.UnknownOperator(operator=f"mine.{number}.default"))
    assert scene.events.count("unknown operator") == 99, "a worker that makes them up fills no journal"
