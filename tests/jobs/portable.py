"""A job whose bits show what differs between CPUs: convolutions, attention, a recurrent layer, normalisation, dropout,
AdamW. A few steps, in a second or so; rank 0 prints the fingerprint.

    python portable.py [--epochs N] [--pace FILE]      while FILE is there every step takes at least `PACE_S`
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

SAMPLES, BATCH, MICRO = 24, 8, 4
PACE_S = 10.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(),
            nn.Conv2d(16, 32, 3, 2, groups=4), nn.GroupNorm(4, 32), nn.SiLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.fused = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(32, 24, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.features(x).flatten(2).mT
        return self.head(self.recurrent(self.fused(self.layer(places)))[0][:, -1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pace", type=Path)
    args = parser.parse_args()
    run = farandole.join()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.replicate(model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(5)
    images, labels = torch.rand(SAMPLES, 3, 20, 20, generator=generator) - 0.5, torch.arange(SAMPLES) % 10
    data = TensorDataset(images, labels)
    for step in run.steps(run.loader(data, farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=args.epochs):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        began = time.monotonic()
        while args.pace and args.pace.exists() and time.monotonic() < began + PACE_S:
            time.sleep(0.05)


if __name__ == "__main__":
    main()
