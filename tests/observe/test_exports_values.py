"""What a line says, as numbers and texts."""

from __future__ import annotations

import math

from farandole.observe.export_common import OURS, of_log, of_step
from farandole.protocol.metrics import LogLine, as_written, parse_line
from tests.support.metric_lines import step_line


def test_a_step_has_its_numbers_and_no_others() -> None:
    line = step_line(3, epoch=2, samples=64, loss=0.5, seconds=0.25, samples_per_s=256.0, view=4, workers=2,
                     learning_rate=0.1, factor=2.0, skipped=1, evaluation_s=0.1, once_s=0.05, pause_s=0.02)  # fmt: skip
    assert of_step(line) == {
        "step/loss": 0.5, "step/learning_rate": 0.2, "step/learning_rate_factor": 2.0,
        "step/samples_per_second": 256.0, "step/seconds": 0.25, "step/samples": 64, "step/samples_skipped": 1,
        "step/workers": 2, "step/view": 4, "step/epoch": 2, "step/evaluation_seconds": 0.1,
        "step/once_seconds": 0.05, "step/pause_seconds": 0.02,
    }  # fmt: skip
    assert set(of_step(line)) == OURS
    unknown = of_step(step_line(3))
    assert "step/learning_rate" not in unknown, "what is not known is not 0"


def test_what_is_not_finite_is_no_number() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        line = parse_line(as_written(step_line(3, loss=loss, learning_rate=math.nan, factor=math.inf)))
        assert line is not None
        numbers = of_step(line)  # type: ignore[arg-type]
        assert math.isnan(numbers["step/loss"])
        assert "step/learning_rate" not in numbers


def test_a_log_keeps_its_names_but_for_ours() -> None:
    fields = {
        "val/accuracy": 0.5, "best": True, "n": 2**62, "note": "<script>alert(1)</script>", "lost": None,
        "step/loss": 7, "": 1.0, "<b>": 2,
    }  # fmt: skip
    numbers, texts = of_log(LogLine(step=3, fields=fields))
    assert math.isnan(numbers.pop("lost"))
    assert numbers == {
        "val/accuracy": 0.5, "best": 1.0, "n": float(2**62), "log/step/loss": 7.0, "log/": 1.0, "<b>": 2.0,
    }  # fmt: skip
    assert texts == {"note": "<script>alert(1)</script>"}
