"""Small image folders for tests: noise, so that no two images are equal."""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image

CLASSES = ("ant", "bee", "cat")


def make_folder(folder: Path, *, each: int = 8, size: tuple[int, int] = (40, 30), suffix: str = ".jpg") -> Path:
    """`each` images a class, some of them in folders within the class's."""
    for label, name in enumerate(CLASSES):
        for number in range(each):
            inner = folder / name / ("inner" if number % 3 == 2 else "")
            inner.mkdir(parents=True, exist_ok=True)
            noise = random.Random(label * 1000 + number).randbytes(3 * size[0] * size[1])
            Image.frombytes("RGB", size, noise).save(inner / f"{number:03d}{suffix}")
    return folder


def in_order(folder: Path) -> list[tuple[bytes, int]]:
    """Each image's bytes and label, as torchvision's ImageFolder has them: by folder, then by name."""
    return [
        (file.read_bytes(), label)
        for label, name in enumerate(CLASSES)
        for file in sorted((folder / name).rglob("*.*"), key=lambda path: (str(path.parent), path.name))
    ]
