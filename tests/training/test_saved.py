"""`run.save`: the state as it is now in one file, by one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from farandole.errors import UnknownState, UsageError
from tests.support.steps import BATCH, data, mlp


def trained(run: farandole.Run) -> nn.Sequential:
    """The model of a run whose first step is over, its update included."""
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer, best=0.0)
    for step in run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        run.state.best = 0.5
        break
    return model


def test_the_state_as_it_is_now(run: farandole.Run, tmp_path: Path) -> None:
    model, file = trained(run), tmp_path / "best[1].pt"
    left = tmp_path / ".best[1].pt.w7.tmp"
    left.write_bytes(b"half")
    run.save(file)
    saved = torch.load(file, weights_only=True)
    assert list(saved) == ["model", "optimizer", "state"]
    other = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    other.load_state_dict(saved["model"])
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    assert int(saved["model"]["1.num_batches_tracked"]) == 1, "not what the step began with"
    assert torch.equal(saved["optimizer"]["state"][0]["momentum_buffer"], momentum(run))
    assert saved["state"] == {"best": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["best[1].pt"]
    run.state.best = 0.75
    run.save(str(file))
    assert torch.load(file, weights_only=True)["state"] == {"best": 0.75}


def momentum(run: farandole.Run) -> torch.Tensor:
    assert run._replica is not None
    optimizer = run._replica.objects["optimizer"]
    return next(iter(optimizer.state.values()))["momentum_buffer"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["", "s3://bucket/best.pt", "nowhere/best.pt", ".", 7, None, b"best.pt"])
def test_what_is_no_file(run: farandole.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object) -> None:
    monkeypatch.chdir(tmp_path)
    trained(run)
    with pytest.raises(UsageError, match=r"run\.save"):
        run.save(path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_stays_if_the_state_can_not_be_saved(run: farandole.Run, tmp_path: Path) -> None:
    trained(run)
    file = tmp_path / "best.pt"
    run.save(file)
    before = file.read_bytes()
    assert run._replica is not None
    run._replica.objects["odd"] = Odd()  # type: ignore[assignment]
    with pytest.raises(UnknownState):
        run.save(file)
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (before, [file])


class Odd:
    def state_dict(self) -> dict[str, object]:
        return {"thing": object()}

    def load_state_dict(self, state: object) -> None: ...


def test_places_where_it_can_not_be_called(run: farandole.Run, tmp_path: Path) -> None:
    file = tmp_path / "best.pt"
    with pytest.raises(UsageError, match=r"run\.(save|once)"):
        run.save(file)
    trained(run)
    with run.once(), pytest.raises(UsageError, match=r"run\.once"):
        run.save(file)
    assert not file.exists()
