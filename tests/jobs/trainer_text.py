"""A Trainer of transformers on short texts: GPT-2 of two layers, without dropout.

    python trainer_text.py OUT [--theirs] [--epochs N] [--pace FILE]

OUT is the folder of the Trainer, of losses.json and of fingerprint. `--theirs` takes the Trainer of transformers.
While --pace FILE is there, a micro-batch takes 0.1 s more.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # theirs runs it as a script, from any folder

from tests.support.vision_operators import declare

declare()

from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    set_seed,
)

TEXTS, EPOCHS, MICRO, ACCUMULATED = 48, 40, 4, 3


class Texts(Dataset[list[int]]):
    """Texts of 8 to 32 tokens, each 3 more than the one before it."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(3)
        lengths = torch.randint(8, 33, (count,), generator=drawn).tolist()
        starts = torch.randint(0, 64, (count,), generator=drawn).tolist()
        self.texts = [[(start + 3 * i) % 64 for i in range(n)] for start, n in zip(starts, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        return self.texts[index]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args(arguments)
    if args.theirs:
        from transformers import Trainer
    else:
        from farandole.integrations.transformers import Trainer

    def collate(texts: list[list[int]]) -> dict[str, torch.Tensor]:
        if args.pace is not None and args.pace.exists():
            time.sleep(0.1)
        width = max(map(len, texts))
        return {
            "input_ids": torch.tensor([text + [0] * (width - len(text)) for text in texts]),
            "labels": torch.tensor([text + [-100] * (width - len(text)) for text in texts]),
        }

    set_seed(42)
    off: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, **off))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out), per_device_train_batch_size=MICRO, gradient_accumulation_steps=ACCUMULATED,
            num_train_epochs=args.epochs, learning_rate=3e-3, warmup_steps=5, logging_steps=1, report_to=[],
            use_cpu=True,
            remove_unused_columns=False, train_sampling_strategy="sequential", eval_strategy="epoch",
            per_device_eval_batch_size=4, save_strategy="epoch", save_total_limit=2, load_best_model_at_end=True,
            disable_tqdm=True,
        ),
        data_collator=collate, train_dataset=Texts(TEXTS), eval_dataset=Texts(12),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
    )  # fmt: skip
    trainer.train()
    if args.theirs or trainer.run.is_leader:
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
        (args.out / "losses.json").write_text(json.dumps([losses, evaluated]))
    if not args.theirs and trainer.run.is_leader:
        (args.out / "fingerprint").write_text(trainer.run.fingerprint())


if __name__ == "__main__":
    main()
