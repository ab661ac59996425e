"""The table's part for files that somebody else may have made: data, checkpoints, a run's record.

Each file is written as it is given, with whatever vouches for it (lengths, digests) made to fit: the file's author can
do that too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import PIL.Image
import torch

from farandole.checkpoint import content
from farandole.checkpoint.store import Manifest, Store
from farandole.cli import reproduce
from farandole.control.run_folder import METRICS, SETTINGS
from farandole.data.formats.mds import MDS
from farandole.data.formats.webdataset import WebDataset
from farandole.data.images import ShardedImages
from farandole.data.index import INDEX, TOKENS_KIND, Index, Shard, TokenIndex
from farandole.data.prepare import webdataset_index
from farandole.data.tokens import Tokens
from farandole.data.transforms import RandomResizedCrop
from farandole.errors import FarandoleError, ShardError
from farandole.plan.shards import Position
from farandole.protocol.coordinator.state import RunSettings
from tests.support import mds_files
from tests.support.tars import array

Seeds = tuple[bytes, ...]
_folder = tempfile.TemporaryDirectory(prefix="farandole-fuzz-")
PLACE = Path(_folder.name)
# of a bad image; it also warns, and warnings are errors here
PILLOW = (
    OSError,
    ValueError,
    SyntaxError,
    UserWarning,
    PIL.Image.DecompressionBombError,
    PIL.Image.DecompressionBombWarning,
)
TAR, IDS, STEM = "shard.tar", "ids.bin", "step-00000007-0123abcd"


def _image(kind: str) -> bytes:
    made = io.BytesIO()
    PIL.Image.new("RGB", (4, 3), (1, 2, 3)).save(made, kind)
    return made.getvalue()


def _tar(**members: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


GOOD = _tar(a_png=_image("PNG"), a_cls=b"1", b_jpg=_image("JPEG"), b_cls=b"0")


def _index(tar: bytes, samples: int = 2) -> bytes:
    shard = Shard(url=TAR, nsamples=samples, filesize=len(tar), md5sum=hashlib.md5(tar).hexdigest())
    return msgspec.json.encode(Index(name="x", classes=("a", "b"), shardlist=(shard,)))


def _token_index() -> bytes:
    shard = Shard(url=IDS, nsamples=16, filesize=32, md5sum=hashlib.md5(bytes(32)).hexdigest())
    return msgspec.json.encode(
        TokenIndex(
            kind=TOKENS_KIND, dtype="uint16", vocabulary=9, end_of_document=8, tokenizer="", tokenizer_hash="",
            documents=1, shardlist=(shard,),
        )
    )  # fmt: skip


def _read(index: bytes, tar: bytes) -> None:
    """All samples, or those of the first hundred: the index may promise any number."""
    (PLACE / INDEX).write_bytes(index)
    (PLACE / TAR).write_bytes(tar)
    try:
        images = ShardedImages(PLACE)
    except FarandoleError:
        return
    for sample in range(min(len(images), 100)):
        for transform in (None, RandomResizedCrop(8)):
            images.transform = transform
            with contextlib.suppress(FarandoleError, *PILLOW):
                images[sample]


def index(data: bytes) -> None:
    _read(data, GOOD)


def shard(data: bytes) -> None:
    _read(_index(data), data)


def tokens(data: bytes) -> None:
    """An index of token shards. Its bytes say what they like of the one file that is there."""
    (PLACE / INDEX).write_bytes(data)
    (PLACE / IDS).write_bytes(bytes(32))
    with contextlib.suppress(FarandoleError):
        found = Tokens(PLACE, 4)
        for sample in range(min(len(found), 100)):
            with contextlib.suppress(ShardError):
                found[sample]


def image(data: bytes) -> None:
    tar = _tar(a_png=data, a_cls=b"1")
    _read(_index(tar, 1), tar)


def fields(data: bytes) -> None:
    """A tar of any fields, as a dataset and as a tar to be indexed."""
    (PLACE / INDEX).write_bytes(_index(data))
    (PLACE / TAR).write_bytes(data)
    found = WebDataset(PLACE)
    for sample in range(2):
        with contextlib.suppress(FarandoleError, *PILLOW):
            found[sample]
    read = webdataset_index._read(str(PLACE), webdataset_index.Tar(TAR, len(data), ""))
    assert (read.shard is None) == bool(read.bad)


FIELDS = _tar(a_json=b'{"n": [1]}', a_cls=b"1", a_npy=array([[1, 2]]), b_txt=b"x", b_seg=b"y")


def mds(data: bytes) -> None:
    """An index and a shard of MDS. A zero byte divides the two."""
    place = PLACE / "mds"
    place.mkdir(exist_ok=True)
    said, _, stored = data.partition(b"\0")
    (place / INDEX).write_bytes(said)
    (place / "shard.00000.mds").write_bytes(stored)
    try:
        found = MDS(place)
    except FarandoleError:
        return
    for sample in range(min(len(found), 100)):
        with contextlib.suppress(FarandoleError, *PILLOW):
            found[sample]


def _mds() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        place = mds_files.write(Path(folder), [[mds_files.encoded(n) for n in range(2)]])
        return (place / INDEX).read_bytes() + b"\0" + (place / "shard.00000.mds").read_bytes()


MANIFEST = Manifest(
    epoch=1, offset=2, step=7, whole=True, run="r", worker="w1", seed=0, facts=(("torch", "2"), ("n", "1")), time=1.5
)


def _checkpoint() -> bytes:
    made = io.BytesIO()
    ours = {"format": 1, "position": [1, 2, 7], "history": [[0, 2]]}
    torch.save({"model": {"weight": torch.ones(2, 3)}, content.OURS: ours}, made)
    return made.getvalue()


def manifest(data: bytes) -> None:
    (PLACE / f"{STEM}.json").write_bytes(data)
    (PLACE / f"{STEM}.pt").write_bytes(b"state")
    store = Store(str(PLACE))
    with contextlib.suppress(FarandoleError):
        found = store.manifest(STEM)
        with store.open_verified(STEM, found) as file:
            assert file.read() == b"state"


def checkpoint(data: bytes) -> None:
    with contextlib.suppress(FarandoleError):
        position, state = content.load(io.BytesIO(data), STEM)
        assert isinstance(position, Position)
        assert isinstance(state, dict)


LINES = (
    b'{"event":"view","time":1.0,"view":1,"members":["w1"],"round":0,"step":0,"cause":"first view"}',
    b'{"step":0,"epoch":0,"samples":96,"loss":2.3,"view":1,"workers":1,"total":150}',
    b'{"event":"log","step":0,"accuracy":0.9}',
    b'{"event":"saved","time":2.0,"worker":"w1","path":"/x.pt","whole":true}',
    b'{"event":"resumed","time":2.0,"worker":"w1","path":"/x.pt","step":0}',
    b'{"event":"finished","time":2.0,"fingerprint":"f","equal":true}',
    b'{"event":"over","time":2.0,"code":0,"reason":"the script has run to its end"}',
)
METRICS_FILE = b"\n".join(LINES) + b"\n"


def record(data: bytes) -> None:
    """A run's settings and lines, as `farandole replay` reads them. A zero byte divides the two."""
    settings, _, lines = data.partition(b"\0")
    (PLACE / SETTINGS).write_bytes(settings)
    (PLACE / METRICS).write_bytes(lines)
    with contextlib.suppress(FarandoleError):
        reproduce.settings_of(PLACE)
        found = reproduce._lines(PLACE)
        reproduce._fingerprint(found)
        reproduce.history_of(found, PLACE)


RECORD = msgspec.json.encode(RunSettings(run="r")) + b"\0" + METRICS_FILE

FILES: dict[str, tuple[Callable[[bytes], None], Seeds]] = {
    "index": (index, (_index(GOOD), _index(GOOD, 10**6))),
    "shard": (shard, (GOOD,)),
    "tokens": (tokens, (_token_index(),)),
    "image": (image, tuple(_image(kind) for kind in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "PPM", "WEBP"))),
    "fields": (fields, (FIELDS, GOOD)),
    "mds": (mds, (_mds(),)),
    "manifest": (manifest, (msgspec.json.encode(MANIFEST),)),
    "checkpoint": (checkpoint, (_checkpoint(),)),
    "record": (record, (RECORD,)),
}
