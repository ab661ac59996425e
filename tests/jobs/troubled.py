"""The job of test_failures: twenty short steps, and a trouble that is asked for by a file.

python troubled.py OUT      OUT/raise: rank 1 raises within step 5
                            OUT/slow: steps take half a second while it is there
                            OUT/hang: who comes to step 5 first never comes out of it; its process id is in OUT/hung
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farandole

BATCH, STEPS, TROUBLE = 8, 20, 5


def hang(out: Path) -> None:
    try:
        (out / "hang").unlink()
    except FileNotFoundError:
        return
    (out / "hung").write_text(str(os.getpid()))
    while True:
        time.sleep(1.0)


def main() -> None:
    out = Path(sys.argv[1])
    run = farandole.join()
    model = nn.Linear(4, 1)
    run.replicate(model=model)
    loader = run.loader(TensorDataset(torch.randn(BATCH * STEPS, 4)), batch=farandole.GlobalBatch(BATCH, micro=2))
    for step in run.steps(loader, epochs=1):
        if (out / "slow").exists():
            time.sleep(0.5)
        for (rows,) in step:
            if step.number == TROUBLE:
                if run.rank == 1 and (out / "raise").exists():
                    raise RuntimeError("a trouble of the script's own")
                hang(out)
            step.backward(model(rows).square().mean())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.01)


if __name__ == "__main__":
    main()
