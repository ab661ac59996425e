"""What a store far away costs: on a machine that has nothing yet, on one that can't hold the data, and when one joins.

    python benchmarks/store.py                 # all three; 2 to 3 minutes
    python benchmarks/store.py --only first    # or half, or joiner

The data are 4,000 files of 45 kB with a JPEG at their beginning, in 22 shards of 8 MB that `farandole data prepare` has
made, on an S3 server that makes each request wait for 50 ms and gives each connection 400 Mbit/s (`slow_store.py`).
Each figure is taken in a process of its own, with the index known; nothing is decoded; samples come in a run's order.

- first: seconds to the first 64 samples, the cache being empty, by `read` one after the other, and by a loader with one
  process, from that process's start. A fetcher starts with the dataset: with that, and once it has read a sample.
- half: samples a second with a cache of half the data, once it is full (or half a minute has passed), over `--seconds`.
- joiner: two workers train, which have the data; a third one joins. Told is by how much the others' steps, all
  together, are longer than usual: the sum, over both, of each step's time beyond the median step of as many workers.
  It begins with the proposal of the view and ends when the joiner's cache holds 95 % of the data, or after 30 s. "calm"
  is what the same sum, over as many steps, comes to afterwards. First with a joiner that has the data.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from contestants.store_train import Read
from launch import HERE, Farandole, Job, alive
from records import Record, middle
from slow_store import AWS, BUCKET, Store
from tables import number, show

from farandole.data.loader import Key, Loader
from farandole.data.order import SampleOrder
from farandole.plan.batch import GlobalBatch

IMAGES, BYTES, A_SHARD = 4000, 45_000, 182
URL = f"s3://{BUCKET}/images"
HALF = 94_000_000  # bytes: 11 of the 22 shards
FIRST, MICRO = 64, 16
FULL = 0.95  # of half of the data, or of all
FILL_S = 30.0
CALM_STEPS = 30
LIMIT_SECONDS = 120.0


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="bench-store-") as temporary:
        folder = Path(temporary)
        with Store(folder) as store:
            os.environ |= {**AWS, "AWS_ENDPOINT_URL": store.near}
            prepare(folder)
            os.environ["AWS_ENDPOINT_URL"] = store.far
            if options.only in ("first", None):
                show_first(folder, store, options)
            if options.only in ("half", None):
                show_half(folder, store, options)
            if options.only in ("joiner", None):
                show_joiners(folder, store, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("first", "half", "joiner"))
    parser.add_argument("--times", type=int, default=3, help="that the first samples are read, each with a new cache")
    parser.add_argument("--seconds", type=float, default=15.0, help="for a rate")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args()


def prepare(folder: Path) -> None:
    """The shards, from files whose JPEG is small and quickly looked at; what follows it makes them long."""
    from io import BytesIO

    from PIL import Image

    encoded = BytesIO()
    Image.new("RGB", (16, 16)).save(encoded, "JPEG")
    (folder / "source" / "class").mkdir(parents=True)
    for image in range(IMAGES):
        rest = os.urandom(BYTES - len(encoded.getvalue()))
        (folder / "source" / "class" / f"{image:04d}.jpg").write_bytes(encoded.getvalue() + rest)
    command = [sys.executable, "-m", "farandole", "data", "prepare", str(folder / "source"), URL]
    subprocess.run([*command, "--shard-size", f"{A_SHARD * BYTES // 1000}k"], check=True, stdout=sys.stderr)


# --- first, half ------------------------------------------------------------------------------------------------------


def show_first(folder: Path, store: Store, options: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    for name, measure in (
        ("read", first_read),
        ("loader, 1 process", first_loaded),
        ("the same, the fetcher has started", partial(first_loaded, warm=True)),
    ):
        taken: list[float] = []
        before = store.counts()
        for turn in range(options.times):
            taken.append(apart(measure, str(folder / f"first-{name[:8]}-{turn}")))
        each = [(now - then) / options.times for now, then in zip(store.counts(), before, strict=True)]
        rows.append([name, *(number(f(taken), 2) for f in (middle, min, max)), number(each[0], 0), mb(each[1])])
    columns = ["", "median s", "least", "most", "requests", "MB"]
    show(f"the first {FIRST} samples, nothing cached", columns, rows, markdown=options.markdown)


def show_half(folder: Path, store: Store, options: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    for name, measure in (("read", half_read), ("loader, 1 process", half_loaded)):
        before = store.counts()
        cache = folder / f"half-{name[:4]}"
        rate, samples = apart(measure, str(cache), options.seconds)
        requests, sent = (now - then for now, then in zip(store.counts(), before, strict=True))
        rows.append([name, number(rate, 1), str(samples), number(requests, 0), mb(sent), mb(held(cache))])
    columns = ["", "samples/s", "of", "requests in all", "MB in all", "MB held"]
    show("a cache of half the data", columns, rows, markdown=options.markdown)


def apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What `measure` gives in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(measure, *arguments).result()


def first_read(cache: str) -> float:
    data = Read(URL, cache=cache)
    samples = list(islice(in_order(len(data)), FIRST))
    began = time.monotonic()
    for sample in samples:
        data.read(sample)
    return time.monotonic() - began


def first_loaded(cache: str, *, warm: bool = False) -> float:
    begun = torch.zeros(1, dtype=torch.float64).share_memory_()
    data = Read(URL, cache=cache)
    if warm:
        data.read(next(islice(in_order(len(data)), FIRST, None)))
    loader = loading(data, begun)
    loader.expect(keys(loader.length))
    for key in islice(keys(loader.length), FIRST // MICRO):
        loader.fetch(key)
    taken = time.monotonic() - begun.item()
    loader.close()
    return taken


def half_read(cache: str, seconds: float) -> tuple[float, int]:
    data = Read(URL, cache=cache, cache_bytes=HALF)
    return rate((1 for sample in in_order(len(data)) if data.read(sample)), Path(cache), seconds)


def half_loaded(cache: str, seconds: float) -> tuple[float, int]:
    data = Read(URL, cache=cache, cache_bytes=HALF)
    loader = loading(data, torch.zeros(1, dtype=torch.float64).share_memory_())
    loader.expect(keys(loader.length))
    try:
        return rate((len(loader.fetch(key)[0]) for key in keys(loader.length)), Path(cache), seconds)
    finally:
        loader.close()


def rate(reads: Iterator[int], cache: Path, seconds: float) -> tuple[float, int]:
    """Samples a second, and how many were counted, once the cache is as full as it gets."""
    deadline = time.monotonic() + FILL_S
    while held(cache) < FULL * HALF and time.monotonic() < deadline:
        next(reads)
    began, samples = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        samples += next(reads)
    return samples / (time.monotonic() - began), samples


def loading(data: Read, begun: torch.Tensor) -> Loader:
    """`begun`: when the loader process began."""

    def begins(_: int) -> None:
        begun[0] = time.monotonic()

    options = {"worker_init_fn": begins, "multiprocessing_context": "fork"}
    return Loader(data, GlobalBatch(FIRST, micro=MICRO), seed=0, num_workers=1, **options)


def in_order(length: int) -> Iterator[int]:
    order = SampleOrder(length, 0, shuffle=True)
    return (sample for epoch in count() for sample in order.samples(epoch, 0, length).tolist())


def keys(length: int) -> Iterator[Key]:
    starts = ((epoch, start) for epoch in count() for start in range(0, length, MICRO))
    for number_, (epoch, start) in enumerate(starts):
        step, shard = divmod(number_, FIRST // MICRO)
        yield Key(epoch=epoch, step=step, shard=shard, start=start, stop=min(start + MICRO, length))


def held(cache: Path) -> int:
    """Bytes on the disk under a folder, which may be without some of its files from one moment to the next."""
    total = 0
    for path in cache.rglob("*"):
        try:
            total += 512 * path.stat().st_blocks
        except FileNotFoundError:
            continue
    return total


def mb(size: float) -> str:
    return number(size / 1e6, 1)


# --- joiner -----------------------------------------------------------------------------------------------------------


class Reading(Farandole):
    """farandole with images of the store; `cold` says what cache the next joiner has."""

    def __init__(self, warm: Path, cold: Path) -> None:
        super().__init__(Job(model="", workers=2, batch=0, micro=0, samples=0), limit_s=400)
        self._caches = ["--warm", str(warm), "--cold", str(cold)]

    def script(self) -> list[str]:
        return [str(HERE / "contestants" / "store_train.py"), "--url", URL, *self._caches]


def show_joiners(folder: Path, store: Store, options: argparse.Namespace) -> None:
    warm, cold = folder / "warm", folder / "cold-cache"
    os.environ["AWS_ENDPOINT_URL"] = store.near
    apart(fill, str(warm))
    os.environ["AWS_ENDPOINT_URL"] = store.far
    rows: list[list[str]] = []
    with Reading(warm, cold) as fleet:
        fleet.start()
        for name, empty in (("that has the data", False), ("with an empty cache", True)):
            if empty:
                (fleet.folder / "cold").touch()
            before = store.counts()
            found = joiner(fleet, cold if empty else None, held(warm))
            each = [now - then for now, then in zip(store.counts(), before, strict=True)]
            rows.append([name, *(number(value, 2) for value in found), number(each[0], 0), mb(each[1])])
    columns = ["a joiner", "others, s", "calm, s", "until, s", "median ms", "requests", "MB"]
    show("what a joiner costs two others", columns, rows, markdown=options.markdown)


def fill(cache: str) -> None:
    data = Read(URL, cache=cache)
    for sample in range(len(data)):
        data.read(sample)


def joiner(fleet: Reading, cache: Path | None, whole: int) -> tuple[float, float, float, float]:
    """What it costs the others, what as many calm steps cost, in seconds; how long that took; the median step in ms.

    `cache`: the joiner's, if it is its own; `whole`: how much is in it when it is full.
    """
    veterans = {record.pid for record in training(fleet, 2, 0.0, CALM_STEPS)}
    asked = time.time()
    fleet.join()
    training(fleet, 3, asked, 1)
    began = fleet.proposed(asked)
    until = began + FILL_S
    fleet.wait(lambda: time.time() > until or (cache is not None and held(cache) > FULL * whole), 2 * FILL_S, "cache")
    ended = time.time()
    workers = training(fleet, 3, ended, CALM_STEPS)
    others = [record for record in workers if record.pid in veterans]
    newcomer = next(record for record in workers if record.pid not in veterans)
    usual = {2: middle([gap for each in others for gap in steps(each, 2, 0.0, asked)][-2 * CALM_STEPS :])}
    usual[3] = middle([gap for each in others for gap in steps(each, 3, ended)])
    costs = [gap - usual[size] for each in others for size in usual for gap in steps(each, size, began, ended)]
    calm = [gap - usual[3] for each in others for gap in steps(each, 3, ended)]
    left = time.time()
    fleet.leave(newcomer)
    training(fleet, 2, left, 1)
    return sum(costs), sum(calm) / len(calm) * len(costs), ended - began, 1e3 * usual[3]


def training(fleet: Reading, size: int, since: float, number_: int) -> list[Record]:
    """The workers, once as many as `size` have taken so many steps together."""
    found: list[Record] = []

    def settled() -> bool:
        found[:] = [record for record in fleet.records() if alive(record.pid)]
        return len(found) == size and all(len(steps(record, size, since)) >= number_ for record in found)

    fleet.wait(settled, LIMIT_SECONDS, f"training with {size} workers")
    return found


def steps(record: Record, size: int, since: float, until: float = float("inf")) -> list[float]:
    """The steps of so many workers that ended within these moments, seconds each."""
    return [
        record.times[i] - record.times[i - 1]
        for i in range(1, len(record.times))
        if record.sizes[i] == size and since < record.times[i] <= until
    ]


if __name__ == "__main__":
    main()
