"""torchft 0.2.0 as its README and its `train_ddp.py` show it: Manager, ProcessGroupGloo, its DDP and its optimizer.

A worker is a replica group of one. Its store lives in the process itself, which saves torchft the agent process of
torchrun. What `train_ddp.py` sets is set likewise (5 s on Gloo, 30 s on the manager); the rest is torchft's default.
torchft offers no request to leave: on SIGTERM the worker ends its step, shuts its manager down (so that its heartbeats
stop at once) and exits, which is the most graceful way there is.

A step that torchft discards does not advance `manager.current_step()`, so a discarded step shows in the record as a
number that stands still.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.nn.functional as F
from contestants.recorder import Recorder, arguments
from models import build, dataset
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    replica = int(os.environ["REPLICA_GROUP_ID"])
    recorder = Recorder(f"replica{replica}")
    data = dataset(options.samples)
    model = build(options.model)
    recorder.built(sum(4 * parameter.numel() for parameter in model.parameters()))

    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))

    def state_dict() -> dict[str, object]:
        return {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        wrapped.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    recorder.mark("ready")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"bench_{replica}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9))
    sampler = DistributedSampler(
        data,
        replica_rank=replica % options.workers,
        num_replica_groups=options.workers,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(data, batch_size=options.batch, sampler=sampler, num_workers=0, drop_last=True)

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()
            recorder.step(manager.current_step(), manager.num_participants())
            if leaving:
                manager.shutdown()
                return
    manager.shutdown()


if __name__ == "__main__":
    main()
