"""Contestants of `benchmarks/data.py images`: pictures of a folder, a random part of each, resized and mirrored."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from data_kind import PROCESSES, Here, Kind
from data_peers import hugging_face, litdata, streaming, webdataset
from data_torchvision import MEAN, STD, floats, whole


def ours(here: Here, *, normalised: bool) -> Iterator[Any]:
    """RandomResizedCrop, mirrored; uint8 from the loader processes, made float32 by the process that trains."""
    import farandole
    from farandole.data.transforms import facts

    yield ", ".join(value for _, value in facts(fast=True))
    normalize = farandole.Normalize(MEAN, STD)
    transform = farandole.RandomResizedCrop(here.side, flip=True)
    for images, _ in loaded(farandole.ShardedImages(here.shards, transform=transform), here.batch):
        yield normalize(images) if normalised else images


def before(here: Here) -> Iterator[Any]:
    """The same shards with torchvision's transforms of PIL images, as a user's own transform is called."""
    import farandole

    yield _versions()
    dataset = farandole.ShardedImages(here.shards, transform=floats(here.side))
    for images, _ in loaded(dataset, here.batch):
        yield images


def loaded(dataset: Any, batch: int) -> Iterator[Any]:
    from farandole.data.loader import Key, Loader
    from farandole.plan.batch import GlobalBatch
    from farandole.training.run_state import keep_freed_memory

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
    made = (floats if normalised else whole)(here.side)
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    yield _versions()
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


def _versions() -> str:
    return f"torchvision {metadata.version('torchvision')}, Pillow {metadata.version('pillow')}"


def make_images(folder: Path, source: Path | None, side: int, shard_size: str = "8MB") -> str:
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
    subprocess.run([*prepare, "--shard-size", shard_size], check=True, stdout=subprocess.DEVNULL)
    what = "photos" if files else "made up"
    return (
        f"{len(sizes)} JPEGs ({what}), {image.width} x {image.height} the last, {statistics.mean(sizes) / 1e3:.0f} kB"
    )


IMAGES = Kind(
    make=make_images,
    contestants={
        "ImageFolder, float32": functools.partial(image_folder, normalised=True),
        "ImageFolder, uint8": functools.partial(image_folder, normalised=False),
        "ShardedImages, own transform, float32": before,
        "farandole, uint8": functools.partial(ours, normalised=False),
        "farandole, float32": functools.partial(ours, normalised=True),
        "mosaicml-streaming, float32": streaming,
        "webdataset, float32": webdataset,
        "litdata, float32": litdata,
        "Hugging Face's datasets, float32": hugging_face,
        "DALI on the CPU, uint8": functools.partial(dali, normalised=False),
        "DALI on the CPU, float32": functools.partial(dali, normalised=True),
    },
    ours=("farandole, float32", "ShardedImages, own transform, float32"),
    peers={
        "mosaicml-streaming, float32": "streaming",
        "litdata, float32": "litdata",
        "DALI on the CPU, uint8": "dali",
        "DALI on the CPU, float32": "dali",
    },
)
