"""The job of test_no_requests_in_a_step: after every step, which control messages there have been so far.

python counting.py OUT STEPS      writes OUT/RANK.json: [[seconds, view, sent, received], ...], one entry a step
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole import joining

BATCH = 8


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    run = farandole.join()
    model = nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(TensorDataset(torch.randn(BATCH * steps, 4)), batch=farandole.GlobalBatch(BATCH, micro=2))
    current = joining.current()
    assert current is not None
    client = current._participant
    counts: list[tuple[float, int, dict[str, int], dict[str, int]]] = []
    for step in run.steps(loader, epochs=1):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        optimizer.step()
        time.sleep(0.005)
        counts.append((time.monotonic(), step.view.number, dict(client.sent), dict(client.received)))
    (out / f"{run.rank}.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
