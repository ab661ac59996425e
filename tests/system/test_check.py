"""`farandole check` on scripts with one fault each: which comparison differs, where first, and the cause."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from farandole.check.records import JOIN, STEPS
from tests.support.examples import EXAMPLES
from tests.support.fake_worker import until
from tests.support.forked import ENVIRON, run
from tests.support.harness import FARANDOLE
from tests.support.mentioned import mentions

JOB = Path(__file__).parents[1] / "jobs" / "checked.py"
COMMAND = [*FARANDOLE, "check"]
BITS = ("workers", "join", "loss", "resume")
pytestmark = pytest.mark.processes


def checked(folder: Path, fault: str, *options: str, code: int = 1) -> dict[str, dict[str, Any]]:
    """The findings, by comparison."""
    out = folder / "out.json"
    done = run([*COMMAND, *options, "--json", str(out), str(JOB), fault], env=ENVIRON, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return {finding["comparison"]: finding for finding in json.loads(out.read_text())}


def outcomes(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: finding["outcome"] for name, finding in found.items()}


def test_a_script_without_a_fault(tmp_path: Path) -> None:
    found = checked(tmp_path, "none", code=0)
    assert outcomes(found) == dict.fromkeys((*BITS, "values", "micro"), "agrees")
    assert not any(each["cause"] for each in found.values())


@pytest.mark.long
def test_a_sum_over_the_inner_loop_is_named(tmp_path: Path) -> None:
    found = checked(tmp_path, "parts", "--no-micro", code=0)
    assert outcomes(found) == dict.fromkeys((*BITS, "values"), "agrees")
    assert found["values"]["cause"] == "own part"
    assert [each["name"] for each in found["values"]["suspects"]] == ["total"]


@pytest.mark.parametrize(
    ("fault", "where", "name", "cause", "suspect"),
    [
        ("generator", "workers", "the micro-batch", "generator", "NOISE"),
        pytest.param("noise", "workers", "the loss", "generator", "own", marks=pytest.mark.long),
        pytest.param("first", "workers", "model.body.0.weight", "first state", None, marks=pytest.mark.long),
        pytest.param("counter", "join", "the loss", "script state", "calls", marks=pytest.mark.long),
        pytest.param("rate", "join", "optimizer.param_groups[0].lr", "script state", "calls", marks=pytest.mark.long),
        pytest.param("attribute", "join", "the loss", "script state", "model.scale", marks=pytest.mark.long),
        pytest.param("average", "join", "the loss", "not replicated", "average", marks=pytest.mark.long),
    ],
)
def test_other_bits(tmp_path: Path, fault: str, where: str, name: str, cause: str, suspect: str | None) -> None:
    found = checked(tmp_path, fault, "--no-micro")
    assert set(found) == {*BITS, "values"}
    before, after = BITS[: BITS.index(where)], BITS[BITS.index(where) + 1 : -1]  # a resume is compared in any case
    assert {found[each]["outcome"] for each in before} <= {"agrees"}
    assert {found[each]["outcome"] for each in after} <= {"not compared"}
    first = found[where]["first"]
    assert (first["name"], found[where]["cause"]) == (name, cause)
    assert first["step"] == (0 if where == "workers" else JOIN + (fault == "rate"))
    assert suspect is None or suspect in [each["name"] for each in found[where]["suspects"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("sum", "sum", marks=pytest.mark.long),
        ("tokens", "weights"),
        ("norm", "batch norm"),
        pytest.param("pairs", "batch", marks=pytest.mark.long),
    ],
)
def test_another_gradient_with_smaller_micro_batches(tmp_path: Path, fault: str, cause: str) -> None:
    found = checked(tmp_path, fault)
    assert outcomes(found) == {**dict.fromkeys((*BITS, "values"), "agrees"), "micro": "differs"}
    assert found["micro"]["cause"] == cause


@pytest.mark.long
def test_a_script_that_fails_shows_its_own_traceback_once() -> None:
    done = run([*COMMAND, str(JOB), "raises"], env=ENVIRON, timeout=100)
    assert done.returncode == 1
    assert done.stderr.count("ZeroDivisionError: mine") == 1
    assert str(JOB) in done.stderr
    assert "farandole/check" not in done.stderr


@pytest.mark.long
def test_a_script_that_refuses_its_arguments_shows_its_usage_and_no_traceback() -> None:
    done = run([*COMMAND, str(EXAMPLES / "digits.py"), "--nonsense"], env=ENVIRON, timeout=100)
    assert done.returncode == 1
    assert mentions(done.stderr, "digits.py", "--nonsense")
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_loop_that_is_too_short_is_an_error() -> None:
    done = run([*COMMAND, str(JOB), "short"], env=ENVIRON, timeout=100)
    assert done.returncode == 2
    assert mentions(done.stderr, 2, STEPS)
    done = run([*COMMAND, "--workers", "0", str(JOB), "none"], env=ENVIRON, timeout=100)
    assert done.returncode == 2
    assert mentions(done.stderr, "--workers", 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("leg", "signum"),
    [
        ("workers", signal.SIGINT),
        ("alone", signal.SIGTERM),
        pytest.param("workers", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("alone", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_all_and_keeps_nothing(tmp_path: Path, leg: str, signum: int) -> None:
    environ = {**ENVIRON, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*COMMAND, str(JOB), "none"], env=environ, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip

    def began() -> bool:
        return any(tmp_path.glob(f"farandole-check-*/{leg}-*.jsonl"))

    until(began, 200)
    process.send_signal(signum)
    assert process.wait(60) == 128 + signum
    assert not list(tmp_path.glob("farandole-check-*"))
