"""A Trainer of Lightning on a regression: an MLP with batch normalization and dropout, in 12 samples a step.

    python lightning_regression.py OUT [--theirs] [--plain] [--epochs N] [--pace FILE] [--interrupted N]

OUT is the folder of the Trainer, of values.json and of fingerprint. `--theirs` takes the strategy of Lightning;
`--plain` leaves out dropout and normalization, so that both have the same losses. While --pace FILE is there, a sample
takes 0.1 s more. `--interrupted N`: an error ends the script after N steps.
"""

# ruff: noqa: ARG002  their methods have these parameters

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))  # theirs runs it as a script, from any folder

from tests.support.vision_operators import declare

declare()

from lightning import LightningModule, Trainer, seed_everything  # noqa: E402
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

SAMPLES, BATCH, MICRO, EPOCHS = 48, 12, 3, 40


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of 8 numbers, and a number that depends on them."""

    def __init__(self, count: int, pace: Path | None = None) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        self.y = self.x.pow(2).sum(1, keepdim=True).sqrt()
        self.pace = pace

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pace is not None and self.pace.exists():
            time.sleep(0.1)
        return self.x[index], self.y[index]


class Regression(LightningModule):
    """An MLP of two layers."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        between = [] if plain else [nn.BatchNorm1d(16), nn.Dropout(0.2)]
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *between, nn.Linear(16, 1))
        self.epochs_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        error = self.model(x) - y
        loss = error.pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"largest": error.abs().max(), "highest": error.max()}, reduce_fx=torch.max, on_epoch=True)
        self.log("least", error.abs().min(), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", (self.model(x) - y).pow(2).mean())

    def on_train_epoch_start(self) -> None:
        self.epochs_seen += 1
        self.log("epochs_seen", float(self.epochs_seen))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm(), on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        every_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": every_step, "interval": "step"}}


class Interrupted(Exception):
    """What ends the script after `--interrupted` steps."""


class Recorder(Callback):
    """Keeps the values of each step and of each epoch."""

    def __init__(self, interrupted: int) -> None:
        self.interrupted = interrupted
        self.steps: list[Any] = []
        self.epochs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append([trainer.global_step, trainer.current_epoch, batch_idx, outputs["loss"].item()])
        if trainer.global_step == self.interrupted:
            raise Interrupted

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({name: value.item() for name, value in sorted(trainer.callback_metrics.items())})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.epochs = state_dict["steps"], state_dict["epochs"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--theirs", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--interrupted", type=int, default=-1)
    args = parser.parse_args(arguments)
    options: dict[str, Any] = {"logger": CSVLogger(args.out)}
    if not args.theirs:
        from farandole.integrations.lightning import FarandoleStrategy, Logger

        options = {"strategy": FarandoleStrategy(micro=MICRO), "logger": Logger()}
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(42, verbose=False)
    recorder = Recorder(args.interrupted)
    checkpoint = ModelCheckpoint(args.out / "best", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = Trainer(
        max_epochs=args.epochs, accelerator="cpu", devices=1, gradient_clip_val=1.0,
        log_every_n_steps=1,
        default_root_dir=args.out, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[recorder, checkpoint, EarlyStopping("val_loss", patience=30), LearningRateMonitor()], **options,
    )  # fmt: skip
    model = Regression(args.plain)
    trainer.fit(
        model, DataLoader(Points(SAMPLES, args.pace), batch_size=BATCH, shuffle=False),
        DataLoader(Points(12), batch_size=6),
    )  # fmt: skip
    if trainer.is_global_zero:
        (args.out / "values.json").write_text(json.dumps([recorder.steps, recorder.epochs]))
        if not args.theirs:
            (args.out / "fingerprint").write_text(trainer.strategy.run.fingerprint())


if __name__ == "__main__":
    main()
