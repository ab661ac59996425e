"""What a step costs each of many workers beside its compute: CPU time, a tiny model, a shard of 8 samples each.

    farandole run --workers 16 --min 16 --threads 1 benchmarks/many.py

Each worker prints, at its end, the CPU milliseconds of its process (all threads) a step, and what the same forward and
backward passes and the update take by themselves in the same process, afterwards.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

import farandole

SAMPLES, WARMUP, STEPS = 8, 30, 200
DATA = (WARMUP + STEPS) * SAMPLES * 16


def main() -> None:
    run = farandole.join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(DATA, 16), torch.randint(4, (DATA,)))
    loader = run.loader(data, batch=farandole.PerWorkerBatch(SAMPLES, micro=SAMPLES))
    before = 0.0
    for step in run.steps(loader, epochs=1):
        if step.number == WARMUP:
            before = time.process_time()
        for inputs, targets in step:
            step.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
    all_of_it = 1e3 * (time.process_time() - before) / (step.number + 1 - WARMUP)
    inputs, targets = data[:SAMPLES]
    before = time.process_time()
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    compute = 1e3 * (time.process_time() - before) / STEPS
    print(f"CPU of a step: {all_of_it:.2f} ms, of which {compute:.2f} are compute")


if __name__ == "__main__":
    main()
