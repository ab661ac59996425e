"""The layer of `wide_train.py` under DistributedDataParallel over Gloo, with one of torch's communication hooks.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment, as under torchrun. Rank 0 writes the time at
the end of each step to the file `--times`, one line each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from wide_train import INPUTS

WARM = 10  # steps before PowerSGD begins; its least


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, required=True)
    parser.add_argument("--hook", choices=("none", "fp16", "powersgd"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Linear(INPUTS, options.mb * 1_000_000 // 4 // INPUTS, bias=False), gradient_as_bucket_view=True
    )
    if options.hook == "powersgd":
        state = PowerSGDState(dist.group.WORLD, matrix_approximation_rank=4, start_powerSGD_iter=WARM)
        model.register_comm_hook(state, powerSGD_hook)
    elif options.hook != "none":
        model.register_comm_hook(dist.group.WORLD, getattr(default_hooks, f"{options.hook}_compress_hook"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = torch.ones(8 // dist.get_world_size(), INPUTS)
    with options.times.open("w") as times:
        for _ in range(WARM + options.steps):
            optimizer.zero_grad(set_to_none=True)
            model(rows).square().mean().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(time.time(), file=times, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
