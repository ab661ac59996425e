"""The yardstick: an ordinary, good DistributedDataParallel script over Gloo, one thread a worker.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment, as under torchrun.
`gradient_as_bucket_view` saves DDP a copy of every gradient and the memory for it, so it is on.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants.recorder import Recorder, arguments
from models import build, dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    recorder = Recorder(f"rank{os.environ['RANK']}")
    data = dataset(options.samples)
    model = build(options.model)
    recorder.built(sum(4 * parameter.numel() for parameter in model.parameters()))

    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01, momentum=0.9)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler, num_workers=0, drop_last=True)

    number = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(replica(images), labels).backward()
            optimizer.step()
            number += 1
            recorder.step(number, dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
