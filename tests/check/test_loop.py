"""The loops of the check in the tests' own process: what is recorded of a script, and which cause the records show."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from farandole import joining
from farandole.check import loop as check_loop
from farandole.check import records
from farandole.check.findings import findings_of_bits
from farandole.check.micro import compare
from farandole.check.records import RUN, STEPS, CheckTerms, Leg, MicroBatchRecord, Record
from farandole.check.script_state import ScriptState, assigned_first
from farandole.control.run_folder import CHECKPOINTS
from farandole.errors import UsageError
from farandole.training import loop
from tests.jobs import checked

Legs = Callable[..., list[Record]]
BATCH_SHARDS = checked.BATCH // checked.MICRO


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Legs:
    """Runs a leg of the script with this fault. Returns its records."""
    for name in ("TICKET", "WORKER", "POOL", "THREADS", "FOLDER", "HISTORY", "SEED"):
        monkeypatch.delenv(f"FARANDOLE_{name}", raising=False)
    monkeypatch.setattr(sys, "argv", [checked.__file__])
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        monkeypatch.setattr(F, name, getattr(F, name))
    (tmp_path / RUN / CHECKPOINTS).mkdir(parents=True)

    def leg(leg: Leg, fault: str) -> list[Record]:
        threads = torch.get_num_threads()
        monkeypatch.setattr(joining, "_current", None)
        monkeypatch.setattr(loop, "_new_loop", loop.Loop)
        terms = CheckTerms(leg=leg, workers=2, folder=str(tmp_path))
        check_loop.begin(records.environment(terms)[records.VARIABLE])
        try:
            with pytest.raises(SystemExit) as left:
                importlib.reload(checked).main(fault)  # as in a new process, its generators are new
        finally:
            torch.set_num_threads(threads)
        assert left.value.code == 0
        return records.read(tmp_path, leg)

    return leg


def test_three_steps_are_recorded_and_a_resume_has_the_same(run: Legs) -> None:
    alone, resume = run("alone", "none"), run("resume", "none")
    assert [each.step for each in records.states(alone)] == [*range(STEPS + 1)]
    assert [(each.step, each.shard) for each in records.shards(alone)] == [
        (step, shard) for step in range(STEPS) for shard in range(BATCH_SHARDS)
    ]
    assert [each.step for each in records.states(resume)] == [*range(1, STEPS + 1)]
    first, last = [each.digests for each in records.states(alone) if each.step in (0, STEPS)]
    assert all(first[name] != last[name] for name in first if name.endswith((".weight", ".bias")))
    assert findings_of_bits(alone, (), resume)[-1].outcome == "agrees"


@pytest.mark.parametrize(
    ("fault", "cause", "suspect"),
    [
        ("noise", "generator", "own"),
        ("generator", "generator", "NOISE"),
        ("counter", "script state", "calls"),
        ("rate", "script state", "calls"),
        ("attribute", "script state", "model.scale"),
        ("average", "not replicated", "average"),
    ],
)
def test_what_a_resume_shows(run: Legs, fault: str, cause: str, suspect: str) -> None:
    found = findings_of_bits(run("alone", fault), (), run("resume", fault))[-1]
    assert (found.outcome, found.cause) == ("differs", cause)
    assert suspect in [each.name for each in found.suspects]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("none", ""), ("sum", "sum"), ("tokens", "weights"), ("weighed", ""), ("norm", "batch norm"),
        ("pairs", "batch"), ("noise", ""),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the loss is a sum")
def test_what_a_smaller_micro_batch_shows(run: Legs, tmp_path: Path, fault: str, cause: str) -> None:
    whole, parts = run("whole", fault), run("parts", fault)
    found = compare(tmp_path, whole, parts)
    assert (found.outcome, found.cause) == ("differs" if cause else "agrees", cause)
    assert ("model.body.1" in found.names) == (fault == "norm")
    samples = [[each.samples for each in leg if isinstance(each, MicroBatchRecord)] for leg in (whole, parts)]
    assert samples == [[checked.MICRO], [checked.MICRO // 2] * 2]


def test_a_loop_that_is_too_short(run: Legs) -> None:
    with pytest.raises(UsageError, match=str(STEPS)):
        run("alone", "short")


def names_of(source: str, *, at: int = 0) -> frozenset[str]:
    """The variables that the loop number `at` of the source assigns first."""
    code: Any = compile(source, "source", "exec")
    loops = [each.offset for each in dis.get_instructions(code) if each.opname == "FOR_ITER"]
    return assigned_first(code, loops[at])


def test_what_a_loop_assigns_before_it_reads_it() -> None:
    source = "for a in b:\n    c = a\n    d += c\n    for e in a:\n        f = e\n        g = g + f\nh = 1\n"
    assert names_of(source) == {"a", "c", "e", "f"}
    assert names_of(source, at=1) == {"e", "f"}


def test_the_frames_of_python_itself_are_not_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of them has the script's variables as an argument; its file is `<frozen ...>`, of no folder."""
    script = tmp_path / "script.py"
    script.write_text(
        "from farandole.check.script_state import ScriptState\n"
        "state = ScriptState({}, None)\n"
        "for own in range(3):\n    leaves = state.leaves()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.syspath_prepend(tmp_path)
    names = set(importlib.import_module("script").leaves)
    assert "own" in names
    assert not any(name.startswith("args") for name in names)


class Counted:
    """Holds state of each kind, in places of each kind."""

    def __init__(self) -> None:
        self.nested = {"list": [torch.zeros(2), [np.random.default_rng(1)]]}
        self.sparse = torch.zeros(2, 2).to_sparse()
        self.broken = Broken()


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_where_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])
    counted, calls = Counted(), 0
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    def count() -> None:
        nonlocal calls
        calls += 1

    state = ScriptState({"model": model}, torch.utils.data.TensorDataset(torch.zeros(3)))
    before = state.leaves()
    count()
    counted.nested["list"][0].add_(1)
    counted.nested["list"][1][0].random()
    model[0].seen = 3
    with torch.no_grad():
        model[0].weight.add_(1)  # it is replicated
    after = state.leaves()
    changed = {
        name: kind
        for name, (kind, digest) in after.items()
        if before.get(name) != (kind, digest) and not name.startswith("before")
    }
    assert changed == {
        "calls": "value", "counted.nested['list'][0]": "tensor", "counted.nested['list'][1][0]": "generator",
        "model.0.seen": "value",
    }  # fmt: skip
    assert "dataset.tensors[0]" in after
    assert "counted.broken" in after
