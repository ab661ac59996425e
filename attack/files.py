"""What a file's author may hand to a run: shards of images and checkpoints, each made to do harm to who reads it.

Each function writes into a folder and returns what is to be given to the run. The digests fit: who makes a file makes
the index, or the manifest, that vouches for it. Nothing here looks at what comes of it.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

CLAIMED = 1 << 40  # bytes, where there are a few thousand
WIDE = 50_000  # pixels, by as many: 7.5 GB as RGB, in 70 bytes of PNG
FACTS = (("torch version", "1"), ("samples in the data", "9"))

# --- shards ----------------------------------------------------------------------------------------------------


def entry(name: str, content: bytes, claimed: int | None = None) -> bytes:
    """One file of a tar, whose header says that it has `claimed` bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(content) if claimed is None else claimed
    form = tarfile.GNU_FORMAT  # a number of any size, and below zero
    return info.tobuf(form) + content + bytes(-len(content) % 512)


def shard(folder: Path, entries: Sequence[bytes], samples: int, **said: Any) -> Path:
    """A folder of one shard, whose index fits but for what is `said` otherwise of it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = b"".join(entries) + bytes(1024)
    (folder / "shard.tar").write_bytes(content)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    one = {"url": "shard.tar", "nsamples": samples, "filesize": len(content), "md5sum": digest, **said}
    (folder / "index.json").write_bytes(msgspec.json.encode({"shardlist": [one]}))
    return folder


def images(folder: Path, contents: Sequence[bytes], **said: Any) -> Path:
    """A folder of one shard with these files as its images, called JPEG whatever they are."""
    entries = [
        part
        for number, content in enumerate(contents)
        for part in (entry(f"{number:09d}.jpg", content), entry(f"{number:09d}.cls", b"0"))
    ]
    return shard(folder, entries, len(contents), **said)


def postscript() -> bytes:
    """An EPS by its content, for which Pillow calls `gs` if it is asked to find out by itself what a file is."""
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def bomb(side: int = WIDE) -> bytes:
    """A PNG that says it has `side` by `side` pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def jpeg_bomb(side: int = 65_000) -> bytes:
    """A JPEG that says it has `side` by `side` pixels."""
    import PIL.Image

    written = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(written, "JPEG")
    good = written.getvalue()
    extents = good.index(b"\xff\xc0") + 5  # behind the marker, the length and the precision
    return good[:extents] + struct.pack(">HH", side, side) + good[extents + 4 :]


def picture() -> bytes:
    """A good one."""
    import PIL.Image

    written = io.BytesIO()
    PIL.Image.new("RGB", (8, 8)).save(written, "PNG")
    return written.getvalue()


def claimed_image(folder: Path, good: int = 1, behind: int = 0) -> Path:
    """An image that claims a terabyte, after `good` ones, with `behind` others after it that nobody can find."""
    entries = [part for n in range(good) for part in (entry(f"a{n}.jpg", picture()), entry(f"a{n}.cls", b"0"))]
    entries += [entry("b.jpg", picture(), CLAIMED), entry("b.cls", b"0")]
    entries += [part for n in range(behind) for part in (entry(f"c{n}.jpg", picture()), entry(f"c{n}.cls", b"0"))]
    return shard(folder, entries, good + 1 + behind)


def claimed_label(folder: Path) -> Path:
    return shard(folder, [entry("a.jpg", picture()), entry("a.cls", b"0", CLAIMED)], 1)


def leading_back(folder: Path) -> Path:
    """An entry of less than no bytes: the one after it is the one before it."""
    return shard(folder, [entry("a.jpg", picture()), entry("a.cls", b"0"), entry("b.jpg", b"", -2048)], 2)


def outside(folder: Path, secret: Path) -> Path:
    """An index that leads out of its folder, to a file of the reader's."""
    found = secret.read_bytes()
    digest = hashlib.md5(found, usedforsecurity=False).hexdigest()
    return images(folder, [picture()], url=f"../{secret.name}", filesize=len(found), md5sum=digest)


# --- checkpoints -----------------------------------------------------------------------------------------------


def honest(value: float = 0.0, tensors: int = 1) -> dict[str, Any]:
    """What a checkpoint holds, as torch.save is given it."""
    ours = {"format": 1, "position": [0, 0, 3], "buffers": [], "requires_grad": [True], "origin": "o"}
    return {"model": {f"w{n}": torch.full((16,), value) for n in range(tensors)}, "farandole": ours}


def checkpoint(folder: Path, content: bytes, step: int = 3, *, claims: Mapping[str, Any] | None = None) -> Path:
    """A folder of checkpoints with these bytes as the one of `step`, whose manifest fits but for what it `claims`."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"step-{step:08d}-{hashlib.sha256(content).hexdigest()[:8]}"
    (folder / f"{stem}.pt").write_bytes(content)
    manifest = {
        "epoch": 0, "offset": 0, "step": step, "whole": True, "run": "r", "worker": "w1", "seed": 3, "facts": FACTS,
        "time": 0.0, "size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "finite": True,
    } | dict(claims or {})  # fmt: skip
    (folder / f"{stem}.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def saved(state: Any) -> bytes:
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def structured(structure: bytes) -> bytes:
    """An archive of torch.save with another pickle."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(honest()))) as before, zipfile.ZipFile(written, "w") as after:
        for each in before.infolist():
            after.writestr(each.filename, structure if each.filename.endswith("data.pkl") else before.read(each))
    return written.getvalue()


def beside(extra: bytes) -> bytes:
    """A good checkpoint that holds one thing more, made by these operations."""
    structure = structure_of(honest())
    assert structure.endswith(b"u.")
    return structured(structure[:-2] + _text("more") + extra + b"u.")


def with_entry(name: str) -> bytes:
    """One that holds a file more than torch.save writes, of which torch would do something else."""
    written = io.BytesIO(structured(structure_of(honest())))
    with zipfile.ZipFile(written, "a") as archive:
        archive.writestr(name, b"x")
    return written.getvalue()


def deflated(inflated_bytes: int = 1 << 30) -> bytes:
    """A thousandth of what torch makes of it; only the numbers are deflated."""
    numel = b"J" + struct.pack("<i", inflated_bytes // 4)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(honest()))) as before, zipfile.ZipFile(written, "w") as after:
        for each in before.infolist():
            if each.filename != "archive/data/0":
                after.writestr(each.filename, before.read(each).replace(b"K\x10", numel))
                continue
            info = zipfile.ZipInfo(each.filename)
            info.compress_type = zipfile.ZIP_DEFLATED
            with after.open(info, "w", force_zip64=True) as file:
                for _ in range(inflated_bytes >> 20):
                    file.write(bytes(1 << 20))
    return written.getvalue()


def running(command: str) -> bytes:
    """A pickle that runs a command."""
    return structured(b"\x80\x02cposix\nsystem\n" + _text(command) + b"\x85R.")


def allocating(size: int = 1 << 36) -> bytes:
    """A call that torch allows, and that takes as much memory as it likes."""
    return structured(b"\x80\x02cbuiltins\nbytearray\n\x8a\x08" + struct.pack("<q", size) + b"\x85R.")


def storing(size: int = 1 << 34) -> bytes:
    """The same by the memory of a tensor, which has to be named and need not be called."""
    return beside(b"ctorch\nFloatStorage\n\x8a\x08" + struct.pack("<q", size) + b"\x85R")


def encoding() -> bytes:
    """A text in an encoding that takes its time, in the place of bytes."""
    return beside(b"c_codecs\nencode\n" + _text("x") + _text("idna") + b"\x86R")


def nesting(depth: int = 40) -> bytes:
    """Each list holds the one before it twice: a few hundred bytes, 2^depth objects."""
    lists = b"](]q\x80"
    for level in range(128, 128 + depth):
        lists += b"]q" + bytes([level + 1]) + b"(h" + bytes([level]) + b"h" + bytes([level]) + b"e"
    return beside(lists + b"e")


def deep(depth: int = 200_000) -> bytes:
    """A list in a list, and so on."""
    return beside(b"]" * depth + b"a" * (depth - 1))


def viewing(numel: int = 1 << 38) -> bytes:
    """A tensor of a terabyte, all of whose numbers are the same one."""
    structure = structure_of(honest())
    # offset 0, shape (16,), stride (1,)
    one, wide = b"K\x00K\x10\x85q", b"K\x00\x8a\x08" + struct.pack("<q", numel) + b"\x85q"
    at = structure.index(one)
    rest = structure[at + len(one) :].replace(b"K\x01\x85", b"K\x00\x85", 1)
    return structured(structure[:at] + wide + rest)


def structure_of(state: Any) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(state))) as archive:
        return archive.read("archive/data.pkl")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def overlapping() -> bytes:
    """Ten entries of one place: each counts once in the directory, and once more in memory."""
    content = bytearray(saved(honest(tensors=10)))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        first = archive.getinfo("archive/data/0").header_offset
        offsets = [archive.getinfo(f"archive/data/{n}").header_offset for n in range(1, 10)]
        start = archive.start_dir
    for offset in offsets:
        at = content.index(struct.pack("<I", offset), start)
        content[at : at + 4] = struct.pack("<I", first)
    return bytes(content)


BAD_CHECKPOINTS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"this is no checkpoint\n" * 100,
    "half of one": lambda: saved(honest())[:-200],
    "one with something behind it": lambda: saved(honest()) + b"more",
    "one with something before it": lambda: b"more" + saved(honest()),
    "deflated": lambda: deflated(1 << 28),
    "entries over each other": overlapping,
    "what torch.jit would load": lambda: with_entry("archive/constants.pkl"),
    "a command": lambda: running("touch /tmp/farandole-was-here"),
    "a call that takes memory": allocating,
    "a tensor's memory without a tensor": storing,
    "a text in another encoding": encoding,
    "lists that hold each other": nesting,
    "lists in lists": deep,
    "a tensor that is all views": viewing,
    "a tensor, no dict": lambda: saved(torch.zeros(3)),
    "another's state_dict": lambda: saved({"weight": torch.zeros(3)}),
    "a position that is none": lambda: saved(honest() | {"farandole": honest()["farandole"] | {"position": [1]}}),
    "buffers that are none": lambda: saved(honest() | {"farandole": honest()["farandole"] | {"buffers": "x"}}),
    "no structure": lambda: structured(b""),
    "half a structure": lambda: structured(structure_of(honest())[:-40]),
    "the older form of torch.save": lambda: _older(honest()),
}


def _older(state: Any) -> bytes:
    written = io.BytesIO()
    torch.save(state, written, _use_new_zipfile_serialization=False)
    return written.getvalue()


# --- all of them -----------------------------------------------------------------------------------------------

BAD_SHARDS: dict[str, Callable[[Path], Path]] = {
    "an image that is a program": lambda folder: images(folder / "eps", [picture(), postscript()]),
    "more pixels than memory": lambda folder: images(folder / "pixels", [picture(), bomb()]),
    "more pixels than memory, as JPEG": lambda folder: images(folder / "jpeg", [picture(), jpeg_bomb()]),
    "as many as Pillow takes": lambda folder: images(folder / "fewer pixels", [picture(), bomb(13_000)]),
    "an image of a terabyte": lambda folder: claimed_image(folder / "image"),
    "a label of a terabyte": lambda folder: claimed_label(folder / "label"),
    "an entry that leads back": lambda folder: leading_back(folder / "back"),
    "an index that leads out": lambda folder: outside(folder / "out", folder / "precious"),
}
