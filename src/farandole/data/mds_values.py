"""Values of MDS columns, decoded by the encodings that the format's index names. Nothing is unpickled.

| encoding | value |
| --- | --- |
| bytes, str, json | bytes, str, what the JSON says |
| int, str_int, str_float, str_decimal | int, int, float, Decimal |
| uint8 ... int64, float16 ... float64 | a NumPy scalar |
| ndarray, ndarray:DTYPE, ndarray:DTYPE:SHAPE | a NumPy array |
| jpeg, png, pil | a PIL image in the mode that it has |

`pkl` has no decoder here: a pickle can run any program.

Invariant: a value takes no more memory than its bytes, images apart, for which Pillow's limit of pixels counts; what is
not what its encoding says is a `ValueError`, or what Pillow raises.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from farandole.data import fields
from farandole.data.decoding import open_image

Decoder = Callable[[bytes], Any]
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "I;16")


def decoder_of(encoding: str) -> Decoder | None:
    """What decodes values of `encoding`; None where there is nothing that does."""
    name, _, options = encoding.partition(":")
    if name == "ndarray":
        return _array_of(options)
    return None if options else _DECODERS.get(name)


def _array_of(options: str) -> Decoder | None:
    kind, _, extents = options.partition(":")
    if kind and kind not in _SCALARS:
        return None
    try:
        shape = tuple(int(extent) for extent in extents.split(",")) if extents else None
    except ValueError:
        return None
    return functools.partial(_array, kind, shape)


def _array(kind: str, shape: tuple[int, ...] | None, data: bytes) -> npt.NDArray[Any]:
    """`kind` and `shape` as the index has them; what it has not is at the head of the value."""
    at = 0
    try:
        if not kind:
            kind, at = _DTYPES[data[0]], 1
        if shape is None:
            axes, wide = data[at] >> 2, 1 << (data[at] & 3)
            begin, at = at + 1, at + 1 + axes * wide
            if at > len(data):
                raise IndexError
            shape = tuple(int.from_bytes(data[n : n + wide], "little") for n in range(begin, at, wide))
    except (IndexError, KeyError):
        raise ValueError(f"{data[:8]!r} is no head of an array of {len(data)} bytes") from None
    dtype = np.dtype(kind).newbyteorder("<")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - at:
        raise ValueError(f"an array of {kind} and shape {shape} in {len(data) - at} bytes")
    return np.frombuffer(data, dtype, offset=at).astype(np.dtype(kind)).reshape(shape)  # a copy: bytes can't be written


def _scalar(kind: str, data: bytes) -> Any:
    return _array(kind, (1,), data)[0]


def _decimal(data: bytes) -> Decimal:
    try:
        return Decimal(data.decode())
    except InvalidOperation:
        raise ValueError(f"{data[:20]!r} is no decimal number") from None


def _image(data: bytes) -> Any:
    with open_image(data) as opened:
        opened.load()
        return opened


def _pixels(data: bytes) -> Any:
    """`width, height, length of the mode` as uint32, the mode, and the pixels as Pillow has them in memory."""
    import PIL.Image

    if len(data) < 12:
        raise ValueError(f"{len(data)} bytes are no image")
    width, height, length = struct.unpack_from("<III", data)
    mode = data[12 : 12 + length].decode()
    pixels = data[12 + length :]
    if mode not in _MODES or min(width, height) < 1 or (width * height + 7) // 8 > len(pixels):
        raise ValueError(f"an image of {width} x {height} pixels, mode {mode[:8]!r}, in {len(pixels)} bytes")
    return PIL.Image.frombytes(mode, (width, height), pixels)


def _integer(data: bytes) -> int:
    return int(_scalar("int64", data))


def _digits(data: bytes) -> int:
    return int(data.decode())


def _float(data: bytes) -> float:
    return float(data.decode())


_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "str": fields.text,
    "json": fields.document,
    "int": _integer,
    "str_int": _digits,
    "str_float": _float,
    "str_decimal": _decimal,
    "jpeg": _image,
    "png": _image,
    "pil": _pixels,
    **{kind: functools.partial(_scalar, kind) for kind in _SCALARS},
}
