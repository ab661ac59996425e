"""How fast samples come: farandole's data paths against others', in turns, each with two processes (or threads).

    python benchmarks/data.py images                               # pictures that are made up
    python benchmarks/data.py images --source photos --side 400    # a folder of one folder a class; made so large first

Each contestant has a process of its own in each round, which warms up and is then timed for `--seconds`. Shown are the
medians over the rounds: samples a second; processor microseconds a sample, of all its processes and threads; and of
both the ratio to the first contestant in the same round, so that what else the machine does meets all alike: where
others compute as well, that of the processor's time says more. Who is not installed is left out, with a word. Whoever
gives float32 has normalised it.

A contestant is a function of `Here` that gives batches without end, and gives its versions first; `KINDS` is the table.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PROCESSES, WARM_UP = 2, 12  # batches to warm up
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Here:
    """Where the data lies: `folder/raw`, as others take it, and `folder/shards`, made of the same."""

    folder: str
    side: int  # pixels, of what comes out
    batch: int  # samples

    @property
    def raw(self) -> str:
        return f"{self.folder}/raw"

    @property
    def shards(self) -> str:
        return f"{self.folder}/shards"


Contestant = Callable[[Here], Iterator[Any]]  # the versions in one line, then what has `len()` samples


# --- images --------------------------------------------------------------------------------------------------


def ours(here: Here, *, normalised: bool) -> Iterator[Any]:
    """RandomResizedCrop, mirrored; uint8 from the loader processes, made float32 by the process that trains."""
    import farandole
    from farandole.data.pictures import facts

    yield ", ".join(value for _, value in facts(fast=True))
    normalize = farandole.Normalize(MEAN, STD)
    transform = farandole.RandomResizedCrop(here.side, flip=True)
    for images, _ in _loaded(farandole.ShardedImages(here.shards, transform=transform), here.batch):
        yield normalize(images) if normalised else images


def before(here: Here) -> Iterator[Any]:
    """The same shards with torchvision's transforms of PIL images, as a user's own transform is called."""
    import farandole

    transforms = _torchvision()
    yield f"torchvision {metadata.version('torchvision')}, Pillow {metadata.version('pillow')}"
    dataset = farandole.ShardedImages(here.shards, transform=_float(transforms, here.side))
    for images, _ in _loaded(dataset, here.batch):
        yield images


def _loaded(dataset: Any, batch: int) -> Iterator[Any]:
    from farandole.data.loader import Key, Loader
    from farandole.plan.batch import GlobalBatch
    from farandole.training.memory import keep_freed_memory

    keep_freed_memory()  # as `farandole.join()` does
    loader = Loader(dataset, GlobalBatch(batch, micro=batch), seed=0, num_workers=PROCESSES)

    def keys() -> Iterator[Key]:
        step = 0
        while True:
            epoch, place = divmod(step, len(dataset) // batch)
            yield Key(epoch, step, 0, place * batch, (place + 1) * batch)
            step += 1

    loader.expect(keys())
    for key in keys():
        yield loader.fetch(key)


def image_folder(here: Here, *, normalised: bool) -> Iterator[Any]:
    """torchvision's ImageFolder and transforms in torch's DataLoader."""
    transforms = _torchvision()
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    yield f"torchvision {metadata.version('torchvision')}, Pillow {metadata.version('pillow')}"
    made = (_float if normalised else _bytes)(transforms, here.side)
    dataset = ImageFolder(here.raw, transform=made)
    loader = DataLoader(
        dataset, here.batch, shuffle=True, num_workers=PROCESSES, persistent_workers=True, drop_last=True
    )
    while True:
        for images, _ in loader:
            yield images


def dali(here: Here, *, normalised: bool) -> Iterator[Any]:
    """NVIDIA's DALI on the CPU: what is cropped away is not decoded."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    yield f"DALI {metadata.version('nvidia-dali-cuda120')}"

    @pipeline_def
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=here.raw, random_shuffle=True, name="files")
        images = fn.decoders.image_random_crop(files, device="cpu", random_area=(0.08, 1.0))
        images = fn.resize(images, resize_x=here.side, resize_y=here.side, interp_type=types.INTERP_LINEAR)
        scaled = {"mean": [255 * m for m in MEAN], "std": [255 * s for s in STD]} if normalised else {}
        dtype = types.FLOAT if normalised else types.UINT8
        images = fn.crop_mirror_normalize(
            images, dtype=dtype, output_layout="CHW", mirror=fn.random.coin_flip(), **scaled
        )
        return images, labels

    built = pipeline(batch_size=here.batch, num_threads=PROCESSES, device_id=None, prefetch_queue_depth=2)
    built.build()
    batches = DALIGenericIterator([built], ["images", "labels"], reader_name="files", auto_reset=True)
    while True:
        for [batch] in batches:
            yield batch["images"]


def _torchvision() -> Any:
    """Its transforms. The wheel for CUDA beside torch for CPUs lacks an operator, without which it does not load."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        library.define(schema)
    from torchvision import transforms

    _kept.append(library)
    return transforms


_kept: list[Any] = []


def _float(transforms: Any, side: int) -> Any:
    drawn = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*drawn, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def _bytes(transforms: Any, side: int) -> Any:
    drawn = [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip()]
    return transforms.Compose([*drawn, transforms.PILToTensor()])


def make_images(folder: Path, source: Path | None, side: int) -> str:
    """`raw` and `shards`; what they are, in words. `side`: the shorter one of each picture, 0 as they are."""
    import numpy as np
    import PIL.Image

    files = sorted(p for p in source.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png")) if source else []
    raw = folder / "raw"
    generator = np.random.default_rng(0)
    sizes: list[int] = []
    for number in range(min(len(files), 1000) or 512):
        if files:
            image: Any = PIL.Image.open(files[number * len(files) // min(len(files), 1000)]).convert("RGB")
        else:
            rough = generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)
            image = PIL.Image.fromarray(rough).resize((533, 400), PIL.Image.Resampling.BICUBIC)
        if side and min(image.size) != side:
            width, height = (round(extent * side / min(image.size)) for extent in image.size)
            image = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        grain = generator.integers(-6, 7, (image.height, image.width, 1))  # enlarged pictures have none
        image = PIL.Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
        place = raw / f"class{number % 10}" / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, quality=85)
        sizes.append(place.stat().st_size)
    prepare = [sys.executable, "-m", "farandole", "data", "prepare", str(raw), str(folder / "shards")]
    subprocess.run([*prepare, "--shard-size", "8MB"], check=True, stdout=subprocess.DEVNULL)
    what = "photos" if files else "made up"
    return (
        f"{len(sizes)} JPEGs ({what}), {image.width} x {image.height} the last, {statistics.mean(sizes) / 1e3:.0f} kB"
    )


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[[Path, Path | None, int], str]
    contestants: dict[str, Contestant]


KINDS = {
    "images": Kind(
        make=make_images,
        contestants={
            "ImageFolder, float32": functools.partial(image_folder, normalised=True),
            "ImageFolder, uint8": functools.partial(image_folder, normalised=False),
            "ShardedImages, own transform, float32": before,
            "farandole, uint8": functools.partial(ours, normalised=False),
            "farandole, float32": functools.partial(ours, normalised=True),
            "DALI on the CPU, uint8": functools.partial(dali, normalised=False),
            "DALI on the CPU, float32": functools.partial(dali, normalised=True),
        },
    ),
}


# --- turns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contestant's in one round. `absent`: why there is none."""

    samples_per_s: float = math.nan
    cpu_us: float = math.nan  # a sample
    versions: str = ""
    absent: str = ""


def turn(kind: str, name: str, here: Here, seconds: float) -> Turn:
    """In this process. The clock runs from a batch to a batch."""
    import torch

    torch.set_num_threads(1)
    try:
        batches = KINDS[kind].contestants[name](here)
        versions = next(batches)
        for _ in range(WARM_UP):
            next(batches)
    except ImportError as error:
        return Turn(absent=str(error))
    began, used, samples = time.perf_counter(), cpu_seconds(), 0
    while (took := time.perf_counter() - began) < seconds:
        samples += len(next(batches))
    return Turn(samples_per_s=samples / took, cpu_us=1e6 * (cpu_seconds() - used) / samples, versions=versions)


def cpu_seconds() -> float:
    """Of this process and all that it has started."""
    return sum(spent().values()) / os.sysconf("SC_CLK_TCK")


def spent() -> dict[int, int]:
    """The processor ticks of each of these processes."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            parents[int(entry.name)], ticks[int(entry.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_ours(pid: int) -> bool:
        while pid not in (0, os.getpid()):
            pid = parents.get(pid, 0)
        return pid != 0

    return {pid: its for pid, its in ticks.items() if is_ours(pid)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--source", type=Path, help="a folder of one folder a class")
    parser.add_argument("--side", type=int, default=0, help="pixels of the pictures' shorter side; 0: as they are")
    parser.add_argument("--size", type=int, default=224, help="pixels of what comes out")
    parser.add_argument("--batch", type=int, default=64, help="samples a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--only", default="", help="contestants whose names hold one of these, with commas")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="where the data is made, or found again; none: made anew, and removed")
    options = parser.parse_args()
    if options.turn:
        here = Here(folder=options.folder, side=options.size, batch=options.batch)
        found = turn(options.kind, options.turn, here, options.seconds)
        print(json.dumps(asdict(found)), flush=True)
        for pid in set(spent()) - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)  # lest they go on in another's turn
        os._exit(0)
    with tempfile.TemporaryDirectory(prefix="farandole-bench-") as temporary:
        folder = Path(options.folder or temporary)
        made = folder / f"{options.kind}.txt"
        if not made.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made.write_text(KINDS[options.kind].make(folder, options.source, options.side))
        compete(options, str(folder), made.read_text())


def compete(options: argparse.Namespace, folder: str, what: str) -> None:
    from tables import number, show, spread

    wanted = options.only.split(",")
    names = [name for name in KINDS[options.kind].contestants if any(part in name for part in wanted)]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            call = [sys.executable, __file__, options.kind, "--turn", name, "--folder", folder, "--size",
                    str(options.size), "--batch", str(options.batch), "--seconds", str(options.seconds)]  # fmt: skip
            done = subprocess.run(call, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            turns[name].append(Turn(**json.loads(done.stdout.splitlines()[-1])))
    for name in names:
        if absent := turns[name][0].absent:
            print(f"{name}: not installed ({absent})")
    rows: list[list[str]] = []
    present = [name for name in names if not turns[name][0].absent]
    for name in present:
        pairs = list(zip(turns[name], turns[present[0]], strict=True))
        ratios = [each.samples_per_s / first.samples_per_s for each, first in pairs]
        cheaper = [first.cpu_us / each.cpu_us for each, first in pairs]
        rows.append([
            name, number(statistics.median(t.samples_per_s for t in turns[name]), 0),
            number(statistics.median(ratios), 2), spread(ratios, 2),
            number(statistics.median(t.cpu_us for t in turns[name]), 0),
            number(statistics.median(cheaper), 2), spread(cheaper, 2), turns[name][0].versions,
        ])  # fmt: skip
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    title = (
        f"{what}, to {options.size} x {options.size}, in batches of {options.batch}; {PROCESSES} processes, "
        f"{os.cpu_count()} cores, load {load}; times {present[0]}"
    )
    columns = ["", "samples/s", "times", "of rounds", "CPU us", "samples a CPU second, times", "of rounds", "versions"]
    show(title, columns, rows, markdown=options.markdown)


if __name__ == "__main__":
    main()
