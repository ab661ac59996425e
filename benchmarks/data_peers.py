"""Contestants of `benchmarks/data.py images` that keep pictures in formats of their own.

They are mosaicml-streaming, webdataset, litdata and Hugging Face's datasets, each with torchvision's transforms and the
loader that its users are told to take.
Each writes its format once, of the same JPEGs, byte for byte, before its first turn.
"""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from data_kind import PROCESSES, Here
from data_torchvision import floats

LOADER: dict[str, Any] = {"num_workers": PROCESSES, "persistent_workers": True, "drop_last": True}


def streaming(here: Here) -> Iterator[Any]:
    """mosaicml-streaming: MDS shards of bytes, shuffled."""
    transform = floats(here.side)  # first: some of them import torchvision
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    yield f"mosaicml-streaming {metadata.version('mosaicml-streaming')}"
    place = Path(here.folder, "mds")
    if not (place / "index.json").exists():
        with MDSWriter(out=str(place), columns={"image": "bytes", "label": "int"}, size_limit=8 << 20) as out:
            for data, label in _pictures(here):
                out.write({"image": data, "label": label})

    class Pictures(StreamingDataset):
        def __getitem__(self, at: int) -> Any:
            found = super().__getitem__(at)
            return transform(_decoded(found["image"])), found["label"]

    dataset = Pictures(local=str(place), shuffle=True, batch_size=here.batch)
    loader = DataLoader(dataset, here.batch, **LOADER)
    while True:
        for images, _ in loader:
            yield images


def webdataset(here: Here) -> Iterator[Any]:
    """webdataset: farandole's shards, which are its tars."""
    yield f"webdataset {metadata.version('webdataset')}"
    tars = sorted(str(path) for path in Path(here.shards).glob("*.tar"))
    while True:
        yield from tars_of(tars, here)


def tars_of(urls: list[str], here: Here) -> Iterator[Any]:
    """One pass over the tars, shuffled as webdataset shuffles."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    transform = floats(here.side)
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, int)
    )
    for images, _ in DataLoader(dataset, here.batch, **{**LOADER, "persistent_workers": False}):
        yield images


def litdata(here: Here) -> Iterator[Any]:
    """litdata: chunks of bytes, shuffled."""
    transform = floats(here.side)  # first: some of them import torchvision
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    yield f"litdata {metadata.version('litdata')}"
    place = Path(here.folder, "litdata")
    if not (place / "index.json").exists():
        optimize(fn=_read, inputs=_files(here), output_dir=str(place), chunk_bytes="8MB", num_workers=1)
        multiprocessing.set_start_method("fork", force=True)  # it has set another one

    class Pictures(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            return transform(_decoded(found["image"])), found["label"]

    loader = StreamingDataLoader(Pictures(str(place), shuffle=True), batch_size=here.batch, **LOADER)
    while True:
        for images, _ in loader:
            yield images


def hugging_face(here: Here) -> Iterator[Any]:
    """Hugging Face's datasets: saved to disk, with a transform, shuffled by the DataLoader."""
    transform = floats(here.side)  # first: some of them import torchvision
    import datasets
    from torch.utils.data import DataLoader

    yield f"datasets {metadata.version('datasets')}"
    place = Path(here.folder, "datasets")
    if not place.exists():
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        pictures = [{"image": {"bytes": data, "path": None}, "label": label} for data, label in _pictures(here)]
        datasets.Dataset.from_list(pictures, features=features).save_to_disk(str(place))

    def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [transform(image.convert("RGB")) for image in rows["image"]], "label": rows["label"]}

    loader = DataLoader(
        datasets.load_from_disk(str(place)).with_transform(transformed), here.batch, shuffle=True, **LOADER
    )
    while True:
        for batch in loader:
            yield batch["image"]


def _decoded(data: bytes) -> Any:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(data)).convert("RGB")


def _files(here: Here) -> list[str]:
    return sorted(str(path) for path in Path(here.raw).rglob("*.jpg"))


def _read(file: str) -> dict[str, Any]:
    return {"image": Path(file).read_bytes(), "label": int(Path(file).parent.name.removeprefix("class"))}


def _pictures(here: Here) -> Iterator[tuple[bytes, int]]:
    for file in _files(here):
        found = _read(file)
        yield found["image"], found["label"]
