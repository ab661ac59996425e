"""What a fork server loads asks nothing of CUDA: once the driver has begun in a process, no child of it can use a GPU.

A build of torch for CPUs would answer all of that without a driver, so it is made to look like one for GPUs, and who
asks is counted.
"""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import torch
from farandole.pool.local import LOADED
from farandole.worker import fork_server

asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
torch._C._cuda_getDeviceCount = lambda: asked.append("cuInit") or 0  # now it takes itself for a build for GPUs
torch._C._cuda_getCurrentRawStream = None
fork_server.load(LOADED)
torch.cuda.is_initialized() and asked.append("began")
print(asked)
"""


def test_what_workers_are_forked_from_has_not_asked_for_a_device() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
