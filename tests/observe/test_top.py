"""`farandole top`: what its pictures say, and what they leave out; names of others are text."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
from rich.console import Console, RenderableType

from farandole.control.status import Stalled, left_s
from farandole.observe.live import EVENTS, Recent, list_picture, picture
from farandole.observe.text import NAMED, in_words, workers
from farandole.protocol import events
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, step_line
from tests.support.told_run import STATUS
from tests.support.told_run import STEERING as NASTY


def drawn(shown: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(shown)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def recent(*steps: int) -> Recent:
    found = Recent()
    for step in steps:
        found.line(step_line(step, loss=0.25, learning_rate=0.1, factor=2.0, samples=64, seconds=2.0, time=100.0))
    return found


def test_a_run_at_a_glance() -> None:
    seen = recent(50, 51, 52)
    seen.line(an(events.LostEvent, worker=NASTY, reason="killed by signal 9"))
    text = drawn(picture(STATUS, seen))
    for values in (
        ("resnet",), (2, 4, "w3", "[bold]w2[/bold]\ufffd[31m"), ("step 57 of 100", "epoch 2", "2 min"),
        ("loss 0.25",), ("learning rate 0.1 x 2",), ("batch 64",), ("1234 samples/s",), ("killed by signal 9",),
    ):  # fmt: skip
        assert mentions(text, *values), values
    assert "[bold]w2[/bold]" in text, "as it is, and no markup"
    assert "\x1b" not in text


def test_what_is_not_known_is_not_shown() -> None:
    bare = msgspec.structs.replace(STATUS, total=None, loss=None, samples_per_s=None, workers=())
    text = drawn(picture(bare, Recent()))
    assert mentions(text, "step 57", "epoch 2")
    for words in ("left", "loss", "samples/s", "goodput", "dollars", "worker  rank"):
        assert words not in text, words


def test_a_loss_that_is_no_number_and_a_training_that_stands() -> None:
    seen = Recent()
    seen.line(step_line(5, loss=math.inf))
    stands = msgspec.structs.replace(STATUS, loss=None, stalled=Stalled(seconds=31.0, workers=("w1",)))
    text = drawn(picture(stands, seen, "no answer for 3 s"))
    assert mentions(text, "31 s", "w1")
    assert "no answer for 3 s" in text


def test_only_the_newest_events_are_kept() -> None:
    seen = Recent()
    for number in range(EVENTS + 5):
        seen.line(an(events.LostEvent, worker=f"w{number}"))
    assert len(seen.events) == EVENTS
    assert f"w{EVENTS + 4} " in seen.events[-1]


def test_several_runs_have_a_line_each_also_one_that_does_not_answer() -> None:
    text = drawn(list_picture({"a": STATUS, "b": None}))
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [["a", "training", "57"], ["b", "no", "answer"]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"), (200_000, "2 d 7 h")],
)
def test_time_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_the_time_that_is_left_is_that_of_the_newest_steps() -> None:
    assert left_s(STATUS.total, recent(50, 51).steps) == pytest.approx(2.0 * 48)
    assert left_s(STATUS.total, recent(99, 100).steps) == 0.0
    assert left_s(STATUS.total, recent().steps) is None


def test_of_many_who_come_the_first_are_named() -> None:
    many = [f"w{number}" for number in range(NAMED + 3)]
    said = workers(2, 9, many, [])
    assert mentions(said, 2, 9, *many[:NAMED], 3)
    assert not mentions(said, many[NAMED])
    assert mentions(workers(2, None, [], many[:2]), 2, "w0", "w1")
