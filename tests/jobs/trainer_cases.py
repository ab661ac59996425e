"""The Trainer of transformers with options of many kinds, on small models that are built from a configuration.

    python trainer_cases.py OUT CASE [--theirs] [--resume] [--strike FOLDER] [--pace FILE] [--dropout P]
        [--arguments JSON]

OUT is the folder of the Trainer, of result.json (the lines of its history, then what an evaluation after the training
gives) and of fingerprint. `--theirs` takes the Trainer of transformers, with one micro-batch a step: the losses of most
models are sums over accumulated micro-batches there. `--resume` passes resume_from_checkpoint=True. `--strike FOLDER`:
the first worker that is within an evaluation dies, and the first that is within the saving of a checkpoint. While
--pace FILE is there, a micro-batch takes 0.1 s more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # theirs runs it as a script, from any folder

from tests.support.vision_operators import declare

declare()

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

TRAINED, EVALUATED, MICRO, ACCUMULATED, EPOCHS = 42, 13, 4, 3, 3
Case = tuple[str, dict[str, Any], dict[str, Any]]  # model, arguments of TrainingArguments, and of the Trainer


def texts(count: int, seed: int) -> datasets.Dataset:
    """Texts of 4 to 12 tokens. The label is 1 if most tokens are even."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count,), generator=drawn).tolist()
    tokens = [torch.randint(2, 32, (length,), generator=drawn) for length in lengths]
    return datasets.Dataset.from_dict(
        {
            "name": [f"text {number}" for number in range(count)],
            "input_ids": [each.tolist() for each in tokens],
            "label": [int((each % 2 == 0).float().mean() > 0.5) for each in tokens],
            "length": lengths,
        }
    )


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class Collate:
    """Pads texts, and makes the labels of a model: classes, scores, masked tokens, or the text backwards."""

    def __init__(self, model: str, before: Callable[[], None]) -> None:
        self.model, self.before = model, before

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.before()
        rows = [list(sample["input_ids"]) for sample in samples]
        inputs, mask = padded(rows, 0), padded([[1] * len(row) for row in rows], 0)
        if self.model in ("classes", "adapted"):
            labels = torch.tensor([sample["label"] for sample in samples])
        elif self.model == "scores":
            labels = torch.tensor([float(sample["label"]) for sample in samples])
        elif self.model == "backwards":
            labels = padded([row[::-1] for row in rows], -100)
        else:  # each third token, or others each time
            hidden = inputs % 3 == 0 if self.model == "tokens" else torch.rand(inputs.shape) < 0.3
            hidden &= mask == 1
            labels = inputs.masked_fill(~hidden, -100)
            inputs = inputs.masked_fill(hidden, 1)
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def model_of(name: str, dropout: float) -> Any:
    if name == "backwards":
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=dropout,
                decoder_start_token_id=0,
            )
        )  # fmt: skip
    bert = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        num_labels=1 if name == "scores" else 2,
    )  # fmt: skip
    if name == "adapted":
        import peft

        lora = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
        return peft.get_peft_model(BertForSequenceClassification(bert), lora)
    return (BertForSequenceClassification if name in ("classes", "scores") else BertForMaskedLM)(bert)


def metrics_of(prediction: Any) -> dict[str, Any]:
    """Accuracy, and numbers that show that each sample counts once and in its order."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    if logits.shape[1:] != labels.shape[1:] and logits.ndim > labels.ndim:
        logits = logits.argmax(-1)
    width = min(logits.shape[-1], labels.shape[-1])
    known = labels[..., :width] != -100
    places = (labels.reshape(len(labels), -1).sum(1) * range(len(labels))).sum()
    return {
        "accuracy": float((logits[..., :width] == labels[..., :width])[known].mean()), "rows": len(labels),
        "places": float(places), "inputs": 0 if prediction.inputs is None else len(prediction.inputs),
    }  # fmt: skip


def classes_of(logits: Any, labels: Any) -> torch.Tensor:
    del labels
    return logits.argmax(-1)


METRICS: dict[str, Any] = {"compute_metrics": metrics_of}
EACH: dict[str, Any] = {"eval_strategy": "epoch"}
BEST: dict[str, Any] = {
    **EACH, "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
    "greater_is_better": True,
}  # fmt: skip
RECOMPUTE = "activation_checkpointing"  # in earlier versions: gradient_checkpointing
if RECOMPUTE not in transformers.TrainingArguments.__dataclass_fields__:
    RECOMPUTE = "gradient_checkpointing"


def cases() -> dict[str, Case]:
    return {
        "plain": ("classes", EACH, {}),
        "scores": ("scores", EACH, {}),
        "drawn": ("drawn", EACH, METRICS),
        "drawn_loss": ("drawn", EACH, {}),
        "metrics": ("tokens", EACH, METRICS),
        "preprocessed": ("tokens", EACH, {**METRICS, "preprocess_logits_for_metrics": classes_of}),
        "inputs": ("classes", {**EACH, "include_for_metrics": ["inputs", "loss"]}, METRICS),
        "parts": ("tokens", {**EACH, "eval_accumulation_steps": 1}, METRICS),
        "loss_only": ("classes", {**EACH, "prediction_loss_only": True}, METRICS),
        "bf16": ("tokens", {**EACH, "bf16": True}, METRICS),
        "smoothing": ("tokens", {**EACH, "label_smoothing_factor": 0.1}, {}),
        "processes": ("classes", {**EACH, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 3}, {}),
        "columns": ("classes", {**EACH, "remove_unused_columns": True}, {}),
        "grouped": ("tokens", {**EACH, "train_sampling_strategy": "group_by_length"}, {}),
        "random": ("tokens", {**EACH, "train_sampling_strategy": "random"}, {}),
        "several": (
            "classes", {**BEST, "metric_for_best_model": "eval_b_accuracy"},
            {**METRICS, "eval_dataset": {"a": texts(13, 5), "b": texts(9, 6)}},
        ),
        "best": ("classes", {**BEST, "save_strategy": "best", "save_total_limit": 1}, METRICS),
        "limit": ("classes", {**BEST, "metric_for_best_model": "loss", "save_total_limit": 1}, METRICS),
        "stopping": ("classes", {**BEST, "num_train_epochs": 12}, {**METRICS, "callbacks": [EarlyStoppingCallback(2)]}),
        "clipped": ("classes", {"max_grad_norm": 0.05}, {}),
        "not_clipped": ("classes", {"max_grad_norm": 0.0}, {}),
        "cosine": ("classes", {"lr_scheduler_type": "cosine", "warmup_steps": 0.2}, {}),
        "min_lr": ("classes", {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}, {}),
        "plateau": (
            "classes", {**EACH, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
                        "metric_for_best_model": "accuracy"}, METRICS,
        ),
        "greedy": ("classes", {**EACH, "lr_scheduler_type": "greedy", "metric_for_best_model": "loss"}, {}),
        "steps": (
            "classes", {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6,
                        "logging_steps": 2, "logging_first_step": True, "save_total_limit": 1}, METRICS,
        ),
        "ratios": (
            "classes", {"eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5,
                        "logging_steps": 0.2, "eval_delay": 4}, {},
        ),
        "max_steps": ("classes", {**EACH, "max_steps": 7, "logging_strategy": "epoch"}, {}),
        "half_epoch": ("classes", {**EACH, "num_train_epochs": 1.5}, {}),
        "tensorboard": ("classes", {**EACH, "report_to": ["tensorboard"]}, {}),
        "compiled": ("classes", {**EACH, "torch_compile": True, "torch_compile_backend": "aot_eager"}, METRICS),
        "recomputed": ("classes", {**EACH, RECOMPUTE: True}, {}),
        "adafactor": ("classes", {**EACH, "optim": "adafactor"}, {}),
        "sgd": ("classes", {"optim": "sgd"}, {}),
        "memory": ("classes", {**EACH, "skip_memory_metrics": False}, METRICS),
        "drop_last": ("classes", {**EACH, "dataloader_drop_last": True}, {}),
        "adapters": ("adapted", {**BEST, "label_names": ["labels"]}, METRICS),
        "backwards": ("backwards", EACH, {}),
        "generated": ("backwards", {**EACH, "predict_with_generate": True, "generation_max_length": 8}, METRICS),
    }  # fmt: skip


class Strikes:
    """Ends its process at the first of each moment, once in a run. `save_pretrained` is called within a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, moment: str) -> None:
        try:
            (self.folder / moment).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def save_pretrained(self, folder: str) -> None:
        del folder
        self.at("saving")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("case")
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--strike", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--arguments", type=json.loads, default={})
    args = parser.parse_args(arguments)
    source: Any = transformers
    if not args.theirs:
        from farandole.integrations import transformers as source
    model, training, options = cases()[args.case]
    strikes = Strikes(args.strike) if args.strike else None

    def before() -> None:
        if args.pace is not None and args.pace.exists():
            time.sleep(0.1)
        if strikes and not torch.is_grad_enabled():
            strikes.at("evaluation")

    def struck(prediction: Any) -> dict[str, Any]:
        if strikes:
            strikes.at("metrics")
        return metrics_of(prediction)

    if "compute_metrics" in options:
        options = {**options, "compute_metrics": struck}
    pairs = model == "backwards"
    micro, accumulated = (MICRO * ACCUMULATED, 1) if args.theirs else (MICRO, ACCUMULATED)
    settings = {
        "output_dir": str(args.out), "per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulated,
        "per_device_eval_batch_size": 4, "num_train_epochs": EPOCHS, "learning_rate": 1e-2, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "train_sampling_strategy": "sequential", "save_strategy": "no",
        "disable_tqdm": True, "remove_unused_columns": False, **training, **args.arguments,
    }  # fmt: skip
    set_seed(42)
    trainer = (source.Seq2SeqTrainer if pairs else source.Trainer)(
        model=model_of(model, args.dropout),
        args=(transformers.Seq2SeqTrainingArguments if pairs else transformers.TrainingArguments)(**settings),
        data_collator=Collate(model, before), train_dataset=texts(TRAINED, 3), processing_class=strikes,
        **{"eval_dataset": texts(EVALUATED, 4), **options},
    )  # fmt: skip
    output = trainer.train(resume_from_checkpoint=args.resume)
    after = trainer.evaluate()
    if trainer.is_world_process_zero():
        lines = [*trainer.state.log_history, {**after, "mean": output.training_loss, "steps": output.global_step}]
        (args.out / "result.json").write_text(json.dumps(lines))
        if not args.theirs:
            (args.out / "fingerprint").write_text(trainer.run.fingerprint())
            print("\nfingerprint", trainer.run.fingerprint())


if __name__ == "__main__":
    main()
