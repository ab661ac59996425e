"""`FarandoleStrategy`: the Trainer of Lightning, in a run whose workers join, leave and die.

    from farandole.integrations.lightning import FarandoleStrategy

    trainer = Trainer(max_epochs=10, strategy=FarandoleStrategy(micro=32))

The strategy is the one line of a Lightning script that changes. The loops stay theirs: hooks, callbacks, clipping,
optimizer, schedules, logging, validation and saving. What differs is what the training loop iterates over:

1. The train dataloader yields one `Step` of the run for each batch. The batch of the DataLoader is the batch of all
   workers together, in micro-batches of `micro` samples.
2. Lightning passes a closure to the optimizer. In the closure `training_step` is called for each micro-batch of this
   worker. `.grad` and the loss are then those of the global batch, and so are the values of `self.log`.
3. A worker enters the run when the training loop asks for its first batch, after all hooks of the start. It gets the
   state there: model, optimizer, schedules, callbacks and logged values. Then its counters are those of the others.
4. Validation runs on each worker alike. One worker writes each checkpoint of Lightning (`ModelCheckpoint`).

`PRIVATE` lists the private attributes of their classes on which this depends.
"""

# ruff: noqa: ARG002  their methods have these parameters

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

import farandole
from farandole import joining
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.platform import extras
from farandole.platform.extras import how_to_install
from farandole.training.step import Step
from farandole.worker.context import SingleProcess

# Their types are left out: a type checker takes minutes for them.
try:
    lightning: Any = importlib.import_module("lightning")
    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
    loggers: Any = importlib.import_module("lightning.pytorch.loggers")
    precisions: Any = importlib.import_module("lightning.pytorch.plugins.precision")
    strategies: Any = importlib.import_module("lightning.pytorch.strategies")
    environments: Any = importlib.import_module("lightning.pytorch.plugins.environments")
    rank_zero: Any = importlib.import_module("lightning.pytorch.utilities.rank_zero")
    helpers: Any = importlib.import_module("lightning.pytorch.utilities.model_helpers")
except ImportError as error:
    raise UsageError(
        f"farandole.integrations.lightning needs the package lightning ({error}): {how_to_install('lightning')}"
    ) from error

_TheirStrategy: Any = strategies.SingleDeviceStrategy
_TheirCallback: Any = callbacks.Callback
_TheirLogger: Any = loggers.Logger
SUPPORTED = ((2, 6), (2, 6))  # the oldest and the newest version with which the tests pass
PRIVATE: Mapping[str, tuple[str, ...]] = {  # private attributes of theirs, by the object that has them
    "trainer": ("_val_check_time_interval", "_logger_connector"),
    "trainer._logger_connector": (
        "_callback_metrics", "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter",
    ),
    "trainer.fit_loop": ("_data_fetcher",),
    "trainer.fit_loop.epoch_loop": ("_batches_that_stepped", "_results"),
    "trainer.strategy": ("_layer_sync",),
    "ModelCheckpoint": (
        "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation", "_train_time_interval",
    ),
}  # fmt: skip

_WHOLE = "each worker holds a whole replica of the model"
# Options of the Trainer that contradict the run, the values that they may have, and what to do instead.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "accumulate_grad_batches": (
        (1,), "the batch of the DataLoader is that of an update: multiply batch_size, and keep micro for the memory",
    ),
    "overfit_batches": ((0, 0.0), "pass a DataLoader over a torch.utils.data.Subset"),
    "limit_train_batches": ((1.0,), "pass a DataLoader over a torch.utils.data.Subset, or set max_steps"),
    "reload_dataloaders_every_n_epochs": ((0,), "a run has one loader; derive what changes from the epoch"),
    "_val_check_time_interval": ((None,), "clocks differ between workers: give val_check_interval in batches"),
}  # fmt: skip
# Callbacks that contradict the run, by the name of their class, and what to do instead.
_REFUSED_CALLBACKS: Mapping[str, str] = {
    "Timer": "clocks differ between workers: set max_epochs or max_steps instead of max_time",
    "GradientAccumulationScheduler": "the batch of an update is that of the DataLoader: set its batch_size",
    "BatchSizeFinder": "find the size in a script of its own",
    "LearningRateFinder": "find the rate in a script of its own",
    "StochasticWeightAveraging": "its average is not part of the run's state: keep one in the LightningModule",
    "WeightAveraging": "its average is not part of the run's state: keep one in the LightningModule",
    "OnExceptionCheckpoint": "a run goes on from its own checkpoints: farandole run --folder runs/NAME",
    "BaseFinetuning": "a joining worker's optimizer lacks the groups that it adds: set requires_grad in a hook",
    "ModelPruning": "it replaces parameters: prune after the training",
}
_REDUCTIONS = ("mean", "sum", "max", "min")
_PROG_BAR, _LOGGER, _ON_STEP, _ON_EPOCH, _RANK_ZERO = 1, 2, 4, 8, 16  # options of self.log, in the name of a value


def check_version(version: str) -> None:
    """Raise UsageError if this version of lightning is not supported."""
    extras.check_version("lightning", version, *SUPPORTED)


def check_trainer(trainer: Any) -> None:
    """Raise UsageError if an option of `trainer`, or one of its callbacks, contradicts the run."""
    for name, (allowed, remedy) in _REFUSED.items():
        value = getattr(trainer, name)
        same = any(value == other and type(value) is type(other) for other in allowed)  # 1 batch is not 1.0, all
        if not same and not (name == "limit_train_batches" and trainer.fast_dev_run):
            option = name.removeprefix("_").replace("val_check_time_interval", "val_check_interval")
            raise UsageError(f"Trainer({option}={value!r}) in a run of farandole: {remedy}")
    if trainer.max_steps == -1 and trainer.max_epochs == -1:
        raise UsageError(
            "Trainer(max_epochs=-1) in a run of farandole: a run has a length: set max_epochs or max_steps"
        )
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__module__.startswith("lightning.") and (remedy := _REFUSED_CALLBACKS.get(kind.__name__)):
                raise UsageError(f"callback {type(callback).__name__} in a run of farandole: {remedy}")
        if isinstance(callback, callbacks.ModelCheckpoint):
            if callback._train_time_interval is not None:
                raise UsageError(
                    f"ModelCheckpoint(train_time_interval={callback._train_time_interval!r}): clocks differ between "
                    f"workers: set every_n_train_steps or every_n_epochs"
                )
            if callback.save_on_exception:
                raise UsageError(
                    f"ModelCheckpoint(save_on_exception=True): {_REFUSED_CALLBACKS['OnExceptionCheckpoint']}"
                )


def check_module(module: Any) -> None:
    """Raise UsageError if a LightningModule does something that a run can't do."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{kind}.automatic_optimization=False: write the loop instead, with step.again() for several passes: "
            f"docs/running.md"
        )
    for hook, remedy in {
        "backward": "the run computes the gradients: return the loss from training_step",
        "on_before_batch_transfer": "override on_after_batch_transfer, or do it in collate_fn",
    }.items():
        for owner in (module, module.trainer.datamodule):
            if owner is not None and hasattr(owner, hook) and helpers.is_overridden(hook, owner):
                raise UsageError(f"{type(owner).__name__}.{hook} in a run of farandole: {remedy}")


# --- the steps --------------------------------------------------------------------------------------------------------


class _Steps:
    """The train dataloader: yields the steps of the run, epoch by epoch. `enter()` returns the steps from here on."""

    def __init__(self, loader: Loader, enter: Callable[[], Iterator[Step]], began: Callable[[Step], None]) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self._enter, self._began = enter, began
        self._steps: Iterator[Step] | None = None  # None until the worker has entered the run

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Step]:
        while True:
            self._steps = self._steps or self._enter()
            step = next(self._steps, None)
            if step is None:
                return
            self._began(step)
            yield step
            if step.ends_epoch:
                return


class _Position:
    """What travels to joiners and into checkpoints beside model, optimizer and schedules, as JSON text."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.received: dict[str, Any] | None = None  # state that is not applied yet

    def state_dict(self) -> dict[str, Any]:
        if self.received is not None:
            return {"json": _text(self.received)}
        connector, results = self.trainer._logger_connector, self.trainer.fit_loop.epoch_loop._results
        return {
            "json": _text(
                {
                    "callbacks": {callback.state_key: self._state(callback) for callback in self.trainer.callbacks},
                    "latest": [
                        connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics,
                    ],
                    "epoch": {key: _sums(results[key]) for key in sorted(results) if not results[key].has_reset},
                }
            )
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.received = json.loads(state["json"], object_hook=_tensors)

    def apply(self) -> None:
        """Put the state that another worker or a checkpoint has sent in place of this worker's own."""
        if self.received is None:
            return
        received, trainer = self.received, self.trainer
        for callback in trainer.callbacks:
            state = received["callbacks"].get(callback.state_key)
            if state is None:
                raise UsageError(
                    f"callback {callback.state_key}: the run has none; pass the same callbacks on all workers"
                )
            self._load(callback, state)
        connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
        connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = received["latest"]
        loop._results.reset()  # what this worker's own hooks have logged
        for key, value in received["epoch"].items():
            _add_sums(trainer, loop._results, key, value)
        self.received = None

    def _state(self, callback: Any) -> dict[str, Any]:
        """Return the state of a callback, without the folder of the Trainer: the fingerprint must not depend on it."""
        state = callback.state_dict()
        if not isinstance(callback, callbacks.ModelCheckpoint):
            return state
        state |= {name: getattr(callback, name) for name in PRIVATE["ModelCheckpoint"]}
        folder = os.path.join(os.path.abspath(self.trainer.default_root_dir), "")
        return _each_text(state, lambda text: f"./{text.removeprefix(folder)}" if text.startswith(folder) else text)

    def _load(self, callback: Any, state: dict[str, Any]) -> None:
        if not isinstance(callback, callbacks.ModelCheckpoint):
            if state:
                callback.load_state_dict(state)
            return
        folder = os.path.abspath(self.trainer.default_root_dir)
        state = _each_text(state, lambda text: os.path.join(folder, text[2:]) if text.startswith("./") else text)
        for name, value in state.items():  # its own method leaves out some, and all of them in another folder
            setattr(callback, name, value)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a nested value in which `change` is applied to each text, also to keys."""
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _text(state: dict[str, Any]) -> str:
    """Return the state as JSON text, with tensors in it. Raises UsageError if that is not possible."""

    def tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
        raise UsageError(
            f"the state of a callback has a {type(value).__name__}, which can't be sent to joining workers: its "
            f"state_dict() may have numbers, texts, tensors, and lists and dicts of these"
        )

    return json.dumps(state, default=tensor)


def _tensors(value: dict[str, Any]) -> Any:
    if value.keys() == {"tensor", "dtype"}:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value


def _sums(result: Any) -> dict[str, Any]:
    """Return what a value of self.log has come to in this epoch, and its options."""
    if not result.is_tensor:
        raise UsageError(
            f"self.log({result.meta.name!r}, Metric) in the training: a metric has only this worker's samples; log "
            f"values in training_step, or the metric in validation_step"
        )
    meta = result.meta
    return {
        "value": result.value,
        "samples": result.cumulated_batch_size if meta.is_mean_reduction else None,
        "latest": result._forward_cache,
        "options": {
            "fx": meta.fx, "name": meta.name, "prog_bar": meta.prog_bar, "logger": meta.logger,
            "on_step": meta.on_step, "on_epoch": meta.on_epoch, "reduce_fx": meta.reduce_fx.__name__,
            "add_dataloader_idx": meta.add_dataloader_idx, "rank_zero_only": meta.sync.rank_zero_only,
        },
    }  # fmt: skip


def _add_sums(trainer: Any, results: Any, key: str, state: dict[str, Any]) -> None:
    device = trainer.strategy.root_device
    value = state["value"].to(device)
    results.log(value=value, batch_size=1, sync_dist_fn=trainer.strategy.reduce, **state["options"])
    result = results[key]
    if state["samples"] is not None:
        result.cumulated_batch_size = state["samples"].to(device)
    result._forward_cache = None if state["latest"] is None else state["latest"].to(device)
    result._computed = None


class _Follow(_TheirCallback):
    """The first of the callbacks: tells Lightning the size of the batch, which it can't see in a `Step`."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, Step):
            raise UsageError(
                f"train_dataloader gives a {type(batch).__name__} of DataLoaders: a run takes one DataLoader"
            )
        trainer.fit_loop.epoch_loop._results.batch_size = batch.samples


# --- the strategy -----------------------------------------------------------------------------------------------------


class FarandoleStrategy(_TheirStrategy):
    """Trains the LightningModule of a Trainer in the run that this process has joined.

    `micro`: the number of samples of one forward pass. The batch of the train DataLoader is that of all workers
    together, for one update. `weight(batch)`: the number of units over which the loss of a micro-batch is the mean, if
    these are not its samples: `weight=lambda batch: (batch["labels"] != -100).sum()` for tokens.

    Attributes:
        run: the `farandole.Run`.

    Raises:
        UsageError: the version of lightning is not supported, or an option of the Trainer or something in the
            LightningModule contradicts the run (from `Trainer.fit`).
    """

    def __init__(self, *, micro: int, weight: Callable[[Any], float | torch.Tensor] | None = None) -> None:
        check_version(lightning.__version__)
        if not isinstance(micro, int) or micro < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"FarandoleStrategy(micro={micro!r}): it is the number of samples of one forward pass, at least 1"
            )
        self.run = joining.current() or farandole.join()
        self.micro, self._weight = micro, weight
        self._trainer: Any = None  # the one of `fit`
        self._steps: _Steps | None = None
        self._step: Step | None = None  # the current one, None until the worker has entered the run
        self._within = False  # True while `training_step` of a micro-batch runs
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._layer_sync: Any = None  # Lightning sets it for sync_batchnorm=True
        self.cluster_environment: Any = environments.LightningEnvironment()  # whatever else started this process
        super().__init__(device=self.run.device)
        rank_zero.rank_zero_only.rank = 0 if self.is_global_zero else 1

    @property
    def is_global_zero(self) -> bool:
        """True on the worker that prints, reports and saves: the run's leader, once this worker has entered the run."""
        if self._step is None:
            return isinstance(self.run._context, SingleProcess)  # pyright: ignore[reportPrivateUsage]
        return self.run.is_leader

    @property
    def num_nodes(self) -> int:
        """The number of hosts that the Trainer knows. The hosts of the run are those of `farandole run`."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise UsageError(
                f"Trainer(num_nodes={number}): the hosts are those of the run: farandole run --workers N, or --pool"
            )

    @property
    def parallel_devices(self) -> None:
        """None: a worker has one device, `root_device`."""

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) not in (1, self.accelerator.auto_device_count()):
            raise UsageError(
                f"Trainer(devices={len(devices)}) in a run of farandole: a worker has one device: farandole run "
                f"--workers {len(devices)}"
            )

    # --- before the training ---------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Check the device of the Trainer, and set it up."""
        kind = {"cpu": "CPUAccelerator", "cuda": "CUDAAccelerator"}[self.root_device.type]
        if type(self.accelerator).__name__ != kind:
            raise UsageError(
                f"Trainer with {type(self.accelerator).__name__}, and the run with {self.root_device}: set "
                f"accelerator={'cpu' if kind == 'CPUAccelerator' else 'gpu'!r}"
            )
        super().setup_environment()

    def load_checkpoint(self, checkpoint_path: Any, *positional: Any, **options: Any) -> Any:
        """Load a checkpoint of Lightning, outside `fit`."""
        if self.lightning_module.trainer.training:
            raise UsageError(
                f"trainer.fit(ckpt_path={str(checkpoint_path)!r}): a run goes on from its own checkpoints: farandole "
                f"run --folder runs/NAME. For first weights use load_from_checkpoint of the LightningModule"
            )
        return super().load_checkpoint(checkpoint_path, *positional, **options)

    def setup(self, trainer: Any) -> None:
        """Set up model, optimizer and schedules, and check that the run can train them."""
        if trainer.training:
            self._begin_fit(trainer)
        super().setup(trainer)

    def _begin_fit(self, trainer: Any) -> None:
        if self._step is not None:
            raise UsageError("trainer.fit was called before; a run has one training: set max_epochs or max_steps")
        check_trainer(trainer)
        check_module(self.lightning_module)
        if self._layer_sync is not None:
            raise UsageError(
                "Trainer(sync_batchnorm=True) in a run of farandole: remove it; running statistics are means over all "
                "micro-batches, and a micro-batch is normalized by its own"
            )
        plugin = self.precision_plugin
        if type(plugin) not in (precisions.Precision, precisions.MixedPrecision) or getattr(plugin, "scaler", None):
            raise UsageError(
                f"Trainer(precision={trainer.precision!r}) in a run of farandole: it takes '32-true' and 'bf16-mixed'"
            )
        self._trainer = trainer
        trainer.callbacks.insert(0, _Follow())

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the steps of the run in place of the train DataLoader, and other loaders as they are."""
        trainer = self.lightning_module.trainer
        if not trainer.training or isinstance(dataloader, _Steps):
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise UsageError(
                f"train_dataloader gives a {type(dataloader).__name__}: a run takes one torch.utils.data.DataLoader"
            )
        if self._steps is not None:
            raise UsageError("train_dataloader gives more than one DataLoader: a run takes one; combine their datasets")
        if dataloader.batch_size is None:
            raise UsageError(
                "train_dataloader gives a DataLoader with a batch_sampler: Lightning counts batches of one number in "
                "each epoch; pass batch_size and a sampler"
            )
        self._steps = _Steps(self.run.loader(dataloader, micro=self.micro), self._enter, self._step_begins)
        return self._steps

    # --- the run ---------------------------------------------------------------------------------------------

    def _enter(self) -> Iterator[Step]:
        """Enter the run. The training loop asks for its first batch, and all hooks of the start have run."""
        trainer, module, steps = self._trainer, self.lightning_module, self._steps
        assert steps is not None
        replicated: dict[str, Any] = {"model": module}
        if trainer.optimizers:
            replicated["optimizer"] = trainer.optimizers[0]
        for number, config in enumerate(self.lr_scheduler_configs):
            replicated[f"schedule{number or ''}"] = config.scheduler
        datamodule = trainer.datamodule
        if datamodule is not None and helpers.is_overridden("state_dict", datamodule):
            replicated["datamodule"] = datamodule
        self._position = _Position(trainer)
        self.run.replicate(**replicated, trainer=self._position)
        module.log = functools.partial(self._log, module.log)
        lengths = [] if trainer.max_steps == -1 else [trainer.max_steps]
        if trainer.max_epochs not in (None, -1):
            lengths.append(trainer.max_epochs * len(steps))
        return self.run.steps(steps.loader, base_steps=min(lengths))

    def _step_begins(self, step: Step) -> None:
        first, self._step = self._step is None, step
        rank_zero.rank_zero_only.rank = 0 if self.run.is_leader else 1
        if not first:
            return
        loop, batch = self._trainer.fit_loop, step.number - step.epoch * len(self._steps or ())
        _count(loop.epoch_progress, step.epoch, open=True)
        epoch_loop = loop.epoch_loop
        _count(epoch_loop.batch_progress, batch, total=step.number)
        _count(epoch_loop.automatic_optimization.optim_progress.optimizer.step, batch, total=step.number)
        epoch_loop._batches_that_stepped = step.number
        loop._data_fetcher.fetched = batch
        self._position.apply()
        if batch:
            self._trainer._logger_connector._first_loop_iter = True  # the values of the epoch so far are kept

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, with Lightning's hooks. A step goes as it is: its micro-batches are moved."""
        if isinstance(batch, Step):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Compute this worker's micro-batches of a step. Returns the mean loss over the global batch.

        `.grad` is there from `backward` on: between the two, Lightning clears the gradients.
        """
        step: Step = arguments[0]
        self._within = True
        for batch in step.again():
            batch = self.batch_to_device(self.precision_plugin.convert_input(batch))
            loss = super().training_step(batch, *arguments[1:], **options)
            if isinstance(loss, Mapping):
                if more := sorted(str(key) for key in loss.keys() - {"loss"}):
                    raise UsageError(
                        f"training_step returns {', '.join(more)} beside loss: they would be those of one micro-batch; "
                        f"call self.log for values over the batch, and return the loss alone"
                    )
                loss = loss["loss"]
            if not isinstance(loss, torch.Tensor):
                raise UsageError(f"training_step returns {type(loss).__name__}: return the loss of each micro-batch")
            step.backward(loss, weight=None if self._weight is None else self._weight(batch))
        self._within = False
        self._log_values(step)
        parameters = list(self.lightning_module.parameters())
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return torch.tensor(step.loss, device=self.root_device)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *positional: Any, **options: Any) -> torch.Tensor:
        """Set `.grad` to the gradient of the global batch, and call the hooks around it."""
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    # --- logged values ---------------------------------------------------------------------------------------

    def _log(self, log: Callable[..., None], name: str, value: Any, *positional: Any, **options: Any) -> None:
        """`self.log` of the LightningModule. For a micro-batch the value goes into the means of the step.

        A worker without a micro-batch must log it too. So the options are part of the value's name.
        """
        if not self._within:
            return log(name, value, *positional, **options)
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        given = {**dict(zip(names, positional, strict=False)), **options}
        if isinstance(value, torch.nn.Module):
            raise UsageError(
                f"self.log({name!r}, {type(value).__name__}) in training_step: a metric has only this worker's "
                f"samples; log its value for the batch: self.log({name!r}, metric(...), on_epoch=True)"
            )
        reduction: Any = given.get("reduce_fx", "mean")
        reduction = getattr(reduction, "__name__", reduction).replace("avg", "mean")
        if reduction not in _REDUCTIONS:
            raise UsageError(f"self.log({name!r}, reduce_fx={reduction!r}): one of {', '.join(_REDUCTIONS)}")
        flags = (
            (given.get("prog_bar", False) and _PROG_BAR)
            | (given.get("logger") in (None, True) and _LOGGER)
            | (given.get("on_step") in (None, True) and _ON_STEP)
            | (bool(given.get("on_epoch")) and _ON_EPOCH)
            | (given.get("rank_zero_only", False) and _RANK_ZERO)
        )
        step, key = self._step, f"{chr(64 + flags)}{name}"
        assert step is not None
        if isinstance(value, torch.Tensor):
            value = value.detach().reshape(())
        if reduction == "mean":
            step.mean(weight=given.get("batch_size"), **{key: value})
        elif reduction == "sum":
            step.sum(**{key: value})
        elif reduction == "max":
            step.max(**{key: value})
        else:
            step.max(**{f"-{key}": -value})

    def _log_values(self, step: Step) -> None:
        """Log the values of the global batch, which are equal on all workers."""
        values = [("mean", key, value) for key, value in step.means.items()]
        values += [("sum", key, value) for key, value in step.sums.items()]
        for key, value in step.maxima.items():
            values.append(("min", key[1:], -value) if key.startswith("-") else ("max", key, value))
        for reduction, key, value in values:
            flags = ord(key[0]) - 64
            self.lightning_module.log(
                key[1:], value, prog_bar=bool(flags & _PROG_BAR), logger=bool(flags & _LOGGER),
                on_step=bool(flags & _ON_STEP), on_epoch=bool(flags & _ON_EPOCH), reduce_fx=reduction,
                rank_zero_only=bool(flags & _RANK_ZERO), batch_size=step.samples,
            )  # fmt: skip

    # --- work of one worker ----------------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the leader's `obj`: a number, text, or lists and dicts of these, of at most 32 KiB."""
        if self._step is None or self._within:
            return obj
        with self.run.once() as mine:
            if mine:
                mine.result = obj
        return mine.result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the leader's decision."""
        return self.broadcast(bool(decision))

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensor. In `training_step` there is only a micro-batch, so it is an error there."""
        if self._within:
            raise UsageError(
                "all_gather in training_step: workers compute micro-batches at their own pace; for a loss over all "
                "samples write the loop with step.gather(...): docs/running.md"
            )
        return tensor

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning, by one worker. All workers call it."""
        self._by_one(self.checkpoint_io.save_checkpoint, checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint of Lightning, by one worker. All workers call it."""
        self._by_one(self.checkpoint_io.remove_checkpoint, filepath)

    def _by_one(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._step is None:
            if self.is_global_zero:
                work(*arguments)
            return
        with self.run.once() as mine:
            if mine:
                work(*arguments)

    def teardown(self) -> None:
        """Leave model and optimizer on the device: the run saves them when the script ends."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class Logger(_TheirLogger):
    """Writes what Lightning logs into metrics.jsonl of the run: `Trainer(logger=Logger(), strategy=...)`.

    It has all lines, whichever workers have died. A logger of Lightning itself belongs to one worker.
    """

    @property
    def name(self) -> str:
        return "farandole"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        run = joining.current()
        if run is not None and run._entered is not None:  # pyright: ignore[reportPrivateUsage]
            run.log(**metrics)

    def log_hyperparams(self, params: Any, *positional: Any, **options: Any) -> None:
        """They are not written: the run's folder has the script."""


def _count(progress: Any, number: int, *, total: int | None = None, open: bool = False) -> None:
    """Set a counter of Lightning to `number` of this epoch and `total` of all. `open`: the next one has begun."""
    for tracker, value in ((progress.current, number), (progress.total, number if total is None else total)):
        for name in vars(tracker):
            begun = open and name in ("ready", "started")
            setattr(tracker, name, value + begun)
