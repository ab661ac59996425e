"""The fields of a sample are decoded by their names: `x.json` holds JSON. Nothing is ever unpickled.

| last part of the name | value |
| --- | --- |
| txt, text, transcript | str, from UTF-8 |
| json, jsn | the decoded JSON |
| cls, cls2, index, count, id, inx | int |
| npy | a NumPy array; one of Python objects is an error |
| jpg, png, webp, ... (`decoding.IMAGES`) | a PIL image in RGB |

All other fields stay bytes; so do pickles and torch's files, which could run a program.

Invariant: no field makes this process take more memory than the field's length, except images, for which Pillow's own
limit of pixels holds. Content that does not fit the name is a `ValueError`, or an error of Pillow: a bad sample.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from tokenize import TokenError
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from farandole.data.decoding import IMAGES, open_image

Decoder = Callable[[bytes], Any]
_LONGEST_NUMBER = 20  # bytes; 2^63 has 19 digits
_SHOWN = 20


def decoder_of(field: str, own: Mapping[str, Decoder]) -> Decoder | None:
    """Returns the decoder of `field`, like `seg.png`: that in `own` for the whole name or its last part, or the rule's.

    Returns None if the field stays bytes.
    """
    last = field.rpartition(".")[2]
    return own.get(field) or own.get(last) or _RULES.get(last)


def image(data: bytes) -> Any:
    """Returns a PIL image in RGB."""
    with open_image(data) as opened:
        return opened.convert("RGB")


def text(data: bytes) -> str:
    return data.decode()


def number(data: bytes) -> int:
    if len(data) > _LONGEST_NUMBER + 2:
        raise ValueError(f"{data[:_SHOWN]!r}...: {len(data)} bytes are too long for an integer")
    return int(data)


def document(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{data[:_SHOWN]!r}... is not JSON: {error}") from None


def array(data: bytes) -> npt.NDArray[Any]:
    """Returns the array in an npy file.

    Does not use NumPy's own reader, which allocates the memory that the header asks for before it reads the numbers.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    try:
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"an array of NumPy's format {version}; only 1.0 and 2.0 are supported")
    except (TokenError, SyntaxError, TypeError, MemoryError, RecursionError) as error:  # NumPy parses it as Python
        raise ValueError(f"the header of an array of NumPy is damaged: {error}") from None
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled: store numbers instead")
    begin = file.tell()
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data) - begin:
        raise ValueError(f"an array of {dtype} and shape {shape} in {len(data) - begin} bytes")
    flat = (
        np.frombuffer(data, np.uint8, offset=begin).copy().view(dtype)
    )  # a copy: bytes are read-only, and a tensor is not
    return flat.reshape(shape, order="F" if fortran else "C")


_RULES: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("json", "jsn"), document),
    **dict.fromkeys(("cls", "cls2", "index", "count", "id", "inx"), number),
    **dict.fromkeys((name.removeprefix(".") for name in IMAGES), image),
    "npy": array,
}
