"""Pictures that are smooth as photos are, so that two ways of making one smaller can be compared."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image


def photo(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    rough = np.random.RandomState(seed).randint(0, 256, (5, 6, 3)).astype(np.uint8)
    return PIL.Image.fromarray(rough).resize((width, height), PIL.Image.Resampling.BICUBIC)


def written(image: PIL.Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
