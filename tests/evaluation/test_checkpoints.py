"""The loop that evaluates checkpoints: what a script's evaluations return is what they have returned in the run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole.checkpoint.store import DamagedError
from farandole.control.run_folder import CHECKPOINTS
from farandole.errors import UsageError
from farandole.evaluation.checkpoints import METRIC, Rows, entries_of, loads
from farandole.run import Run
from farandole.settings import Settings
from farandole.training import loop
from farandole.training.loop import Loop
from tests.support.mentioned import mentions
from tests.support.steps import BATCH, data, mlp, per_sample

EPOCHS, STEPS = 3, 6


@pytest.fixture(autouse=True)
def own_loop() -> Iterator[None]:
    yield
    loop.use(Loop)


class Script:
    """A script with a moving average of its own, a plain value, a value in `run.once`, and evaluations."""

    def __init__(self, *, in_loop: bool = True, width: int = 3) -> None:
        self.in_loop, self.width = in_loop, width
        self.results: list[dict[str, float]] = []
        self.once = 0
        self.after: dict[str, float] | None = None

    def evaluate(self, run: farandole.Run) -> dict[str, float]:
        accuracy = -run.evaluate(self.average, data(40), F.cross_entropy)
        losses = run.evaluate(self.model, data(40), {"loss": F.cross_entropy, "hits": per_sample})
        return {"accuracy": accuracy, **losses}

    def main(self, run: farandole.Run) -> None:
        self.model = nn.Sequential(mlp(), nn.Dropout(0.5), nn.Linear(3, self.width))
        self.average = copy.deepcopy(self.model).requires_grad_(requires_grad=False)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        run.replicate(model=self.model, average=self.average, optimizer=optimizer, schedule=schedule, best=-99.0)
        loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
        for step in run.steps(loader, epochs=EPOCHS):
            for x, y in step:
                step.backward(F.cross_entropy(self.model(x), y))
                step.mean(size=float(len(x)))
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(parameter, 0.5)
            run.log(loss_of_step=step.loss, size=step.means["size"])
            if self.in_loop and step.ends_epoch:
                result = self.evaluate(run)
                run.state.best = max(run.state.best, result["accuracy"])
                run.log(accuracy=result["accuracy"], best=run.state.best)
                self.results.append({"step": step.number, "epoch": step.epoch, **result})
            with run.once() as mine:
                self.once += bool(mine)
        self.after = self.evaluate(run)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Script, str]:
    """A script that has trained, and the place of its checkpoints, one before each step."""
    script = Script()
    run = Run(Settings(folder=str(tmp_path), checkpoint_every="1steps", seed=5))
    script.main(run)
    run._end_alone()
    return script, str(tmp_path / CHECKPOINTS)


def evaluated(script: Script, place: str, *, once: bool = False) -> Rows:
    store, entries = entries_of(place)
    rows = Rows(lambda _: None)
    loop.use(loads(store, entries, rows, once=once))
    run = Run(Settings(seed=5))
    with contextlib.suppress(SystemExit):
        script.main(run)
    rows.end()
    return rows


def values(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("step", "epoch", "accuracy", "loss", "hits") if name in row}


def test_each_checkpoint_has_the_results_of_the_run(trained: tuple[Script, str]) -> None:
    before, place = trained
    script = Script()
    rows = evaluated(script, place)
    found = {row["step"]: row for row in rows.complete}
    assert len(found) == len(rows.complete) >= 2
    assert max(found) == STEPS - 1
    results = {result["step"]: result for result in before.results}
    assert results.keys() & found.keys()
    for step in results.keys() & found.keys():
        assert values(found[step]) == results[step]
        assert "loss_of_step" not in found[step]
        assert "size" not in found[step]
        assert found[step]["seconds"] >= 0
    assert found[STEPS - 1]["best"] == max(result["accuracy"] for result in before.results)
    assert script.once == 0
    assert script.after is None


def test_one_checkpoint_and_the_work_of_once(trained: tuple[Script, str]) -> None:
    before, place = trained
    newest = entries_of(place)[1][-1]
    script = Script()
    (row,) = evaluated(script, f"{place}/{newest.stem}.pt", once=True).complete
    assert values(row) == before.results[-1]
    assert script.once == 1


@pytest.mark.failure(
    "Other code than the run's",
    (
        "`farandole evaluate` gets a folder without a complete checkpoint, a checkpoint of another script, or a "
        "script without an evaluation in its loop"
    ),
)
def test_a_script_that_evaluates_after_its_loop(trained: tuple[Script, str]) -> None:
    before, place = trained
    newest = entries_of(place)[1][-1]
    script = Script(in_loop=False)
    (row,) = evaluated(script, f"{place}/{newest.stem}.pt").complete
    assert script.after == before.after
    assert script.after is not None
    assert row[METRIC] == -script.after["accuracy"]
    assert values(row) == {"step": STEPS - 1, "epoch": EPOCHS - 1, "loss": row["loss"], "hits": row["hits"]}
    with pytest.raises(UsageError):
        evaluated(Script(in_loop=False), place)


@pytest.mark.failure(
    "Other code than the run's",
    (
        "`farandole evaluate` gets a folder without a complete checkpoint, a checkpoint of another script, or a "
        "script without an evaluation in its loop"
    ),
    seen="an error names the folder or the difference",
    outcome="exit code 2; nothing is changed",
)
def test_checkpoints_that_can_not_be_evaluated(trained: tuple[Script, str], tmp_path: Path) -> None:
    _, place = trained
    with pytest.raises(UsageError):
        evaluated(Script(width=4), place)
    newest = Path(place, f"{entries_of(place)[1][-1].stem}.pt")
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(DamagedError) as damaged:
        evaluated(Script(), str(newest))
    assert mentions(str(damaged.value), newest.name)
    empty = tmp_path / "empty"
    empty.mkdir()
    for other in (str(empty), f"{empty}/step-00000001-00000000-00000000.pt"):
        with pytest.raises(UsageError) as refused:
            entries_of(other)
        assert mentions(str(refused.value), other)


def test_names_of_results() -> None:
    taken: list[dict[str, Any]] = []
    rows = Rows(taken.append)
    rows.begin(3, 1)
    rows.evaluated(0.5, 1.0)
    rows.evaluated(torch.tensor(0.25), 2.0)
    rows.evaluated({"f1": torch.tensor([0.75]), "curve": torch.zeros(3)}, 0.5)
    rows.evaluated(0.125, 0.0)
    rows.evaluated(torch.zeros(3), 0.0)
    rows.log({"accuracy": 0.25, "loss": float("nan"), "note": "x"})
    rows.end()
    rows.end()
    named = {"f1": 0.75, "accuracy": 0.25, "note": "x", METRIC: 0.5, f"{METRIC}2": 0.125}
    assert taken == rows.complete == [{"step": 3, "epoch": 1, **named, "seconds": 3.5}]
