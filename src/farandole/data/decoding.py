"""Image files, opened by Pillow as what they may be and nothing else.

Invariant: of a file that somebody else made, Pillow runs the decoder of one of `FORMATS`, for at most as many
pixels as Pillow itself warns of; so does any other decoder (`transforms.py`). Pillow knows more than forty formats
and looks at the content for which one it is, not at the name: what is EPS by its content it hands to Ghostscript,
an interpreter. And a few bytes may claim to be billions of pixels, for which memory is taken before the first is
decoded.
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
    """Raises `UsageError` where Pillow is not installed: before anything is begun, not at the first image."""
    if find_spec("PIL") is None:
        raise UsageError(f"images are decoded with Pillow, which is not installed: {how_to_install('images')}")


def open_image(data: bytes) -> PIL.Image.Image:
    """The image in `data`, its head read and its pixels not.

    Raises:
        UsageError: Pillow is not installed.
        PIL.UnidentifiedImageError: it is none of FORMATS.
        PIL.Image.DecompressionBombError: more pixels than PIL.Image.MAX_IMAGE_PIXELS, which is the user's to set.
        Exception: whatever Pillow raises of a bad head.
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
    """Whoever decodes `data`: before memory is taken for that many pixels.

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
    """Whether `data` has the end that an image of Pillow's format `kind` has: one that was cut off has not. False of
    formats that have none.
    """
    if kind == "WEBP":
        return len(data) >= 8 + int.from_bytes(data[4:8], "little")
    return kind in _ENDS and data.endswith(_ENDS[kind])
