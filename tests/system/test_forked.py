"""A script that forks and lets the children run on disturbs nobody: they are told, and leave by themselves."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import farandole
from farandole.errors import NotReplicated, UsageError
from tests.jobs.forking import Rows
from tests.support.harness import Elastic, alone

JOB = Path(__file__).parents[1] / "jobs" / "forking.py"


@pytest.mark.long
@pytest.mark.failure(
    "The training loop",
    "the script forks, and the child continues into the training code",
    seen="an error in the worker's log when the child first uses the run or a step",
    outcome="the child ends with exit code 1 or its own; the worker, its peers and loader processes are not affected",
)
@pytest.mark.processes
def test_children_that_run_on_end_nobody_and_loader_processes_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    alone(tmp_path / "alone", JOB, str(out))
    [end] = out.iterdir()
    expected, _ = json.loads(end.read_text())
    end.unlink()
    with Elastic(tmp_path / "run", JOB, str(out), "--fork", workers=2, options=["--min", "2"]) as run:
        run.finish()
        assert [(event["equal"], event["fingerprint"]) for event in run.events("finished")] == [(True, expected)]
        assert run.events("lost") == run.events("failed") == []
        assert len(run.events("view")) == 1
        logs = [(tmp_path / "run" / "logs" / f"w{n}.log").read_text() for n in (1, 2)]
    assert [json.loads(path.read_text()) for path in out.iterdir()] == 2 * [[expected, [1, 1, 7, -15]]]
    for log in logs:
        assert len(re.findall(r"UsageError: .*\(\d+\)", log)) == 2
        assert re.search(r"\bbackward: .*\(\d+\)", log)
        assert "the last child leaves" in log


@pytest.mark.failure("The training loop", "the script forks, and the child continues into the training code")
def test_in_a_child_all_of_a_run_is_refused_but_its_device(run: farandole.Run) -> None:
    asked = {
        "rank": lambda: run.rank,
        "is_leader": lambda: run.is_leader,
        "log": lambda: run.log(loss=1.0),
        "replicate": lambda: run.replicate(),
        "steps": lambda: run.steps(None, epochs=1),  # type: ignore[arg-type]
    }
    assert refused_in_a_child(asked)
    assert in_a_child(lambda: run.device.type in ("cpu", "cuda"))
    with pytest.raises(NotReplicated):  # the parent is asked for something else
        run.fingerprint()


@pytest.mark.failure("The training loop", "the script forks, and the child continues into the training code")
def test_in_a_child_a_step_its_loop_and_what_these_are_made_of_are_refused(run: farandole.Run) -> None:
    model = torch.nn.Linear(8, 1)
    run.replicate(model=model)
    steps = run.steps(run.loader(Rows(run.device), batch=farandole.GlobalBatch(16, micro=4)), epochs=1)
    step = next(steps)
    rows = iter(step)
    loss = model(next(rows)).mean()
    loop, gradients, rounds = run._loop, step._gradients, run._rounds
    assert loop is not None
    state = loop.state
    asked = {
        "backward": lambda: step.backward(loss),
        "number": lambda: step.number,
        "iteration": lambda: iter(step),
        "ended": lambda: next(steps),
        "lines": lambda: loop.lines,
        "layout": lambda: gradients.layout,
        "snapshot": lambda: state.snapshot(),
        "sync": lambda: rounds.sync(),
    }
    assert refused_in_a_child(asked)
    step.backward(loss)
    for each in rows:
        step.backward(model(each).mean())


def refused_in_a_child(asked: dict[str, Callable[[], object]]) -> bool:
    return in_a_child(lambda: all(is_refused(*each) for each in asked.items()))


def in_a_child(holds: Callable[[], bool]) -> bool:
    child = os.fork()
    if not child:
        try:
            os._exit(not holds())
        finally:
            os._exit(2)  # it raised
    return os.waitpid(child, 0)[1] == 0


def is_refused(name: str, ask: Callable[[], object]) -> bool:
    try:
        ask()
    except UsageError as error:
        return f"({os.getpid()})" in str(error) and str(error).startswith(f"{name}: ")
    return False
