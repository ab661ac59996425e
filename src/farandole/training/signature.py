"""A run's identity: what must be equal in all of its workers for the bits to be equal.

Library versions, the kind of device, the intra-op threads, torch's settings and the fingerprint are numerics, judged by
`membership/likeness.py`, and so is what the data is decoded by; the code, the data's length, what else it says of
itself, the batch policy and the replicated tensors are the job. A joiner in which something of the job differs is
refused, the first difference named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
import torch

import farandole
from farandole.checkpoint.restore import ORDER, UNSHUFFLED
from farandole.code import snapshot
from farandole.data.facts import facts_of, picked
from farandole.data.loader import Loader
from farandole.membership import likeness
from farandole.membership.messages import Signature
from farandole.numerics import portable
from farandole.numerics import settings as cuda
from farandole.numerics.fingerprint import fingerprint
from farandole.training.progress import Length
from farandole.training.replica import Replica


def signature(device: torch.device, loader: Loader, length: Length, replica: Replica) -> Signature:
    """This worker's signature, in the order in which differences are told. Raises UsageError: it is too large."""
    return Signature.of(_facts(device, loader, length, replica))


def machine(device: torch.device) -> Iterator[tuple[str, str]]:
    """What the libraries and the hardware contribute to the bits, with the threads and settings of this process."""
    yield likeness.TORCH, str(torch.__version__)
    yield likeness.NUMPY, np.__version__
    yield likeness.DEVICE, _name(device)
    yield from cuda.setting_facts()
    yield from fingerprint(device)


def here(threads: int, bits: str, like: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[str, str]]:
    """What a worker on this machine would have; for a process in which nothing is trained yet. The script's settings
    are to be `like` those.
    """
    device = cuda.local_device()
    for name, value in like.items():
        cuda.put(name, value)
    torch.set_num_threads(threads)
    if bits == "portable":
        portable.take_over(threads, device)
    cuda.begin(device, bits)
    return machine(device)


def _facts(device: torch.device, loader: Loader, length: Length, replica: Replica) -> Iterator[tuple[str, str]]:
    yield "farandole version", farandole.__version__
    yield from machine(device)
    yield from snapshot.facts()
    yield "samples in the data", str(loader.length)
    if picks := picked(loader.dataset):
        yield "samples in the data that a Subset picks", picks
    yield ORDER, "shuffled, by the run's seed" if loader.order.shuffle else UNSHUFFLED
    for name, value in facts_of(loader.dataset).items():
        yield name if name.startswith(likeness.DECODING) else f"data's {name}", value
    if loader.left_out:
        yield "samples in the data that an epoch leaves out (drop_last)", str(loader.left_out)
    yield "batch policy", repr(loader.batch)
    yield from ((name, str(value)) for name, value in dataclasses.asdict(length).items() if value)
    yield from replica.facts()


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
