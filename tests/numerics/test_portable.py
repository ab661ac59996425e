"""`--bits portable`: what is taken over computes what torch does; what can't be portable is refused, by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farandole.errors import UsageError
from farandole.numerics import portable
from farandole.platform import cpu

ROOT = Path(__file__).parents[2]


def test_what_is_taken_over_computes_what_torch_does() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.numerics.taken_over"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr


def test_a_process_that_has_torch_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    with pytest.raises(UsageError, match=r"\btorch\b.*MKL_CBWR=COMPATIBLE"):
        cpu.set_for("portable")
    with pytest.raises(UsageError, match=r"\btorch\b.*MKL_CBWR\b.*farandole join"):
        portable.take_over(1, torch.device("cpu"))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="this CPU has AVX2 and no more: torch computes so in any case",
)
def test_switches_that_come_too_late_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cpu.PORTABLE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"--bits portable\b.*AVX"):
        portable.take_over(1, torch.device("cpu"))


def test_an_accelerator_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"cuda:1.*CUDA_VISIBLE_DEVICES="):
        portable.take_over(1, torch.device("cuda", 1))


def test_only_portable_runs_have_switches() -> None:
    assert cpu.environment_of("portable") == cpu.PORTABLE
    assert not cpu.PORTABLE.keys() & cpu.environment_of("same").keys()
    assert not cpu.environment_of("any")
