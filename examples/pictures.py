"""What the examples on pictures share: reading a picture, and varying it at random. Pillow and torch only.

A picture is a tensor of shape (channels, height, width), bytes as read, floats once normalised. Everything random draws
from torch's global generator, which the run sets before each sample: whoever makes a sample makes the same one.
"""

import io
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image


def existing(path: Path, holds: str) -> Path:
    """`path`, or the end of the script with a word on what it should hold."""
    if not path.exists():
        raise SystemExit(f"{path}: no such file or folder; give the path of {holds}")
    return path


def decode(data: bytes, mode: str = "RGB", size: tuple[int, int] | None = None) -> torch.Tensor:
    """The bytes of a JPEG or PNG as uint8, shape (channels, height, width), resized to (width, height) `size`."""
    with Image.open(io.BytesIO(data)) as image:
        if size is not None:
            image.draft(mode, size)  # a JPEG that is far too large is decoded at half or a quarter of its size
            return channels_first(image.convert(mode).resize(size, Image.Resampling.BILINEAR))
        return channels_first(image.convert(mode))


def channels_first(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def crop_and_flip(picture: torch.Tensor, padding: int) -> torch.Tensor:
    """The field's augmentation of small pictures: moved by up to `padding` pixels, mirrored half the time."""
    height, width = picture.shape[-2:]
    top, left = torch.randint(0, 2 * padding + 1, (2,)).tolist()
    padded = F.pad(picture, (padding, padding, padding, padding))
    cropped = padded[..., top : top + height, left : left + width]
    return cropped.flip(-1) if torch.rand(()) < 0.5 else cropped


def random_crop(data: bytes, size: int, least: float) -> torch.Tensor:
    """A random part of at least `least` of a photo's area, in about its proportions, mirrored half the time.

    Resized to (3, size, size): cut and resized in one go, as bytes.
    """
    with Image.open(io.BytesIO(data)) as image:
        area = torch.empty(()).uniform_(least, 1).item() ** 0.5
        stretch = torch.empty(()).uniform_(0.85, 1.15).item()
        width, height = (image.width * min(1, area * stretch), image.height * min(1, area / stretch))
        left, top = (torch.rand(2) * torch.tensor([image.width - width, image.height - height])).tolist()
        box = (left, top, left + width, top + height)
        cut = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
    picture = channels_first(cut)
    return picture.flip(-1) if torch.rand(()) < 0.5 else picture
