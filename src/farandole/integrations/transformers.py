"""`Trainer`: the Trainer of Hugging Face's transformers, in a run whose workers join, leave and die.

    from farandole.integrations.transformers import Trainer

This import is the one line of a Trainer script that changes. Its loop stays theirs: clipping, optimizer, schedule,
callbacks, logging, evaluation and saving. What differs is what it iterates over:

1. The training dataloader yields one `Step` of the run for each update. `training_step` computes all micro-batches of
   this worker in it. The global batch is `per_device_train_batch_size * gradient_accumulation_steps` samples, whatever
   the number of workers, in micro-batches of `per_device_train_batch_size`.
2. A micro-batch counts by its target tokens, or by its samples if its labels are not tokens. So the loss and the
   gradient are means over the global batch.
3. A worker enters the run when its model, optimizer and schedule exist. It gets their state, that of the Trainer and
   that of the callbacks. Then it begins with the epoch and the step of the others.
4. One worker writes each checkpoint of the Trainer. All workers share an evaluation of the loss; one worker computes
   an evaluation that needs all predictions (`compute_metrics`), and the others get its metrics.

`Seq2SeqTrainer` is theirs with the same changes. `PRIVATE` lists the private methods and attributes of their class on
which this depends.
"""

# ruff: noqa: ARG002  their methods have these parameters

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial, reduce
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import farandole
from farandole import joining
from farandole.data.loader import Loader
from farandole.errors import UsageError
from farandole.platform import extras
from farandole.platform.extras import how_to_install
from farandole.run import Run
from farandole.training.step import Step

# Their types are left out: a type checker takes minutes for them.
try:
    importlib.import_module("accelerate")
    transformers: Any = importlib.import_module("transformers")
    trainer_callback: Any = importlib.import_module("transformers.trainer_callback")
    utilities: Any = importlib.import_module("transformers.trainer_utils")
except ImportError as error:
    raise UsageError(
        f"farandole.integrations.transformers needs the packages transformers and accelerate ({error}): "
        f"{how_to_install('transformers')}"
    ) from error

_TheirTrainer: Any = transformers.Trainer
_TheirCallback: Any = trainer_callback.TrainerCallback
SUPPORTED = ((5, 20), (5, 24))  # the oldest and the newest version with which the tests pass
PRIVATE: Mapping[str, tuple[str, ...]] = {  # private methods of theirs that are overridden or called
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
    "_get_output_dir": ("self", "trial"),
    "_init_training_state": (
        "self", "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial",
    ),
    "_prepare_for_training": ("self", "max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_prepare_inputs": ("self", "inputs"),
    "_save_checkpoint": ("self", "model", "trial"),
}  # fmt: skip
# Private attributes of theirs: the steps of the last line and of the beginning, and sums of losses.
PRIVATE_ATTRIBUTES = (
    "_globalstep_last_logged", "_initial_global_step", "_loss_shifts_labels", "_total_loss_scalar", "_tr_loss",
)  # fmt: skip

_RUN = "the run decides it"
_REPLICA = "each worker holds a whole replica of the model"
_EXCHANGE = "there is no DistributedDataParallel: the run exchanges the gradients"
_BATCHES = "the batch of all workers is per_device_train_batch_size * gradient_accumulation_steps samples"
_FULL = "the evaluated model is the trained one, in its precision: bf16=True computes both in bf16"
# Options that contradict the run, the values that they may have, and what to do instead. None: any value that is false.
REFUSED: Mapping[str, tuple[tuple[Any, ...] | None, str]] = {
    "accelerator_config.dispatch_batches": (None, _BATCHES),
    "accelerator_config.gradient_accumulation_kwargs": (None, _BATCHES),
    "accelerator_config.split_batches": (None, _BATCHES),
    "auto_find_batch_size": (None, "the batch is the same for all workers: set per_device_train_batch_size"),
    "average_tokens_across_devices": ((True,), "tokens are counted over all workers, whatever their number"),
    "batch_eval_metrics": (None, "one worker computes the metrics from all predictions"),
    "bf16_full_eval": (None, _FULL),
    "data_seed": (None, "the order of the samples comes from the run's seed: farandole run --seed N"),
    "dataloader_in_order": ((True,), "the order of the samples is part of the result"),
    "ddp_backend": (None, _EXCHANGE),
    "ddp_broadcast_buffers": (None, _EXCHANGE),
    "ddp_bucket_cap_mb": (None, _EXCHANGE),
    "ddp_find_unused_parameters": (None, _EXCHANGE),
    "ddp_static_graph": (None, _EXCHANGE),
    "ddp_timeout": ((1800,), _EXCHANGE),
    "deepspeed": (None, _REPLICA),
    "enable_jit_checkpoint": (None, "the run handles SIGTERM: the worker leaves without loss"),
    "eval_on_start": (None, "workers join later, and would evaluate at another step: call trainer.evaluate()"),
    "fp16_full_eval": (None, _FULL),
    "fsdp": (None, _REPLICA),
    "full_determinism": (None, f"{_RUN}: farandole run --bits same, which is the default"),
    "include_num_input_tokens_seen": (("no", False), "tokens are not counted over the workers"),
    "local_rank": ((-1, 0), "a worker has one device: start the script by farandole run, which gives one to each"),
    "neftune_noise_alpha": (None, "its hook is not part of the run's state"),
    "parallelism_config": (None, _REPLICA),
    "push_to_hub": (None, "push the model after the training, from one worker"),
    "save_on_each_node": (None, "one worker writes a checkpoint: output_dir must be on a file system that all share"),
    "torch_empty_cache_steps": (None, "micro-batches of a step differ between the workers"),
    "train_sampling_strategy": (
        ("random", "sequential", "group_by_length"),
        "it makes batches for one process: use group_by_length",
    ),
}
_OPTIMIZERS = {  # patterns of optimizers that can't be used, and why
    "*lomo": "it updates during the backward pass, before the gradients of the other workers are there",
    "*_layerwise": "it updates during the backward pass, before the gradients of the other workers are there",
    "schedule_free_*": "it evaluates with other weights than those that it trains",
}
# Fields of their state that the training changes. The others come from the arguments, which each worker has.
_TRAVELS = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
_TIMES = ("_runtime", "_per_second", "_preparation_time")  # ends of the names of measured times


def _measured(name: str) -> bool:
    """Return True for the name of a value that differs on each worker: a time, or memory."""
    return name.endswith(_TIMES) or "_mem_" in name


def _weighted(loss: torch.Tensor, samples: int) -> tuple[torch.Tensor, int]:
    return loss, samples


def _collated(collate: Callable[[list[Any]], Any], batches: list[list[Any]]) -> tuple[Any, int]:
    """Return the one batch of samples, collated, and its number of samples."""
    (samples,) = batches
    return collate(samples), len(samples)


def _output(metrics: dict[str, float], samples: int) -> Any:
    """Return what their evaluation loop returns, without predictions."""
    return utilities.EvalLoopOutput(None, None, metrics, samples)


def check_version(version: str) -> None:
    """Raise UsageError if this version of transformers is not supported."""
    extras.check_version("transformers", version, *SUPPORTED)


def check_arguments(args: Any, seed: int) -> None:
    """Raise UsageError if an option of `args` contradicts the run. `seed`: the run's."""
    for name, (allowed, remedy) in REFUSED.items():
        value = reduce(lambda owner, attribute: getattr(owner, attribute, None), name.split("."), args)
        if (value and allowed is None) or (allowed is not None and value is not None and value not in allowed):
            raise UsageError(f"TrainingArguments({name}={value!r}) in a run of farandole: {remedy}; remove {name}")
    default = type(args).__dataclass_fields__["seed"].default
    if args.seed not in (default, seed):
        raise UsageError(
            f"TrainingArguments(seed={args.seed}): the run's seed is {seed}, for the order of the samples and for "
            f"dropout: farandole run --seed {args.seed}, or remove seed"
        )
    if _measured(str(args.metric_for_best_model or "")):
        raise UsageError(
            f"TrainingArguments(metric_for_best_model={args.metric_for_best_model!r}): a measured value differs on "
            f"each worker; choose a metric of the predictions"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    for pattern, reason in _OPTIMIZERS.items():
        if fnmatch(optimizer, pattern):
            raise UsageError(f"TrainingArguments(optim={optimizer!r}) in a run of farandole: {reason}; use adamw_torch")
    if args.fp16 and args.device.type == "cpu":
        raise UsageError("TrainingArguments(fp16=True) on a CPU, where Accelerate ignores it: use bf16=True")


class _Steps:
    """The training dataloader: yields the steps of the run, epoch by epoch."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self.steps: Iterator[Step] = iter(())
        self.step: Step | None = None  # the current one
        self.waiting = False  # True if `step` has begun and was not yielded

    def __len__(self) -> int:
        return len(self.loader)

    def enter(self, run: Run, max_steps: int) -> Step:
        """Enter the run, and return its current step."""
        self.steps = run.steps(self.loader, base_steps=max_steps)
        self.step, self.waiting = next(self.steps), True
        return self.step

    def __iter__(self) -> Iterator[Step]:
        while True:
            if not self.waiting:
                self.step = next(self.steps, None)
            self.waiting = False
            if self.step is None:
                return
            yield self.step
            if self.step.ends_epoch:
                return


class _Batches(Dataset[list[Any]]):
    """An evaluation dataset as the batches of their dataloader: a loss is the mean over the same samples as theirs."""

    def __init__(self, dataset: Any, batches: Sequence[Sequence[int]]) -> None:
        self.dataset, self.batches = dataset, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)
        indices = list(self.batches[index])
        return [self.dataset[index] for index in indices] if several is None else several(indices)


class _Position:
    """What travels to joiners and into checkpoints beside model, optimizer and schedule, as JSON text."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        state = {name: getattr(trainer.state, name) for name in _TRAVELS}
        state["log_history"] = [
            {name: value for name, value in line.items() if not _measured(name)} for line in state["log_history"]
        ]
        if state["best_model_checkpoint"]:  # its name alone: the fingerprint must not depend on the folder
            state["best_model_checkpoint"] = os.path.basename(state["best_model_checkpoint"])
        callbacks = [
            [type(callback).__name__, callback.state()["attributes"]]
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, trainer_callback.ExportableState)
        ]
        return {"json": json.dumps([state, callbacks, trainer.sums()], sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self.trainer
        fields, callbacks, trainer.received = json.loads(state["json"])
        if fields["best_model_checkpoint"]:
            folder = trainer.args.output_dir or ""
            fields["best_model_checkpoint"] = os.path.join(folder, fields["best_model_checkpoint"])
        for name in _TRAVELS:
            setattr(trainer.state, name, fields[name])
        mine = [c for c in trainer.callback_handler.callbacks if isinstance(c, trainer_callback.ExportableState)]
        for callback, (name, attributes) in zip(mine, callbacks, strict=True):
            if type(callback).__name__ != name:
                raise UsageError(
                    f"callback {type(callback).__name__}: the run has {name} there; pass the same callbacks"
                )
            for attribute, value in attributes.items():
                setattr(callback, attribute, value)


class _Follow(_TheirCallback):
    """Keeps what their loop derives from its own count of steps equal to the run's. The first of the callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.apply_received()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        leads = self.trainer.run.is_leader
        if leads and not state.is_world_process_zero:  # the leader has died: this worker shows the progress from now on
            state.is_world_process_zero = state.is_local_process_zero = True
            for callback in self.trainer.callback_handler.callbacks:
                if isinstance(callback, trainer_callback.ProgressCallback):
                    callback.on_train_begin(args, state, control, **more)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = self.trainer.steps
        assert steps is not None
        state.epoch = state.global_step / len(steps)  # their count begins with the first step of this worker


class Trainer(_TheirTrainer):
    """`transformers.Trainer` in a run of farandole. The arguments are the same.

    `per_device_train_batch_size` is the number of samples of a micro-batch, and
    `per_device_train_batch_size * gradient_accumulation_steps` that of the batch of all workers together.

    Raises:
        UsageError: the version of transformers is not supported, or an option contradicts the run.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **options: Any) -> None:
        check_version(transformers.__version__)
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.run = joining.current() or farandole.join()
        check_arguments(args, self.run._seed)  # pyright: ignore[reportPrivateUsage]
        if args.world_size != 1 or args.n_gpu > 1:
            raise UsageError(
                f"TrainingArguments with {args.world_size} processes and {args.n_gpu} GPUs: a worker has one device; "
                f"start the script by farandole run, which gives one to each"
            )
        if torch.device(args.device).type != self.run.device.type:
            raise UsageError(f"TrainingArguments has device {args.device}, and the run {self.run.device}: set use_cpu")
        self.accumulated = args.gradient_accumulation_steps
        args = copy.copy(args)
        args.gradient_accumulation_steps = 1  # one item of the training dataloader is one update
        self.steps: _Steps | None = None
        self.received: dict[str, Any] | None = None  # sums that another worker or a checkpoint has sent
        self._prepared: Any = None
        self._resumes: Any = None  # the checkpoint of the Trainer that the script names
        self._writing = False
        super().__init__(model, args, *positional, **options)
        if getattr(self.data_collator, "seed", None) is not None:
            raise UsageError(
                f"{type(self.data_collator).__name__}(seed={self.data_collator.seed!r}): it keeps a generator, which "
                f"differs on each worker; leave out seed: the run seeds torch's generator for each micro-batch"
            )
        self.callback_handler.callbacks.insert(0, _Follow(self))

    # --- data and position ------------------------------------------------------------------------------------

    def get_total_train_batch_size(self, args: Any) -> int:
        """The number of samples of an update, over all workers."""
        return args.per_device_train_batch_size * self.accumulated

    def get_train_dataloader(self) -> Any:
        """The steps of the run, over the dataset and the collator of their dataloader."""
        if isinstance(self.train_dataset, IterableDataset) or not hasattr(self.train_dataset, "__getitem__"):
            raise UsageError(
                f"train_dataset={type(self.train_dataset).__name__} has no samples by index, so no worker can take "
                f"over another's; pass a map-style dataset, with __len__ and __getitem__"
            )
        if self.steps is not None:
            raise UsageError("trainer.train was called before; a run has one training: set num_train_epochs")
        theirs, args = super().get_train_dataloader(), self.args
        sampler = theirs.batch_sampler.sampler
        if isinstance(sampler, RandomSampler) and not sampler.replacement:
            sampler = RandomSampler(theirs.dataset)  # theirs is drawn with a seed of its own
        micro = args.per_device_train_batch_size
        loader = DataLoader(
            theirs.dataset, micro * self.accumulated, sampler=sampler, collate_fn=theirs.collate_fn,
            drop_last=args.dataloader_drop_last, **self._processes(),
        )  # fmt: skip
        self.steps = _Steps(self.run.loader(loader, micro=micro))
        return self.steps

    def _processes(self) -> dict[str, Any]:
        """The options of a loader's processes."""
        args = self.args
        if not args.dataloader_num_workers:
            return {}
        return {
            "num_workers": args.dataloader_num_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
        }

    def train(self, resume_from_checkpoint: Any = None, *positional: Any, **options: Any) -> Any:
        """Train, as theirs. A run goes on from its own checkpoints.

        So `resume_from_checkpoint` is ignored by a worker that joins, and in a run that goes on. It is refused in a
        run that begins.
        """
        self._resumes = resume_from_checkpoint
        return super().train(None, *positional, **options)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:  # fmt: skip
        if trial is not None:
            raise UsageError("trainer.hyperparameter_search in a run: start a run for each trial")
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        steps = self.steps
        if steps is None:
            raise UsageError(
                f"{type(self).__name__}.get_train_dataloader does not return what Trainer.get_train_dataloader does: a "
                f"run makes the batches; override _get_train_sampler or pass data_collator instead"
            )
        self._prepared = super()._prepare_for_training(max_steps, steps, resume_from_checkpoint)
        replicated: dict[str, Any] = {
            "model": self.model,
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
        }
        if self.accelerator.scaler is not None:
            replicated["scaler"] = self.accelerator.scaler
        self.run.replicate(**replicated, schedule=self.lr_scheduler, trainer=_Position(self))
        step = steps.enter(self.run, max_steps)
        if self._resumes and step.number == 0:
            raise UsageError(
                f"trainer.train(resume_from_checkpoint={self._resumes!r}) in a run that begins: a run goes on from its "
                f"own checkpoints: farandole run --folder runs/NAME; to train on with these weights, load them as the "
                f"model, and choose another output_dir"
            )
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.run.is_leader
        return step.epoch, 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        return self._prepared  # done in `_init_training_state`: the epoch to begin with comes with the state

    def sums(self) -> dict[str, Any]:
        """Sums that their loop keeps in attributes, as numbers."""
        if self.received is not None:  # not applied yet: their loop sets the attributes when it begins
            return self.received
        loss = getattr(self, "_tr_loss", None)
        return {
            "tr_loss": 0.0 if loss is None else float(loss),
            "total_loss": getattr(self, "_total_loss_scalar", 0.0),
            "last_logged": getattr(self, "_globalstep_last_logged", 0),
            "flos": self.current_flos,
        }

    def apply_received(self) -> None:
        """Put the sums of another worker in place of those with which their loop begins."""
        if self.received is None:
            return
        self._tr_loss = torch.tensor(self.received["tr_loss"], device=self.args.device)
        self._total_loss_scalar = self.received["total_loss"]
        self._globalstep_last_logged = self.received["last_logged"]
        self.current_flos = self.received["flos"]
        self._initial_global_step = 0  # the mean loss of the run is over all of its steps
        self.received = None

    # --- one update -------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The next step of the run, in a list. Tokens are counted for each micro-batch, in `training_step`."""
        step = next(epoch_iterator, None)
        return ([] if step is None else [step]), None

    def loss_weight(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The number of target tokens of a micro-batch, over which its loss is the mean; None: it is over samples.

        Override it if your loss is a mean over other units.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        if self._loss_shifts_labels and "shift_labels" not in inputs:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute this worker's micro-batches of the step `inputs`. Returns the mean loss over the global batch."""
        step: Step = inputs
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        for batch in step:
            batch = self._prepare_inputs(batch)
            weight = self.loss_weight(batch)
            step.sum(flos=super().floating_point_ops(batch))
            counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
            with self.compute_loss_context_manager():
                loss: Any = self.compute_loss(model, batch, num_items_in_batch=weight if counts else None)
            step.backward(loss, weight=weight, scaler=self.accelerator.scaler)
        return torch.tensor(step.loss, device=self.args.device)

    def floating_point_ops(self, inputs: Any) -> int:
        """The number of floating-point operations of a step, over all workers."""
        return int(inputs.sums["flos"]) if isinstance(inputs, Step) else super().floating_point_ops(inputs)

    # --- evaluation and saving --------------------------------------------------------------------------------

    @property
    def _entered(self) -> bool:
        return self.steps is not None and self.steps.step is not None

    @property
    def _shared(self) -> bool:
        """True while all workers are at the same place and may share work."""
        return self._entered and not self._writing

    def is_world_process_zero(self) -> bool:
        """True on one worker, that of rank 0. Before `train` it is true on each: nothing is known of the others."""
        return self.run.is_leader if self._entered else super().is_world_process_zero()

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """The loss by all workers together; with `compute_metrics`, the metrics by one worker for all."""
        theirs = partial(
            super().evaluation_loop, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if not self._shared or description == "Prediction":
            return theirs()
        if self.compute_metrics is None and not isinstance(dataloader.dataset, IterableDataset):
            batches = _Batches(dataloader.dataset, list(dataloader.batch_sampler))
            model: Any = self.model
            loss = self.run.evaluate(
                model, batches, _weighted, predict=self._predict_loss, micro=1,
                collate_fn=partial(_collated, dataloader.collate_fn), **self._processes(),
            )  # fmt: skip
            return _output({f"{metric_key_prefix}_loss": loss}, len(dataloader.dataset))
        with self.run.once() as mine:
            if mine:
                output = theirs()
                mine.result = {"metrics": output.metrics, "samples": output.num_samples}
        return _output(mine.result["metrics"], mine.result["samples"])

    def _predict_loss(self, model: Any, batch: tuple[Any, int]) -> tuple[torch.Tensor, int]:
        """Return a batch's mean loss and its number of samples; 0 samples if their loop leaves out such a loss."""
        inputs, samples = batch
        loss, _, _ = self.prediction_step(model, inputs, True)
        if loss is None:
            raise UsageError("trainer.evaluate: the model gives no loss for this eval_dataset; it needs labels")
        counts = bool(loss.isfinite()) or not self.args.logging_nan_inf_filter
        return (loss.float(), samples) if counts else (torch.zeros_like(loss), 0)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        best = self.state.best_model_checkpoint
        if self.args.save_total_limit == 1 and best is not None:
            with self.run.once() as mine:  # in theirs each worker would remove the same folders
                if mine:
                    for folder in utilities.sort_checkpoints(output_dir=self._get_output_dir(trial)):
                        if not os.path.samefile(folder, best):
                            shutil.rmtree(folder, ignore_errors=True)
        total = self._total_loss_scalar
        output = super()._finalize_training(trial, num_train_samples, start_time)
        self._total_loss_scalar = total  # without the losses since the last line, which a run that goes on adds again
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.run.once() as mine:
            if mine:
                self._writing = True
                try:
                    super()._save_checkpoint(model, trial)
                finally:
                    self._writing = False
                mine.result = self.state.best_model_checkpoint
        self.state.best_model_checkpoint = mine.result
        self.store_flos()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, by one worker."""
        if not self._shared:
            return super().save_model(output_dir, _internal_call)
        with self.run.once() as mine:
            if mine:
                super().save_model(output_dir, _internal_call)


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` in a run of farandole."""
