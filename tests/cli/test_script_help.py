"""`farandole run train.py --help` shows the script's help, once, and starts no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import FARANDOLE
from tests.support.mentioned import mentions

PARSES = """
import argparse
parser = argparse.ArgumentParser(description="Trains a net of the script's own.")
parser.add_argument("--width", type=int)
print("parses", parser.parse_args())
"""
JOINS = "import farandole\nrun = farandole.join()\n"
TRAINS = """
import torch
model = torch.nn.Linear(1, 1)
run.replicate(model=model)
data = torch.utils.data.TensorDataset(torch.ones(8, 1))
for step in run.steps(run.loader(data, batch=farandole.GlobalBatch(8, micro=8)), epochs=1):
    print("trains")
"""


def done(folder: Path, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The end of `farandole WORDS`, where `train.py` has that source."""
    (folder / "train.py").write_text(source)
    ended = subprocess.run(
        [*FARANDOLE, *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200,
        check=False,
    )  # fmt: skip
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["train.py"], "no run"
    return ended


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "`farandole run train.py --help` is called",
    seen="the script's own help, once",
    outcome="no run is started, exit code 0; a script without `--help` is not trained, exit code 2",
)
@pytest.mark.parametrize("source", [PARSES + JOINS + TRAINS, JOINS + PARSES + TRAINS])
@pytest.mark.parametrize("words", [("--width", "3", "--help"), pytest.param(("-h",), marks=pytest.mark.long)])
def test_the_help_is_the_scripts_own(source: str, words: tuple[str, ...], tmp_path: Path) -> None:
    ended = done(tmp_path, source, "run", "--workers", "4", "train.py", *words)
    assert (ended.returncode, ended.stderr) == (0, "")
    alone = subprocess.run(
        [sys.executable, "train.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert alone.returncode == 0, alone.stderr
    assert ended.stdout == alone.stdout
    assert ended.stdout.count("a net of the script's own") == 1


@pytest.mark.parametrize(
    "verb", [*(pytest.param((each,), marks=pytest.mark.long) for each in ("check", "probe")), ("run", "-m")]
)
def test_other_ways_to_start_a_script_show_it_too(verb: tuple[str, ...], tmp_path: Path) -> None:
    ended = done(tmp_path, PARSES + JOINS, *verb, "train" if "-m" in verb else "train.py", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("a net of the script's own") == 1


@pytest.mark.failure("Processes, signals and crash loops", "`farandole run train.py --help` is called")
def test_a_script_without_help_does_not_train(tmp_path: Path) -> None:
    ended = done(tmp_path, JOINS + TRAINS, "run", "train.py", "--help")
    assert ended.returncode == 2
    assert mentions(ended.stderr, "train.py", "--help", "farandole run --help")
    assert "trains" not in ended.stdout


def test_an_error_of_the_script_before_its_help_is_shown(tmp_path: Path) -> None:
    ended = done(tmp_path, "raise ValueError('no such file')\n" + PARSES, "run", "train.py", "--help")
    assert ended.returncode == 1
    assert mentions(ended.stderr, "ValueError", "no such file")
    assert ended.stderr.count("Traceback") == 1
    assert "site-packages" not in ended.stderr
