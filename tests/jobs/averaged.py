"""A moving average of the model, adapters, or activation checkpointing; the best state is saved.

    python averaged.py KIND OUT [--pace FILE] [--die FILE]      OUT: the fingerprint; OUT.best: the best state

KIND: `ema`, torch's AveragedModel beside the model; `lora`, adapters that are trained while the rest is frozen, and
`peft`, those of peft with dropout; `checkpointing`, blocks with dropout that are computed again in the backward pass.
While --pace FILE is there, every micro-batch takes as many seconds more as it says. With --die, a worker that saves
while there are three of them kills itself before its file is complete. FILE is made then, and no other worker kills
itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import farandole

sys.path.append(str(Path(__file__).parents[2]))  # for a run that starts it as a script

from tests.support.vision_operators import declare

KINDS = ("ema", "lora", "peft", "checkpointing")
ROWS, WIDTH = 60, 8
EPOCHS, BATCH, MICRO = 30, 12, 2
STEPS = EPOCHS * ROWS // BATCH


class Adapted(nn.Module):
    """A frozen layer, and the product of two small matrices that is added to it."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, frozen.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(inputs) + inputs @ self.down.T @ self.up.T


class Block(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.again:
            return inputs + self.inner(inputs)
        return inputs + checkpoint(self.inner, inputs, use_reentrant=False)


def die_while_saving(run: farandole.Run, once: Path) -> None:
    """Have this process kill itself when it has written half of a file, if it is the one."""
    save = torch.save

    def begin_and_die(content: Any, file: Any, *arguments: Any) -> None:
        save(content, file, *arguments)
        if "best" in str(getattr(file, "name", "")) and run.view.size == 3:
            try:
                once.touch(exist_ok=False)
            except FileExistsError:
                return
            file.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = begin_and_die


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--die", type=Path)
    args = parser.parse_args()
    run = farandole.join()
    torch.manual_seed(3)
    again = args.kind == "checkpointing"
    model = nn.Sequential(nn.Linear(4, WIDTH), Block(again=again), Block(again=again), nn.Linear(WIDTH, 3))
    if args.kind == "lora":
        model.requires_grad_(False)
        model[0], model[3] = Adapted(model[0]), Adapted(model[3])
    if args.kind == "peft":
        declare()
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="[03]", lora_dropout=0.1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    more: dict[str, Any] = {}
    if args.kind == "ema":
        more["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    run.replicate(model=model, optimizer=optimizer, best=-1.0, **more)
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(ROWS, 4, generator=generator)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    if args.die is not None:
        die_while_saving(run, args.die)
    for step in run.steps(run.loader(data, batch=farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=EPOCHS):
        for rows, targets in step:
            if args.pace is not None:
                with suppress(FileNotFoundError):
                    time.sleep(float(args.pace.read_text()))
            step.backward(F.cross_entropy(model(rows), targets))
        optimizer.step()
        if args.kind == "ema":
            more["ema"].update_parameters(model)
        accuracy = None
        if step.number % 5 == 4:
            judged = more.get("ema", model)
            accuracy = run.evaluate(judged, data, lambda logits, y: logits.argmax(1) == y, micro=16)
            if accuracy > run.state.best:
                run.state.best = accuracy
                run.save(f"{args.out}.best")
        run.log(exact=step.loss, best=run.state.best, **({} if accuracy is None else {"accuracy": accuracy}))
    with run.once() as mine:
        if mine:
            args.out.write_text(run.fingerprint())


if __name__ == "__main__":
    main()
