"""Texts of different lengths: the loss is a mean over tokens, and the accuracy one over the global batch.

    python weighed.py OUT [--pace FILE]      OUT: the fingerprint, by rank 0

While FILE is there, every micro-batch takes 0.01 s more. metrics.jsonl gets the values of each step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole

IGNORED, WORDS, LONGEST, TEXTS = -100, 11, 6, 64
EPOCHS, BATCH, MICRO = 40, 8, 2
STEPS = EPOCHS * TEXTS // BATCH


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()
    run = farandole.join()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, WORDS, (TEXTS, LONGEST), generator=generator)
    targets = tokens.roll(1, 1)
    targets[torch.arange(LONGEST) >= torch.randint(0, LONGEST + 1, (TEXTS, 1), generator=generator)] = IGNORED
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(), nn.Linear(8 * LONGEST, WORDS * LONGEST))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer, best=0.0)
    loader = run.loader(TensorDataset(tokens, targets), batch=farandole.GlobalBatch(BATCH, micro=MICRO))
    for step in run.steps(loader, epochs=EPOCHS):
        for texts, wanted in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(0.01)
            logits, there = model(texts).view(-1, LONGEST, WORDS), wanted != IGNORED
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
            step.backward(loss, weight=there.sum())
            step.mean(accuracy=(logits.argmax(2) == wanted)[there].double().mean(), weight=there.sum())
            step.sum(tokens=there.sum())
            step.max(longest=there.sum(1).max())
        run.state.best = max(run.state.best, step.means["accuracy"])
        run.log(**step.means, **step.sums, **step.maxima, again=step.loss, best=run.state.best)
        optimizer.step()
    if run.is_leader:
        args.out.write_text(run.fingerprint())


if __name__ == "__main__":
    main()
