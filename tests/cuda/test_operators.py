"""An operator without a deterministic form ends a run with a sentence that names it; with `--bits any` it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import on_device
from tests.support.gpu import NEEDS_GPU
from tests.support.harness import Elastic

pytestmark = [NEEDS_GPU, pytest.mark.processes]

JOB = Path(on_device.__file__)


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "an operator has no deterministic form on CUDA (`histc`, the backward pass of `adaptive_avg_pool2d`), under "
        "`--bits same`"
    ),
)
@pytest.mark.parametrize("operator", on_device.OPERATORS)
def test_it_is_named_with_its_place_and_the_remedy(operator: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "out"), "--operator", operator]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=[]) as run:
        run.until(lambda: run.process.poll() is not None, "the end")
        output = run.output.read_text()
    assert run.process.returncode == 1, output
    assert "Traceback" not in output
    [told] = [line for line in output.splitlines() if line.startswith("farandole: error on w1")]
    assert operator in told
    assert "(on_device.py, line " in told
    assert "--bits any" in told
    assert "use_deterministic_algorithms" in (tmp_path / "run" / "logs" / "w1.log").read_text(), "the whole of it"


def test_any_bits_let_it_be_used(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "out"), "--operator", "adaptive_avg_pool2d"]
    options = ["--bits", "any"]
    with Elastic(tmp_path / "run", JOB, *arguments, workers=2, options=options) as run:
        run.finish()
