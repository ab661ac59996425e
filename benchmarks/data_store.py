"""Contestants of `benchmarks/data.py store`: one pass over pictures on an S3 server that is far (`slow_store.py`), with
nothing cached, decoded and cropped.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import fsspec
from data_images import loaded, make_images
from data_kind import Here, Kind
from data_peers import tars_of
from data_torchvision import floats
from slow_store import AWS, BUCKET, Store

URL = f"s3://{BUCKET}/images"


def ours(here: Here) -> Iterator[Any]:
    """By S3's protocol, with an empty cache and torchvision's transforms."""
    import farandole

    yield "s3fs"
    with tempfile.TemporaryDirectory(dir=here.folder) as cache:
        dataset = farandole.ShardedImages(URL, transform=floats(here.side), cache=cache)
        batches = loaded(dataset, here.batch)
        for _ in range(len(dataset) // here.batch):
            yield next(batches)[0]


def webdataset(here: Here) -> Iterator[Any]:
    """Over HTTP, by `curl`, as webdataset reads URLs; it keeps nothing."""
    yield "curl"
    place = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}/images"
    yield from tars_of([f"{place}/{tar.name}" for tar in sorted(Path(here.shards).glob("*.tar"))], here)


def _make(folder: Path, source: Path | None, side: int) -> str:
    return make_images(folder, source, side, shard_size="2MB") + ", from S3, nothing cached"


@contextlib.contextmanager
def _far(folder: Path) -> Generator[None]:
    with Store(folder) as store:
        before = dict(os.environ)
        os.environ |= {**AWS, "AWS_ENDPOINT_URL": store.near}
        prepare = [sys.executable, "-m", "farandole", "data", "prepare", str(folder / "raw"), URL]
        subprocess.run([*prepare, "--shard-size", "2MB"], check=True, stdout=subprocess.DEVNULL)
        files, place = fsspec.core.url_to_fs(URL)
        for tar in files.glob(f"{place}/*.tar"):
            files.chmod(tar, "public-read")  # for who signs nothing
        os.environ["AWS_ENDPOINT_URL"] = store.far
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= before


STORE = Kind(
    make=_make, contestants={"farandole": ours, "webdataset": webdataset}, ours=("farandole",), warm_up=0, beside=_far
)
