"""Real runs, and external workers whose libraries compute as on another CPU: refused by the operation, or let in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone, read_lines
from tests.support.lines import naming

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SEE = "see `farandole numerics --against TICKET`, or give the run --bits any"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="signals by /proc"),
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL"),
]


def job(place: Path) -> tuple[str, ...]:
    return str(place / "out"), "--pace", str(place / "pace"), "--epochs", "60"


def external_worker(run: Elastic, out: Path, **environ: str) -> subprocess.Popen[str]:
    command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(JOB), str(out), "--epochs", "60"]
    environ = {**ENVIRON, **environ}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    (
        "the host of an external worker computes other bits: another CPU maker, other instructions, other MKL or "
        "oneDNN settings, another torch"
    ),
    seen="an event `refused`, with the operation, setting or device; `farandole numerics --against TICKET` shows more",
    outcome="its exit code is 1; the run continues without it",
)
def test_an_external_worker_that_computes_other_bits_is_refused_by_the_name_of_an_operation(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.3")
    with Elastic(tmp_path / "run", JOB, *job(tmp_path), workers=1, options=[]) as run:
        run.until_step(1)
        [numerics] = run.events("numerics")
        assert numerics["worker"] == "w1"
        assert numerics["facts"]["torch version"] == torch.__version__
        assert numerics["facts"]["setting default dtype"] == "float32"
        with external_worker(run, tmp_path / "guest", MKL_CBWR="COMPATIBLE") as other:
            said, _ = other.communicate(timeout=200)
        assert other.returncode == 1
        [refused] = run.events("refused")
        assert all(value in refused["reason"] for value in ("operation matmul", "64x1024", "1024x512"))
        assert refused["reason"].endswith(SEE)
        assert refused["reason"] in said
        with external_worker(run, tmp_path / "guest") as like:
            run.until_members(2)
            pace.unlink()
            run.finish()
            assert like.wait(200) == 0
        assert len(run.events("numerics")) == 1


@pytest.mark.long
@pytest.mark.failure(
    "External workers, pools and machines",
    "the host of an external worker computes other bits, in a run with `--bits any`",
    seen="`RESULTS NOT REPRODUCIBLE AFTER STEP 7`, with the worker and the difference",
    outcome="it is admitted",
)
def test_by_option_it_is_let_in_and_it_is_told_from_when_on_no_bits_are_promised(tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.3")
    options = ["--bits", "any"]
    with Elastic(tmp_path / "run", JOB, *job(tmp_path), workers=1, options=options) as run:
        run.until_step(2)
        with external_worker(run, tmp_path / "guest", ONEDNN_MAX_CPU_ISA="SSE41") as other:
            run.until_members(2)
            [told] = run.events("bits not promised")
            entered = run.events("view")[-1]["step"]
            run.command("status")
            run.command("stop")
            run.until(lambda: run.process.poll() is not None, "the end")
            assert other.wait(200) == 0
        assert told["worker"] == "guest-1"
        assert 1 <= told["step"] < entered
        assert all(value in told["what"][0] for value in ("operation convolution", "3x3", "3x32x32"))
        assert run.events("refused") == []
        assert naming(run.output.read_text(), f"STEP {told['step']}", "guest-1")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_machines_that_differ_train_on_to_the_accuracy_of_the_reference(tmp_path: Path) -> None:
    """The digits, on this machine alone, and with three others that compute other bits from early on."""
    epochs = ("--epochs", "40")
    alone(tmp_path / "alone", DIGITS, *epochs)
    others = ({"ONEDNN_MAX_CPU_ISA": "SSE41"}, {"ATEN_CPU_CAPABILITY": "default"}, {"MKL_CBWR": "COMPATIBLE"})
    options = ["--bits", "any"]
    with Elastic(tmp_path / "run", DIGITS, *epochs, workers=1, options=options, deadline_s=300.0) as run:
        run.until_step(0)
        join = [*FARANDOLE, "join", str(run.folder / "ticket"), str(DIGITS), *epochs]
        external_workers = [
            subprocess.Popen(join, env={**ENVIRON, **other}, stdout=subprocess.DEVNULL) for other in others
        ]
        run.until_members(4)
        run.finish()
        assert [external_worker.wait(200) for external_worker in external_workers] == [0, 0, 0]
        assert len(run.events("bits not promised")) == 3
        assert run.events("drifting")
    expected, reached = (accuracy(tmp_path / name) for name in ("alone", "run"))
    assert reached == pytest.approx(expected, abs=0.01), "of 360 pictures, three may go another way"


def accuracy(folder: Path) -> float:
    """The last that was logged."""
    return [line["accuracy"] for line in read_lines(folder) if "accuracy" in line][-1]


ALTERS = """
import sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import farandole

run = farandole.join()
model = torch.nn.Linear(4, 2)
run.replicate(model=model)
rows = TensorDataset(torch.ones(240, 4))
for step in run.steps(run.loader(rows, batch=farandole.GlobalBatch(8, micro=4)), epochs=1):
    if step.number == 3:
        torch.set_flush_denormal(True)
    for (inputs,) in step:
        step.backward(model(inputs * 1e-38).sum())
        time.sleep(2 if step.number > 4 and Path(sys.argv[1]).exists() else 0)  # 100 s for the guest to come
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
"""


@pytest.mark.long
@pytest.mark.failure(
    "Scripts that differ between workers",
    "the script changes a setting of torch on all workers alike",
    seen="one event, with the step and both values",
    outcome="training continues; joiners and resumed runs get the setting too",
)
def test_a_setting_that_the_script_alters_once_is_told_once_and_is_an_external_workers_too(tmp_path: Path) -> None:
    pace, script = tmp_path / "pace", tmp_path / "alters.py"
    pace.touch()
    script.write_text(ALTERS)
    with Elastic(tmp_path / "run", script, str(pace), workers=1, deadline_s=200.0, options=[]) as run:
        run.until_step(4)
        command = [*FARANDOLE, "join", str(run.folder / "ticket"), str(script), str(pace)]
        with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as late:
            run.until_members(2)
            pace.unlink()
            run.finish()
            assert late.wait(200) == 0
        told = [(event["step"], event["setting"], event["now"]) for event in run.events("setting changed")]
        assert told == [(3, "setting denormals flushed", "on")]
        assert [event["equal"] for event in run.events("finished")] == [True]
