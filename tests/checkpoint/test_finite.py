"""Whether a checkpoint's state is finite: its parameters and the last loss decide, and the newest such one stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from farandole.checkpoint import content, restore
from farandole.checkpoint.content import in_place
from farandole.checkpoint.save import CheckpointSaver
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import Sealing, Sink, Store
from farandole.plan.shards import Position
from tests.support.checkpoints import manifest, state, steps

PARAMETERS = {"model.weight"}


def held(value: float, *, at: int = -1, **more: Any) -> dict[str, Any]:
    given = {**state(1.0), **more}
    given["objects"]["model"]["weight"].view(-1)[at] = value
    given["objects"]["model"]["mask"] = torch.tensor([0.0, -math.inf])
    given["objects"]["optimizer"] = {"state": {0: {"exp_avg": torch.tensor(math.nan)}}, "param_groups": []}
    return given


CASES = [
    # state, whether it is finite, remark
    (held(1.0), True, "masks may be infinite"),
    (held(math.nan), False, "the last element"),
    (held(math.inf, at=0), False, "the first one"),
    (held(-math.inf, at=7), False, "and the other infinity"),
    (held(1.0, finite=True), True, "the last loss was"),
    (held(1.0, finite=False), False, "the last loss was not"),
    (held(3.4e38), True, "large is not infinite"),
]


@pytest.mark.parametrize(("given", "finite", "remark"), CASES, ids=[case[2] for case in CASES])
def test_what_is_finite(given: dict[str, Any], finite: bool, remark: str) -> None:
    del remark
    assert content.finite(in_place(given), PARAMETERS) is finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32])
def test_any_kind_of_parameter(dtype: torch.dtype) -> None:
    given = held(1.0)
    given["objects"]["model"]["weight"] = torch.ones(3, 5, dtype=dtype).t()
    assert content.finite(in_place(given), PARAMETERS)
    if dtype != torch.int32:
        given["objects"]["model"]["weight"][4, 2] = math.inf
        assert not content.finite(in_place(given), PARAMETERS)


def save(store: Store, step: int, keep: int, *, finite: bool) -> None:
    described = msgspec.structs.replace(manifest(step), finite=finite)

    def produce(sink: Sink) -> bytes:
        sealing = Sealing(sink)
        content.save(in_place(state(step)), Position(step=step), sealing)
        return sealing.seal(described)

    store.write(store.name(described), produce, keep)


@pytest.mark.failure("The training loop", "the loss becomes NaN or infinite")
def test_the_newest_finite_one_is_kept_as_long_as_no_newer_one_is(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "checkpoints"))
    for step in (2, 4):
        save(store, step, 2, finite=True)
    for step in (6, 8, 10, 12):
        save(store, step, 2, finite=False)
    assert steps(store) == [12, 10, 4]
    assert len(list(Path(store.path).iterdir())) == 2 * 3
    found = restore.find([store.url])
    assert found.position.step == 12
    assert "step-00000004" in found.last_finite
    save(store, 14, 2, finite=True)
    assert steps(store) == [14, 12]
    assert restore.find([store.url]).last_finite == ""


def test_one_whose_manifest_is_damaged_is_not_taken_for_the_finite_one(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "checkpoints"))
    save(store, 2, 2, finite=True)
    save(store, 4, 2, finite=True)
    next(Path(store.path).glob("step-00000004-*.json")).write_text("{")
    for step in (6, 8):
        save(store, step, 2, finite=False)
    assert steps(store) == [8, 6, 2]


def test_the_saver_looks_at_the_copy_that_it_writes(tmp_path: Path) -> None:
    told: list[Any] = []
    store = Store(str(tmp_path / "checkpoints"))
    saver = CheckpointSaver(
        store, Every(steps=1), 9, describe=lambda position, _whole: manifest(position.step), tell=told.append,
        parameters=PARAMETERS,
    )  # fmt: skip
    saver.enter(0)
    given = held(math.nan)
    saver.step_begins(Position(step=1), lambda: given, leads=True)
    given["objects"]["model"]["weight"].fill_(1.0)  # training goes on
    path, finite = saver.save(Position(step=2), given, whole=True)
    assert finite
    assert [message.finite for message in told] == [False]
    assert [store.manifest(entry.stem).finite for entry in store.entries()] == [True, False]
    assert "step-00000002" in path
