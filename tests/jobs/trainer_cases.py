"""The Trainer of transformers with options of many kinds, on small models that are built from a configuration.

    python trainer_cases.py OUT CASE [--theirs] [--pace FILE]

OUT is the folder of the Trainer, of result.json (the lines of its history, and what the case adds) and of fingerprint.
`--theirs` takes the Trainer of transformers. While --pace FILE is there, a micro-batch takes 0.1 s more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # theirs runs it as a script, from any folder

from tests.support.vision_operators import declare

declare()

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


def texts(count: int, seed: int) -> datasets.Dataset:
    """Texts of 4 to 12 tokens. The label is whether most tokens are even."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 13, (count,), generator=drawn).tolist()
    tokens = [torch.randint(2, 32, (n,), generator=drawn) for n in lengths]
    return datasets.Dataset.from_dict(
        {
            "name": [f"text {i}" for i in range(count)],
            "input_ids": [each.tolist() for each in tokens],
            "label": [int((each % 2 == 0).float().mean() > 0.5) for each in tokens],
            "length": lengths,
        }
    )


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


class Collate:
    """Pads. `kind`: "classes", "tokens" (masked language model), "pairs" (the text backwards)."""

    def __init__(self, kind: str, pace: Path | None) -> None:
        self.kind, self.pace = kind, pace

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if self.pace is not None and self.pace.exists():
            time.sleep(0.1)
        ids = [list(sample["input_ids"]) for sample in samples]
        batch = {"input_ids": padded(ids, 0), "attention_mask": padded([[1] * len(row) for row in ids], 0)}
        if self.kind == "classes":
            batch["labels"] = torch.tensor([sample["label"] for sample in samples])
        elif self.kind == "scores":
            batch["labels"] = torch.tensor([float(sample["label"]) for sample in samples])
        elif self.kind == "pairs":
            batch["labels"] = padded([row[::-1] for row in ids], -100)
        else:
            labels = batch["input_ids"].clone()
            drawn = torch.rand(labels.shape) < 0.3 if self.kind == "drawn" else labels % 3 == 0
            batch["labels"] = labels.masked_fill(~drawn | (labels == 0), -100)
            batch["input_ids"] = batch["input_ids"].masked_fill(drawn & (labels != 0), 1)
        return batch


def model_of(kind: str, dropout: float) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    off: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "pairs":
        config = T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=dropout,
            decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)
    bert = BertConfig(**sizes, **off, intermediate_size=32, max_position_embeddings=16, num_labels=1 if kind == "scores" else 2)
    return (BertForSequenceClassification if kind in ("classes", "scores") else BertForMaskedLM)(bert)


def accuracy(prediction: Any) -> dict[str, Any]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    classes = logits if logits.ndim == labels.ndim else logits.argmax(-1)
    known = labels != -100
    return {"accuracy": float((classes == labels)[known].mean()), "rows": len(labels), "sum": float(labels[known].sum())}


def chosen(logits: Any, labels: Any) -> torch.Tensor:
    """Reduce logits to classes, before they are kept."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def case(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the kind of model, TrainingArguments and the Trainer's further arguments of a case."""
    evaluated: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 4}
    metrics: dict[str, Any] = {"compute_metrics": accuracy}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "plain": ("classes", evaluated, {}),
        "metrics": ("classes", evaluated, metrics),
        "metrics_tokens": ("tokens", evaluated, metrics),
        "preprocess": ("tokens", evaluated, {**metrics, "preprocess_logits_for_metrics": chosen}),
        "inputs_losses": ("classes", {**evaluated, "include_for_metrics": ["inputs", "loss"]}, metrics),
        "accumulation": ("tokens", {**evaluated, "eval_accumulation_steps": 1, "eval_do_concat_batches": True}, metrics),
        "bf16": ("tokens", {**evaluated, "bf16": True}, {}),
        "bf16_metrics": ("tokens", {**evaluated, "bf16": True}, metrics),
        "fp16": ("tokens", {**evaluated, "fp16": True}, {}),
        "smoothing": ("classes", {**evaluated, "label_smoothing_factor": 0.1}, {}),
        "smoothing_tokens": ("tokens", {**evaluated, "label_smoothing_factor": 0.1}, {}),
        "scores": ("scores", evaluated, {}),
        "processes": ("classes", {**evaluated, "dataloader_num_workers": 2, "dataloader_prefetch_factor": 2}, metrics),
        "dict": ("classes", {**evaluated, "metric_for_best_model": "eval_b_accuracy", "save_strategy": "epoch",
                             "load_best_model_at_end": True}, {**metrics, "eval_dataset": {"a": texts(13, 5), "b": texts(9, 6)}}),
        "best": ("classes", {**evaluated, "save_strategy": "best", "metric_for_best_model": "accuracy",
                             "load_best_model_at_end": True, "save_total_limit": 1}, metrics),
        "limit": ("classes", {**evaluated, "save_strategy": "epoch", "metric_for_best_model": "loss", "greater_is_better": True,
                             "load_best_model_at_end": True, "save_total_limit": 1}, metrics),
        "stopping": ("classes", {**evaluated, "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 12,
                                 "metric_for_best_model": "accuracy", "greater_is_better": True},
                     {**metrics, "callbacks": [EarlyStoppingCallback(2, 0.5)]}),
        "clip": ("classes", {**evaluated, "max_grad_norm": 0.05}, {}),
        "no_clip": ("classes", {**evaluated, "max_grad_norm": 0.0}, {}),
        "cosine": ("classes", {"lr_scheduler_type": "cosine", "warmup_steps": 0.2}, {}),
        "min_lr": ("classes", {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}, {}),
        "wsd": ("classes", {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 2, "lr_scheduler_kwargs": {"num_decay_steps": 3}}, {}),
        "plateau": ("classes", {**evaluated, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
                                "metric_for_best_model": "accuracy"}, metrics),
        "greedy": ("classes", {**evaluated, "lr_scheduler_type": "greedy", "metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0}}, {}),
        "steps": ("classes", {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 6, "logging_steps": 2,
                              "logging_first_step": True, "save_total_limit": 1}, metrics),
        "ratios": ("classes", {"eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.5, "logging_steps": 0.2,
                               "eval_delay": 4}, metrics),
        "max_steps": ("classes", {**evaluated, "max_steps": 7, "logging_strategy": "epoch"}, metrics),
        "part": ("classes", {**evaluated, "num_train_epochs": 1.5}, metrics),
        "tensorboard": ("classes", {**evaluated, "report_to": ["tensorboard"]}, metrics),
        "columns": ("classes", {**evaluated, "remove_unused_columns": True}, metrics),
        "compile": ("classes", {**evaluated, "torch_compile": True, "torch_compile_backend": "aot_eager"}, metrics),
        "checkpointing": ("classes", {**evaluated, "gradient_checkpointing": True}, metrics),
        "adafactor": ("classes", {**evaluated, "optim": "adafactor"}, {}),
        "sgd": ("classes", {**evaluated, "optim": "sgd"}, {}),
        "memory": ("classes", {**evaluated, "skip_memory_metrics": False}, metrics),
        "drop_last": ("classes", {**evaluated, "dataloader_drop_last": True}, metrics),
        "loss_only": ("classes", {**evaluated, "prediction_loss_only": True}, metrics),
        "generate": ("pairs", {**evaluated, "predict_with_generate": True, "generation_max_length": 8}, metrics),
        "pairs": ("pairs", evaluated, {}),
        "full_eval": ("classes", {**evaluated, "bf16_full_eval": True}, metrics),
    }  # fmt: skip
    return cases[name]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("case")
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--arguments", type=json.loads, default={})
    args = parser.parse_args(arguments)
    import transformers

    kind, training, options = case(args.case)
    source: Any = transformers
    if not args.theirs:
        from farandole.integrations import transformers as source
    several = kind == "pairs"
    trainer_type = source.Seq2SeqTrainer if several else source.Trainer
    set_seed(42)
    trainer = trainer_type(
        model=model_of(kind, args.dropout),
        args=(transformers.Seq2SeqTrainingArguments if several else transformers.TrainingArguments)(
            **{
                "output_dir": str(args.out), "per_device_train_batch_size": MICRO * (ACCUMULATED if args.theirs else 1),
                "gradient_accumulation_steps": 1 if args.theirs else ACCUMULATED, "num_train_epochs": EPOCHS, "learning_rate": 1e-2,
                "logging_steps": 1, "report_to": [], "use_cpu": True, "train_sampling_strategy": "sequential",
                "save_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, **training,
                **args.arguments,
            }
        ),
        data_collator=Collate(kind, args.pace), train_dataset=texts(TRAINED, 3),
        **{"eval_dataset": texts(EVALUATED, 4), **options},
    )  # fmt: skip
    output = trainer.train()
    after = trainer.evaluate()
    if args.theirs or trainer.run.is_leader:
        lines = [*trainer.state.log_history, {"after": True, **after}, {"steps": output.global_step, "mean": output.training_loss}]
        (args.out / "result.json").write_text(json.dumps(lines))
    if not args.theirs and trainer.run.is_leader:
        (args.out / "fingerprint").write_text(trainer.run.fingerprint())


if __name__ == "__main__":
    main()
