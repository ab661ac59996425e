"""Windows of tokens: farandole's loader over `farandole.Tokens`, and others over the same file, in turns.

    python benchmarks/tokens.py [--length 1024] [--micro 32] [--rounds 7] [--samples 4096]

    farandole   run.loader's Loader; each micro-batch gathered at once
    DataLoader  torch's, over a dataset of a few lines: a NumPy memmap, a slice for inputs and one for targets, int64
    one by one  farandole's loader over that dataset, which it asks for each sample
    by hand     no loader: two gathers by NumPy's index arrays for each micro-batch, in this process

Each contestant makes `--samples` shuffled samples a round, with 0, 1 and 2 loader processes, which live through all
rounds. The table has the median over the rounds of samples a second and of CPU microseconds a sample, loader processes
included, and the median of the ratio to DataLoader in the same round. The file lies in the page cache, and all have the
settings of malloc that a run has.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from farandole.data.loader import Key, Loader
from farandole.data.tokens import Tokens
from farandole.plan.batch import GlobalBatch
from farandole.training.run_state import keep_freed_memory

TOKENS = 50_000_000
TICKS = os.sysconf("SC_CLK_TCK")
Draw = Callable[[int], None]  # makes so many samples


class Memmap(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As nanoGPT's get_batch makes a sample."""

    def __init__(self, path: Path, length: int) -> None:
        self.data = np.asarray(np.memmap(path, dtype=np.uint16, mode="r"))  # slices of a memmap itself cost more
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self.length
        inputs = torch.from_numpy(self.data[begin : begin + self.length].astype(np.int64))
        targets = torch.from_numpy(self.data[begin + 1 : begin + 1 + self.length].astype(np.int64))
        return inputs, targets


def farandole(dataset: Dataset[Any], micro: int, processes: int) -> Draw:
    loader = Loader(dataset, GlobalBatch(micro, micro=micro), seed=0, num_workers=processes)

    steps = loader.length // micro

    def keys() -> Iterator[Key]:
        for step in count():
            epoch, at = divmod(step, steps)
            yield Key(epoch, step, 0, at * micro, at * micro + micro)

    mine = keys()
    loader.expect(keys())

    def draw(samples: int) -> None:
        for _ in range(samples // micro):
            loader.fetch(next(mine))

    return draw


def data_loader(dataset: Dataset[Any], micro: int, processes: int) -> Draw:
    loader = DataLoader(dataset, batch_size=micro, shuffle=True, num_workers=processes, drop_last=True)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    mine = endless()

    def draw(samples: int) -> None:
        for _ in range(samples // micro):
            next(mine)

    return draw


def by_hand(path: Path, length: int, micro: int) -> Draw:
    data, within = np.asarray(np.memmap(path, dtype=np.uint16, mode="r")), np.arange(length)
    generator = np.random.default_rng(0)

    def draw(samples: int) -> None:
        for _ in range(samples // micro):
            begins = generator.integers(0, (len(data) - 1) // length, micro) * length
            places = begins[:, None] + within
            inputs, targets = (torch.from_numpy(data[where].astype(np.int64)) for where in (places, places + 1))
            del inputs, targets

    return draw


def cpu_s() -> float:
    """Of this process and those of its loaders that live."""
    children = [Path(f"/proc/{child.pid}/stat").read_text() for child in multiprocessing.active_children()]
    ticks = sum(int(field) for text in children for field in text.rpartition(")")[2].split()[11:13])
    return time.process_time() + ticks / TICKS


def timed(draw: Draw, samples: int) -> tuple[float, float]:
    cpu, wall = cpu_s(), time.perf_counter()
    draw(samples)
    return time.perf_counter() - wall, cpu_s() - cpu


def written(folder: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50257, TOKENS).astype(np.uint16).tobytes()
    (folder / "shard.bin").write_bytes(ids)
    shard = {
        "url": "shard.bin",
        "nsamples": TOKENS,
        "filesize": len(ids),
        "md5sum": hashlib.md5(ids, usedforsecurity=False).hexdigest(),
    }
    index = {
        "__kind__": "farandole-tokens-v1", "dtype": "uint16", "vocabulary": 50257, "end_of_document": 50256,
        "tokenizer": "", "tokenizer_hash": "", "documents": 1, "shardlist": [shard],
    }  # fmt: skip
    (folder / "index.json").write_bytes(msgspec.json.encode(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a run, for all of them
    print(f"load {os.getloadavg()}, torch {torch.__version__}, NumPy {np.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder)
        for processes in args.processes:
            print(f"num_workers={processes}: samples/s, CPU us a sample, times DataLoader's speed (least, most), CPU")
            contestants = {
                "DataLoader": data_loader(Memmap(folder / "shard.bin", args.length), args.micro, processes),
                "farandole": farandole(Tokens(folder, args.length), args.micro, processes),
                "one by one": farandole(Memmap(folder / "shard.bin", args.length), args.micro, processes),
            }
            if not processes:
                contestants["by hand"] = by_hand(folder / "shard.bin", args.length, args.micro)
            compare(contestants, args.rounds, args.samples)


def compare(contestants: dict[str, Draw], rounds: int, samples: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for draw in contestants.values():
        draw(samples)
    for turn in range(rounds):
        names = list(contestants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(timed(contestants[name], samples))
    for name, its in found.items():
        speeds = [theirs[0] / mine[0] for theirs, mine in zip(found["DataLoader"], its, strict=True)]
        print(
            f"  {name:11} {samples / statistics.median(wall for wall, _ in its):9,.0f} "
            f"{1e6 * statistics.median(cpu for _, cpu in its) / samples:7.1f}   "
            f"{statistics.median(speeds):.2f} ({min(speeds):.2f}..{max(speeds):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
