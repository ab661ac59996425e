"""Samples drawn by weight, or batches of similar length with a budget of tokens, through torch's DataLoader.

    python sampled.py OUT {weighted,batches} [--pace FILE] [--seed-of-weights N]      OUT: the fingerprint, by rank 0

While FILE is there, every micro-batch takes as many seconds more as it says. With `--seed-of-weights` the data have
other weights and lengths, as in a worker whose files differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

import farandole

SAMPLES, DRAWN, FEATURES, BATCH, MICRO, EPOCHS = 96, 130, 6, 16, 4, 12
BUDGET = 120  # tokens of a batch


class Buckets(Sampler[list[int]]):
    """Batches of samples of similar length: at most `budget` tokens, counted with padding, in another order each epoch.

    `lengths`: the tokens of each sample.
    """

    def __init__(self, lengths: list[int], budget: int) -> None:
        self.lengths, self.budget = lengths, budget

    def __len__(self) -> int:
        return len(self.lengths)  # at most

    def __iter__(self) -> Iterator[list[int]]:
        noise = torch.rand(len(self.lengths)).tolist()  # samples of nearly the same length change places
        order = sorted(range(len(self.lengths)), key=lambda sample: self.lengths[sample] + 4 * noise[sample])
        batches: list[list[int]] = [[]]
        longest = 0
        for sample in order:
            longest = max(longest, self.lengths[sample])
            if longest * (len(batches[-1]) + 1) > self.budget:
                batches.append([])
                longest = self.lengths[sample]
            batches[-1].append(sample)
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=("weighted", "batches"))
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--seed-of-weights", type=int, default=3)
    args = parser.parse_args()
    run = farandole.join()
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(5))
    train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    lengths = torch.randint(3, 30, (SAMPLES,), generator=torch.Generator().manual_seed(args.seed_of_weights)).tolist()
    if args.kind == "weighted":
        given = DataLoader(train_set, BATCH, sampler=WeightedRandomSampler(lengths, DRAWN))
    else:
        given = DataLoader(train_set, batch_sampler=Buckets(lengths, BUDGET))
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(given, micro=MICRO), epochs=EPOCHS):
        for rows, targets in step:
            if args.pace is not None:
                with suppress(FileNotFoundError):
                    time.sleep(float(args.pace.read_text()))
            step.backward(F.mse_loss(model(rows), targets))
        optimizer.step()
    if run.is_leader:
        args.out.write_text(run.fingerprint())


if __name__ == "__main__":
    main()
