"""Opens image files with Pillow, in the allowed formats only.

Invariant: for an untrusted file, Pillow runs the decoder of one of `FORMATS`, for at most as many pixels as Pillow
itself warns of; the same limit holds for any other decoder (`transforms.py`). Pillow knows more than forty formats and
detects them by the content, not by the name: it passes a file with the content of an EPS to Ghostscript, an
interpreter. And a few bytes may claim to be billions of pixels, for which a decoder allocates memory before it decodes
the first.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from farandole.errors import UsageError
from farandole.platform.extras import how_to_install

if TYPE_CHECKING:
    import PIL.Image


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")  # of IMAGES, as Pillow calls them
SUFFIXES = {name: f".{name.lower()}" for name in FORMATS} | {"JPEG": ".jpg", "MPO": ".jpg"}
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"\x00\x00\x00\x00IEND\xaeB`\x82", "GIF": b";"}


def require_pillow() -> None:
    """Raises `UsageError` if Pillow is not installed; call it before work begins, not at the first image."""
    if find_spec("PIL") is None:
        raise UsageError(f"images are decoded with Pillow, which is not installed: {how_to_install('images')}")


def open_image(data: bytes) -> PIL.Image.Image:
    """Opens the image in `data`: reads its header, but not its pixels.

    Raises:
        UsageError: Pillow is not installed.
        PIL.UnidentifiedImageError: the format is none of FORMATS.
        PIL.Image.DecompressionBombError: more pixels than PIL.Image.MAX_IMAGE_PIXELS, which the user may set.
        Exception: any error that Pillow raises for a bad header.
    """
    try:
        import PIL.Image
    except ImportError:
        require_pillow()
        raise
    image: Any = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    try:
        check_pixels(image.height, image.width, data)
    except PIL.Image.DecompressionBombError:
        image.close()
        raise
    return image


def check_pixels(height: int, width: int, data: bytes) -> None:
    """Checks the size of the image in `data`; call it before a decoder allocates memory for that many pixels.

    Raises:
        PIL.Image.DecompressionBombError: more than PIL.Image.MAX_IMAGE_PIXELS.
    """
    import PIL.Image

    most = PIL.Image.MAX_IMAGE_PIXELS
    if most is not None and width * height > most:
        raise PIL.Image.DecompressionBombError(
            f"an image of {width} x {height} pixels in {len(data)} bytes, and at most {most} pixels are decoded; if "
            f"yours are that large, raise PIL.Image.MAX_IMAGE_PIXELS"
        )


def ends_as_it_should(data: bytes, kind: str | None) -> bool:
    """Returns True if `data` has the end of an image of Pillow's format `kind`; a truncated one does not have it.

    Returns False for formats without a fixed end.
    """
    if kind == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return kind in _ENDS and data.endswith(_ENDS[kind])
