"""Programs of other people with our changes: the loss curve is that of the original, and the bits when they are struck.

PORTED_SOURCES names a folder with their repositories (`owner+name`); without it they are fetched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from chaos.script import alone, history, struck
from tests.support.examples import EXAMPLES
from tests.support.harness import ENVIRON

PORTED = EXAMPLES / "ported"
specification = importlib.util.spec_from_file_location("port", PORTED / "port.py")
assert specification is not None
assert specification.loader is not None
port = importlib.util.module_from_spec(specification)
specification.loader.exec_module(port)
MOST_LINES, LIMIT_S = 25, 200.0


@pytest.mark.parametrize("name", port.PROGRAMS)
def test_a_port_adds_few_lines(name: str) -> None:
    changes = (PORTED / f"{name}.ed").read_text()
    assert 0 < len(port.added(changes)) <= MOST_LINES
    program = port.PROGRAMS[name]
    assert re.fullmatch(r"[0-9a-f]{40}", program["commit"])
    assert all(program[key] for key in ("about", "source", "licence", "script"))


def test_the_commands_of_an_ed_script() -> None:
    original = "a\nb\nc\nd\ne"
    assert port.apply("5a\nend\n.\n2,3d\n1c\nA\n# B\n\n.\n0a\nfirst\n.\n", original) == "first\nA\n# B\n\nd\ne\nend\n"
    assert port.added("1c\nA\n# B\n\n.\n2d\n") == ["A"]
    with pytest.raises(ValueError, match="s/a/b/"):
        port.apply("1s/a/b/\n", original)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes a program to the working folder, and returns the ported one."""
    monkeypatch.chdir(tmp_path)

    def fetch(name: str) -> Path:
        program = port.PROGRAMS[name]
        missing = [module for module in program["needs"] if importlib.util.find_spec(module) is None]
        if missing:
            pytest.skip(f"{name} needs {', '.join(missing)}: pip install '.[examples]'")
        local = Path(os.environ.get("PORTED_SOURCES", ""), "+".join(program["source"].split("/")[-2:]))
        place = next((str(p) for p in (local / "repo", local) if p.is_dir()), None) if local.name else None
        try:
            return port.port(name, tmp_path, place)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{program['source']} is not to be had: {error}")

    return fetch


def waves(rows: int, length: int) -> None:
    """Write the data of time_sequence, less of it than its own program makes."""
    shifts = np.random.default_rng(2).integers(-80, 80, (rows, 1))
    torch.save(np.sin((np.arange(length) + shifts) / 20.0), "traindata.pt")


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(?:test )?loss: (\S+)", printed, re.MULTILINE)]


@pytest.mark.examples
@pytest.mark.processes
def test_lbfgs_has_the_loss_curve_of_the_original(fetched: Callable[[str], Path]) -> None:
    ported = fetched("time_sequence")
    waves(43, 60)
    environ = {**ENVIRON, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}  # the original is of a time before torch 2.6
    curves: list[list[float]] = []
    for script in ("original.py", ported.name):
        done = subprocess.run(
            [sys.executable, script, "--steps", "2"], env=environ, capture_output=True, text=True, timeout=LIMIT_S,
            check=True,
        )  # fmt: skip
        curves.append(losses(done.stdout))
    assert len(curves[0]) == len(curves[1]) > 30
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.examples
@pytest.mark.processes
def test_lbfgs_struck(fetched: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ported, arguments = fetched("time_sequence"), ["--steps", "12"]
    waves(93, 12)
    reference, _ = alone(ported, arguments, tmp_path / "alone", limit_s=LIMIT_S)
    plan = history(3, workers=2, blows=3, every_s=0.7)
    told, blows = struck(ported, arguments, plan, tmp_path / "struck", reference, pace_s=1.0, limit_s=LIMIT_S)
    assert not told.complaints, capsys.readouterr().out
    assert told.faults.total() >= 2, f"too little has happened to it:\n{blows}"
    assert told.views >= 3, blows
