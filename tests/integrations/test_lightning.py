"""The strategy for Lightning: what it refuses, the private names that it uses, and equal losses."""

# ruff: noqa: ARG001, ARG002  their methods have these parameters, and fixtures prepare

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import farandole
from farandole import joining
from farandole.errors import UsageError
from tests.support import forked
from tests.support.harness import ENVIRON, Elastic, alone
from tests.support.mentioned import mentions
from tests.support.vision_operators import declare

declare()
pytest.importorskip("lightning", reason="the strategy for Lightning needs lightning")

import torchmetrics  # noqa: E402
from lightning import LightningModule, Trainer  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402

from farandole.integrations import lightning as ours  # noqa: E402
from tests.jobs import lightning_regression as job  # noqa: E402

JOB = Path(job.__file__)
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::UserWarning:lightning")


class Linear(LightningModule):
    """One layer; `training_step` returns what `result` makes of the loss."""

    def __init__(self, result: Any = lambda _, loss: loss, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD):
        super().__init__()
        self.layer, self.result, self.kind = nn.Linear(8, 1), result, optimizer
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.seen.append(x)
        return self.result(self, (self.layer(x) - y).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(24))


def trainer_of(folder: Path, **options: Any) -> Trainer:
    options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, **options}
    return Trainer(
        strategy=ours.FarandoleStrategy(micro=3), default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing="callbacks" in options, **options,
    )  # fmt: skip


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(job.Points(24), **({"batch_size": 12} | options))


def refused(trainer: Trainer, module: LightningModule, *values: Any, **options: Any) -> None:
    """`fit` raises an error that names the values, before any parameter has changed."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    options = {"train_dataloaders": loader(), **options}
    with pytest.raises(UsageError) as caught:
        trainer.fit(module, **options)
    assert mentions(str(caught.value), *values)
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


# --- names and versions -----------------------------------------------------------------------------------------------


def test_private_attributes_are_those_of_the_trainer(tmp_path: Path, run: farandole.Run) -> None:
    trainer = trainer_of(tmp_path, callbacks=[callbacks.ModelCheckpoint()])
    places = {"trainer": trainer, "ModelCheckpoint": trainer.checkpoint_callback}
    for path, names in ours.PRIVATE.items():
        place = places.get(path)
        for name in [] if place is not None else path.split(".")[1:]:
            place = getattr(trainer if place is None else place, name)
        assert [name for name in names if not hasattr(place, name)] == [], path


def test_logged_values_have_the_attributes_that_are_sent(tmp_path: Path, run: farandole.Run) -> None:
    results: list[Any] = []

    def step(module: LightningModule, loss: torch.Tensor) -> torch.Tensor:
        module.log("loss", loss, on_epoch=True)
        return loss

    class Kept(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            results.append(ours._sums(trainer.fit_loop.epoch_loop._results["training_step.loss"]))

    trainer_of(tmp_path, callbacks=[Kept()]).fit(Linear(step), loader())
    assert [result["samples"].item() for result in results] == [12, 24]
    assert results[-1]["options"].keys() == results[0]["options"].keys()


@pytest.mark.parametrize("version", ["1.9.5", "2.5.6", "3.0.0", "main"])
def test_another_version_is_refused_with_the_supported_ones(version: str) -> None:
    with pytest.raises(UsageError) as caught:
        ours.check_version(version)
    assert all(mentions(str(caught.value), name) for name in (version, *(f"{a}.{b}" for a, b in ours.SUPPORTED)))


def test_the_installed_version_is_supported() -> None:
    ours.check_version(ours.lightning.__version__)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate_grad_batches", 2), ("overfit_batches", 1), ("limit_train_batches", 1),
        ("limit_train_batches", 0.5), ("reload_dataloaders_every_n_epochs", 1), ("max_epochs", -1),
        ("precision", "16-true"), ("devices", 2), ("num_nodes", 2), ("sync_batchnorm", True),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_run_is_refused_by_name(
    tmp_path: Path, run: farandole.Run, name: str, value: Any
) -> None:
    def fit() -> None:
        trainer_of(tmp_path, **{name: value}).fit(Linear(), loader())

    with pytest.raises(UsageError) as caught:
        fit()
    assert mentions(str(caught.value), name, value)


@pytest.mark.parametrize(
    "callback",
    [
        callbacks.Timer("00:01:00:00"), callbacks.GradientAccumulationScheduler({1: 2}),
        callbacks.StochasticWeightAveraging(0.1), callbacks.WeightAveraging(), callbacks.OnExceptionCheckpoint("there"),
        callbacks.BatchSizeFinder(), callbacks.LearningRateFinder(), callbacks.BackboneFinetuning(),
        callbacks.ModelPruning("l1_unstructured"),
        callbacks.ModelCheckpoint(train_time_interval=timedelta(hours=1)),
        callbacks.ModelCheckpoint(save_on_exception=True),
    ],
    ids=lambda callback: type(callback).__name__,
)  # fmt: skip
def test_a_callback_that_contradicts_the_run_is_refused_by_name(run: farandole.Run, callback: Any) -> None:
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, callbacks=[callback])
    with pytest.raises(UsageError) as caught:
        ours.check_trainer(trainer)
    name = type(callback).__name__
    assert mentions(str(caught.value), name)


def test_max_time_and_validation_by_the_clock_are_refused(run: farandole.Run) -> None:
    for options in ({"max_time": "00:01:00:00"}, {"val_check_interval": "00:00:10:00"}):
        with pytest.raises(UsageError) as caught:
            ours.check_trainer(Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, **options))
        assert mentions(str(caught.value), next(iter(options)))


def test_manual_optimization_is_refused(tmp_path: Path, run: farandole.Run) -> None:
    module = Linear()
    module.automatic_optimization = False
    refused(trainer_of(tmp_path), module, "Linear", "automatic_optimization")


@pytest.mark.parametrize("hook", ["backward", "on_before_batch_transfer"])
def test_a_hook_that_the_run_can_not_call_is_refused(tmp_path: Path, run: farandole.Run, hook: str) -> None:
    def theirs(self: Any, loss: Any, *_: Any) -> Any:
        return loss

    module = type("Own", (Linear,), {hook: theirs})()
    refused(trainer_of(tmp_path), module, "Own", hook)


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (lambda _, loss: {"loss": loss, "preds": loss}, "preds"),
        (lambda *_: None, "NoneType"),
        (lambda module, loss: module.log("acc", module.metric) or loss, "acc"),
        (lambda module, loss: module.log("a", loss, reduce_fx=torch.median) or loss, "median"),
        (lambda module, loss: module.all_gather(loss), "all_gather"),
    ],
    ids=["dict", "none", "metric", "reduction", "gather"],
)
def test_a_result_of_a_micro_batch_that_can_not_be_that_of_the_batch_is_refused(
    tmp_path: Path, run: farandole.Run, result: Any, value: str
) -> None:
    module = Linear(result)
    module.metric = torchmetrics.MeanMetric()
    refused(trainer_of(tmp_path), module, value)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (lambda: [loader(), loader()], "DataLoader"),
        (lambda: [loader()], "list"),
        (lambda: [1, 2], "list"),
        (lambda: DataLoader(Stream(), batch_size=12), "Stream"),
        (
            lambda: loader(batch_size=1, batch_sampler=BatchSampler(SequentialSampler(range(24)), 5, False)),
            "batch_sampler",
        ),
    ],
    ids=["two", "one in a list", "a list", "an iterable", "a batch sampler"],
)
def test_data_that_the_run_can_not_divide_is_refused(tmp_path: Path, run: farandole.Run, data: Any, value: str) -> None:
    refused(trainer_of(tmp_path), Linear(), value, train_dataloaders=data())


def test_a_checkpoint_of_lightning_and_a_second_fit_are_refused(tmp_path: Path, run: farandole.Run) -> None:
    first, module = trainer_of(tmp_path), Linear()
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    refused(first, module, "trainer.fit", train_dataloaders=loader())
    refused(trainer_of(tmp_path), module, "last.ckpt", ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("micro", [0, -1, 2.0, None])
def test_a_size_of_micro_batches_that_is_none_is_refused(run: farandole.Run, micro: Any) -> None:
    with pytest.raises(UsageError) as caught:
        ours.FarandoleStrategy(micro=micro)
    assert mentions(str(caught.value), "micro", micro) or micro == -1


# --- what it computes -------------------------------------------------------------------------------------------------


def test_micro_batches_have_their_size_and_a_sample_counts_by_its_weight(tmp_path: Path, run: farandole.Run) -> None:
    weighed, plain = Linear(), Linear()
    plain.load_state_dict(weighed.state_dict())
    trainer = trainer_of(tmp_path, max_steps=1)
    trainer.strategy._weight = lambda batch: (batch[0][:, 0] > 0).sum()
    trainer.fit(weighed, loader(shuffle=False))
    assert [len(x) for x in weighed.seen] == [3] * 4
    points = job.Points(24)
    batches = [(points.x[i : i + 3], points.y[i : i + 3]) for i in range(0, 12, 3)]
    weights = [int((x[:, 0] > 0).sum()) for x, _ in batches]
    assert len(set(weights)) > 1
    optimizer = plain.configure_optimizers()
    losses = [n * (plain.layer(x) - y).pow(2).mean() for n, (x, y) in zip(weights, batches, strict=True)]
    (sum(losses[1:], losses[0]) / sum(weights)).backward()
    optimizer.step()
    for one, other in zip(weighed.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"fast_dev_run": 2}])
def test_an_optimizer_that_calls_its_closure_often_gets_gradients_of_the_batch(
    tmp_path: Path, run: farandole.Run, options: dict[str, Any]
) -> None:
    module, data = Linear(optimizer=torch.optim.LBFGS), job.Points(24)
    before = (module.layer(data.x) - data.y).pow(2).mean().item()
    trainer_of(tmp_path, max_epochs=1, **options).fit(module, loader())
    assert len(module.seen) > 2 * 4  # 2 steps of 4 micro-batches, several times
    assert (module.layer(data.x) - data.y).pow(2).mean().item() < before


def values(out: Path) -> list[Any]:
    return json.loads((out / "values.json").read_text())


def compare(mine: list[Any], theirs: list[Any]) -> None:
    """All losses and all values of `self.log` are theirs, to five digits."""
    assert [step[:3] for step in mine[0]] == [step[:3] for step in theirs[0]]
    assert [step[3] for step in mine[0]] == pytest.approx([step[3] for step in theirs[0]], rel=1e-5)
    for one, other in zip(mine[1], theirs[1], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_losses_and_logged_values_are_those_of_lightning(tmp_path: Path, run: farandole.Run) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    job.main([str(theirs), "--plain", "--epochs", "2", "--theirs"])
    job.main([str(mine), "--plain", "--epochs", "2"])
    assert len(values(mine)[0]) == 2 * job.SAMPLES // job.BATCH
    compare(values(mine), values(theirs))
    assert (mine / "fingerprint").read_text() == run.fingerprint()
    assert sorted(path.name for path in (mine / "best").iterdir()) == sorted(
        path.name for path in (theirs / "best").iterdir()
    )


def test_the_state_of_callbacks_and_values_is_the_same_after_a_way_through_a_checkpoint(
    tmp_path: Path, run: farandole.Run
) -> None:
    job.main([str(tmp_path / "first"), "--epochs", "2"])
    position = run._replica.objects["trainer"]  # pyright: ignore[reportOptionalMemberAccess]
    assert isinstance(position, ours._Position)
    state = position.state_dict()
    for callback in position.trainer.callbacks:
        if isinstance(callback, callbacks.ModelCheckpoint):
            callback.best_k_models, callback.current_score, callback._last_checkpoint_saved = {}, None, ""
        elif isinstance(callback, callbacks.EarlyStopping):
            callback.wait_count = 17
    position.trainer._logger_connector._callback_metrics = {}
    assert position.state_dict() != state
    position.load_state_dict(state)
    assert position.state_dict() == state  # before it is applied, a joiner has what it has received
    position.apply()
    assert position.state_dict() == state
    assert str(tmp_path) not in state["json"]


def test_a_run_that_goes_on_within_an_epoch_has_the_counters_and_values_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[Any] = []

    def begin(folder: str) -> farandole.Run:
        monkeypatch.setenv("FARANDOLE_FOLDER", str(tmp_path / folder))
        monkeypatch.setattr(joining, "_current", None)
        run = farandole.join()
        contexts.append(run._context)
        atexit.unregister(contexts[-1]._end)
        return run

    def end() -> None:
        contexts[-1]._file.close()
        os.close(contexts.pop()._lock)

    monkeypatch.setenv("FARANDOLE_CHECKPOINT_EVERY", "never")
    undisturbed = begin("undisturbed")
    job.main([str(tmp_path / "single"), "--epochs", "3"])
    fingerprint = undisturbed.fingerprint()
    end()
    first = begin("interrupted")
    with pytest.raises(job.Interrupted):
        job.main([str(tmp_path / "out"), "--epochs", "3", "--interrupted", "6"])  # of 4 in an epoch
    assert first._end_alone()
    end()
    second = begin("interrupted")
    job.main([str(tmp_path / "out"), "--epochs", "3"])
    end()
    assert values(tmp_path / "out") == values(tmp_path / "single")
    assert second.fingerprint() == fingerprint


def test_a_state_of_a_callback_that_can_not_be_sent_is_refused(tmp_path: Path, run: farandole.Run) -> None:
    class Own(callbacks.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"there": {1, 2}}

    with pytest.raises(UsageError) as caught:
        trainer_of(tmp_path, callbacks=[Own()]).fit(Linear(), loader())
    assert mentions(str(caught.value), "set")


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.processes
def test_bits_are_those_of_an_undisturbed_run_with_joins_a_kill_and_a_release(tmp_path: Path) -> None:
    out, single, pace = (tmp_path / name for name in ("out", "single", "pace"))
    alone(tmp_path / "alone", JOB, str(single))
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(out), "--pace", str(pace), workers=1, options=[]) as run:
        run.until_step(5)
        run.command("scale", "3")
        first, second, _ = run.until_members(3)
        run.signal(first, signal.SIGKILL)
        run.until_members(3, without=(first,))
        run.signal(second, signal.SIGTERM)
        run.until_members(2, without=(first, second))
        pace.unlink()
        run.finish()
        logged = [line for line in run.lines() if "loss_step" in line]
    assert (out / "fingerprint").read_text() == (single / "fingerprint").read_text()
    assert values(out) == values(single)
    assert [line["step"] for line in logged] == list(range(len(values(single)[0])))
    assert sorted(path.name for path in (out / "best").iterdir()) == sorted(
        path.name for path in (single / "best").iterdir()
    )


@pytest.mark.long
@pytest.mark.processes
def test_a_run_that_is_stopped_within_an_epoch_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    out, single, pace = (tmp_path / name for name in ("out", "single", "pace"))
    arguments = ("--epochs", "6", "--pace", str(pace))
    alone(tmp_path / "alone", JOB, str(single), *arguments)
    pace.touch()
    with Elastic(tmp_path / "run", JOB, str(out), *arguments, workers=2, options=[]) as run:
        run.until_step(5)  # of 4 in an epoch
        run.command("stop")
        run.finish()
    pace.unlink()
    with Elastic(tmp_path / "run", JOB, str(out), *arguments, workers=2, options=[]) as run:
        run.finish()
    assert (out / "fingerprint").read_text() == (single / "fingerprint").read_text()
    assert values(out) == values(single)


def test_an_error_names_the_extra_if_lightning_is_missing(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['lightning'] = None\n"
        "from farandole.errors import UsageError\n"
        "try:\n    import farandole.integrations.lightning\n"
        "except UsageError as error:\n    print(error)"
    )
    done = forked.run([sys.executable, "-c", program], env=ENVIRON, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "[lightning]" in done.stdout
