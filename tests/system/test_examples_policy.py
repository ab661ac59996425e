"""Every example trains and reports; it takes a batch policy, and under each its schedule ends in the same place.

They train within this process, on small data, as worlds of one that stand for a history of workers.
"""

from __future__ import annotations

import gzip
import importlib.util
import random
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import farandole
from farandole import joining
from farandole.plan.batch import GlobalBatch, PerWorkerBatch
from tests.support.examples import EXAMPLES, TABLE

HISTORY = "0 3\n1 1\n2 2\n"
SHORT = {
    "cifar10": ["--epochs", "1", "--loaders", "0"],
    "finetune": ["--epochs", "2"],
    "shakespeare": ["--epochs", "1"],
    "segment": ["--epochs", "1"],
    "detect": ["--epochs", "1"],
    "imagenet": ["--epochs", "1", "--data", "synthetic", "--samples", "12", "--batch", "2"],
}


def clothes(folder: Path, draw: random.Random) -> list[str]:
    for part, count in (("train", 100), ("t10k", 10)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            content = bytes(header) + bytes(draw.randrange(10) for _ in range(count * size))
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return [str(folder), "--epochs", "1", "--batch", "16", "--micro", "8", "--loaders", "0"]


def nothing(folder: Path, draw: random.Random) -> list[str]:
    del folder, draw
    return ["--epochs", "1", "--width", "4"]


DATA = {**{name: example.data for name, example in TABLE.items()}, "fashion_mnist": clothes, "digits": nothing}
NEEDS = {**{name: example.needs for name, example in TABLE.items()}, "fashion_mnist": (), "digits": ("sklearn",)}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., farandole.Run]]:
    """An example to its end under `HISTORY`; gives the run that it has joined."""
    for name in ("TICKET", "WORKER", "POOL", "FOLDER", "LEDGER", "SEED"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    (tmp_path / "history").write_text(HISTORY)
    (tmp_path / "data").mkdir()
    made: dict[str, list[str]] = {}
    monkeypatch.setenv("FARANDOLE_HISTORY", str(tmp_path / "history"))
    monkeypatch.setenv("FARANDOLE_THREADS", "1")
    monkeypatch.syspath_prepend(EXAMPLES)
    threads = torch.get_num_threads()

    def trained(name: str, *options: str) -> farandole.Run:
        missing = [module for module in NEEDS[name] if importlib.util.find_spec(module) is None]
        if missing:
            pytest.skip(f"examples/{name}.py needs {', '.join(missing)}: pip install '.[examples]'")
        if name not in made:
            made[name] = DATA[name](tmp_path / "data", random.Random(name))
        monkeypatch.setattr(joining, "_current", None)
        monkeypatch.setattr(sys, "argv", [name, *made[name], *SHORT.get(name, ()), *options])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        run = joining.current()
        assert run is not None
        return run

    yield trained
    torch.set_num_threads(threads)


def batch(run: farandole.Run) -> GlobalBatch | PerWorkerBatch:
    assert run._loop is not None
    return run._loop.progress._loader.batch


def schedule(run: farandole.Run) -> torch.optim.lr_scheduler.LRScheduler:
    assert run._replica is not None
    found = run._replica.objects["schedule"]
    assert isinstance(found, torch.optim.lr_scheduler.LRScheduler)
    return found


def test_all_of_them_are_tried() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py") if "farandole.join()" in file.read_text()} == set(DATA)


def reported(name: str, printed: str) -> list[float]:
    """The figures that it is to report, as far as the table of examples knows any."""
    return [float(figure) for figure in re.findall(TABLE[name].says, printed)] if name in TABLE else []


LONG = {"detect", "finetune", "imagenet"}  # nets of seconds a step


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in sorted(DATA)]
)
def test_it_trains_and_reports_and_its_schedule_ends_where_it_should(
    name: str, train: Callable[..., farandole.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    constant, following = train(name), train(name, "--policy", "per-worker")
    figures = reported(name, capsys.readouterr().out)
    assert len(figures) >= 2 * (name in TABLE)
    assert all(TABLE[name].least <= figure <= TABLE[name].most for figure in figures), figures

    assert isinstance(batch(constant), GlobalBatch), "by default the batch stays the same"
    assert isinstance(batch(following), PerWorkerBatch)
    assert batch(following).base == batch(constant).base
    assert following._loop is not None
    total = following._loop.progress._length.epochs * len(following._loop.progress._loader)
    assert following._loop.number + 1 < total  # or else one that goes by steps would end there too
    assert schedule(following).last_epoch == total
    assert schedule(constant).get_last_lr() == pytest.approx(schedule(following).get_last_lr(), rel=1e-9, abs=1e-12)
