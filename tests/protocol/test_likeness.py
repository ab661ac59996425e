"""Whose bits are the run's: differences of numerics, what they mean under each of `--bits`, and how they are told."""

from __future__ import annotations

import pytest

from farandole.observe.text import describe
from farandole.protocol import messages as m
from farandole.protocol.coordinator.admission import MOST_TOLD
from farandole.protocol.events import BitsNotPromisedEvent, NumericsEvent, OtherVersionsEvent, SettingChangedEvent
from farandole.protocol.numeric_facts import (
    REPLAYED,
    SINCE_THEN,
    Facts,
    numeric_differences,
    numerics_refusal,
    unlike_then,
)
from tests.support.mentioned import mentions
from tests.support.scene import Scene, trained

MATMUL, EXP, JPEG = "operation matmul of 2x3 by 3x2", "operation exp", "decoder JPEG of 8x8"
TORCH, THREADS, TF32 = "torch version", "intra-op threads", "setting TF32"
DECODING = "decoding of JPEG"
OURS = {
    "farandole version": "1", TORCH: "2.13", "numpy version": "2", "device": "CPU with AVX512", THREADS: "1",
    TF32: "off", MATMUL: "0a", EXP: "0b", JPEG: "0c", DECODING: "Pillow 13", "weight": "(2, 3) float32",
}  # fmt: skip
SEE = "farandole numerics --against TICKET", "--bits any"


def facts(**changes: str | None) -> tuple[tuple[str, str], ...]:
    changed = {**OURS, **{NAMES[name]: value for name, value in changes.items()}}
    return tuple((name, value) for name, value in changed.items() if value is not None)


NAMES = {"torch": TORCH, "numpy": "numpy version", "device": "device", "threads": THREADS, "tf32": TF32,
         "matmul": MATMUL, "exp": EXP, "jpeg": JPEG, "decoding": DECODING, "weight": "weight"}  # fmt: skip

DIFFERENCES = [
    ({}, ()),
    ({"matmul": "1a"}, (MATMUL, *SEE)),
    ({"exp": "1b", "matmul": "1a"}, (MATMUL, 1, 2, *SEE)),
    ({"matmul": None}, (MATMUL, *SEE)),
    ({"jpeg": "1c"}, (JPEG, *SEE)),
    ({"jpeg": None}, ()),  # it has loaded no decoder
    ({"decoding": "Pillow 14"}, (DECODING, "Pillow 13", "Pillow 14", "--bits any")),
    ({"decoding": None}, ()),  # it has no dataset in hand, as `farandole numerics`
    ({"tf32": "on"}, (TF32, "off", "on")),
    ({"tf32": None}, (TF32, "off", "none")),
    ({"threads": "2"}, (THREADS, 1, 2)),
    ({"device": "CPU with AVX2", "matmul": "1a"}, ("device", "CPU with AVX512", "CPU with AVX2", MATMUL, *SEE)),
    ({"torch": "2.14", "matmul": "1a"}, (MATMUL, TORCH, "2.13", "2.14", *SEE)),
    ({"torch": "2.14", "numpy": "3"}, ()),
    ({"torch": "2.14", "matmul": None, "exp": None}, (TORCH, "2.13", "2.14")),
]  # fmt: skip


@pytest.mark.failure(
    "External workers, pools and machines",
    (
        "the host of an external worker computes other bits: another CPU maker, other instructions, other MKL or "
        "oneDNN settings, another torch"
    ),
)
@pytest.mark.parametrize(("changes", "named"), DIFFERENCES)
def test_who_differs_is_refused_by_the_name_of_what_differs(
    changes: dict[str, str | None], named: tuple[object, ...]
) -> None:
    found = numeric_differences(facts(), facts(**changes))
    reason = numerics_refusal(found, "same")
    assert bool(named) == bool(reason) == found.bits
    if named:
        assert reason.startswith(str(named[0]))
        assert mentions(reason, *named)
    assert numerics_refusal(found, "portable") == numerics_refusal(found, "same")
    assert numerics_refusal(found, "any") == ""


def test_it_does_not_matter_on_which_side_something_is_missing() -> None:
    for name in ("matmul", "tf32"):
        assert numeric_differences(facts(**{name: None}), facts()).bits, (
            "what the run has not computed can't have agreed"
        )
    assert not numeric_differences(facts(jpeg=None), facts()).bits


def test_code_data_and_shapes_refuse_whatever_is_promised_of_the_bits() -> None:
    scene = trained("a", facts=facts(), bits="any")
    scene.ready("b", facts=facts(weight="(2, 4) float32", matmul="1a"))
    assert mentions(scene.last("b", m.JoinRefused).reason, "weight", "(2, 3) float32", "(2, 4) float32")
    assert "bits not promised" not in scene.events


@pytest.mark.failure(
    "Data and loader processes",
    "a joiner decodes images with another library or version, or the `facts()` of its dataset differ",
)
def test_by_option_other_bits_are_let_in_and_it_is_told_from_when_on() -> None:
    scene = trained("a", facts=facts(), bits="any")
    assert scene.coordinator.view
    scene.say("a", m.Heartbeat(view=scene.coordinator.view.number, step=7))
    scene.ready("b", facts=facts(matmul="1a", tf32="on"))
    setting, operation = scene.fields["bits not promised"]["what"]
    assert scene.fields["bits not promised"] == {"worker": "b", "step": 7, "what": [setting, operation]}
    assert mentions(setting, TF32, "off", "on")
    assert mentions(operation, MATMUL)
    assert scene.coordinator.workers["b"].state == "ready"
    scene.ready("c", facts=facts())
    assert scene.fields["bits not promised"]["worker"] == "b", "who is like the run is not told of"
    scene.ready("d", facts=facts(decoding="Pillow 14"))
    (decoding,) = scene.fields["bits not promised"]["what"]
    assert mentions(decoding, DECODING, "Pillow 13", "Pillow 14")


@pytest.mark.failure(
    "External workers, pools and machines",
    "an external worker has another version of torch or NumPy, and computes the same bits",
    seen="an event with both versions",
    outcome="it is admitted; it is refused if its optimizer has more settings than the run's",
)
def test_another_version_is_let_in_where_all_operations_agree_and_it_is_told() -> None:
    scene = trained("a", facts=facts())
    scene.ready("b", facts=facts(torch="2.14"))
    assert scene.fields["other versions"]["worker"] == "b"
    (what,) = scene.fields["other versions"]["what"]
    assert mentions(what, TORCH, "2.13", "2.14")
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
    ("then", "now", "named"),
    [
        (facts(), facts(), ()),
        (facts(), facts(torch="2.14"), (TORCH, "2.13", "2.14")),
        (facts(), facts(exp="1b"), (EXP,)),
        (facts(exp=None, matmul=None, tf32=None), facts(), ()),  # a record from before there was a fingerprint
        (facts(exp=None, matmul=None), facts(torch="2.14"), (TORCH, "2.13", "2.14")),
    ],
)
def test_a_record_is_compared_in_what_it_says(then: Facts, now: Facts, named: tuple[str, ...]) -> None:
    told = unlike_then(then, now).words(SINCE_THEN)
    assert len(told) == bool(named)
    assert all(mentions(each, *named) for each in told)


def test_in_words() -> None:
    (replayed,) = numeric_differences(facts(), facts(exp="1b")).words(REPLAYED)
    assert mentions(replayed, EXP)
    assert mentions(describe(NumericsEvent(worker="w1", facts=dict(facts()))), "w1", "CPU with AVX512", "torch", "2.13")
    changed = describe(SettingChangedEvent(worker="w1", step=3, setting="setting TF32", before="off", now="on"))
    assert mentions(changed, "w1", "step 3", "setting TF32", "off", "on")
    assert mentions(describe(OtherVersionsEvent(worker="b", what=("torch version: ...",))), "b", "torch version: ...")
    told = describe(BitsNotPromisedEvent(worker="b", step=7, what=("exp: ...", "log: ...")))
    assert mentions(told.lower(), "b", "step 7", "exp: ...", "log: ...")
    told = describe(BitsNotPromisedEvent(worker="b", step=-1, what=("exp: ...",)))
    assert mentions(told, "b", "exp: ...")
    assert not mentions(told, -1)


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
