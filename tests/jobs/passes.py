"""Three passes over each batch: rows of all samples, the critic's gradient, and the maker's.

    python passes.py OUT [--pace FILE] [--die PLACE --once FILE]      OUT: the fingerprint, by rank 0

While --pace FILE is there, every micro-batch takes 0.01 s more. With --die, the worker of rank 1 kills itself at PLACE
as soon as there are three of them: in the `gather` round, before it has given its rows; or in the last `pass`, after
one of its micro-batches. --once FILE is made then, and no other worker kills itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.training import step as step_module

ROWS, WIDTH = 64, 5
EPOCHS, BATCH, MICRO = 30, 12, 2
STEPS = EPOCHS * -(-ROWS // BATCH)


class Doomed:
    """Kills this process at its place, if it is the one."""

    def __init__(self, run: farandole.Run, place: str | None, once: Path | None) -> None:
        self._run, self._place, self._once = run, place, once
        exchange = step_module.partials_of

        def partials_of(*arguments: Any) -> Any:
            self.reach("gather")
            return exchange(*arguments)

        step_module.partials_of = partials_of

    def reach(self, place: str) -> None:
        if place != self._place or self._once is None or self._run.rank != 1 or self._run.view.size != 3:
            return
        try:
            self._once.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pace", type=Path)
    parser.add_argument("--die")
    parser.add_argument("--once", type=Path)
    args = parser.parse_args()
    run = farandole.join()
    torch.manual_seed(3)
    maker = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(module.parameters(), lr=0.01) for module in (maker, critic)]
    run.replicate(maker=maker, critic=critic, makers=optimizers[0], critics=optimizers[1])
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(ROWS, 2, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))
    doomed = Doomed(run, args.die, args.once)
    for step in run.steps(run.loader(data, batch=farandole.GlobalBatch(BATCH, micro=MICRO)), epochs=EPOCHS):
        for seeds, _ in step:
            if args.pace is not None and args.pace.exists():
                time.sleep(0.01)
            step.gather(made=maker(seeds).detach(), which=step.indices)
            step.sum(samples=torch.ones(len(seeds)))
        made = step.gathered["made"]
        center, spread = made.mean(0), made.std(0)
        for seeds, rows in step.again(recompute=True):
            out = (maker(seeds).detach() - center) / spread
            assert torch.equal(step.gathered["which"][step.rows], step.indices)
            step.backward(F.softplus(critic(out)).mean() + F.softplus(-critic(rows)).mean())
        optimizers[1].step()
        judged = step.loss
        for number, (seeds, _) in enumerate(step.again()):
            if number:
                doomed.reach("pass")
            out = (maker(seeds) - center) / spread
            step.backward(F.softplus(-critic(out)).mean())
            step.mean(out=out.mean())
        optimizers[0].step()
        run.log(judged=judged, fooled=step.loss, center=center.sum().item(), **step.means, **step.sums)
    if run.is_leader:
        args.out.write_text(run.fingerprint())


if __name__ == "__main__":
    main()
