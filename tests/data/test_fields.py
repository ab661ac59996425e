"""Fields decoded by their names: what they say, or a ValueError; no program, no memory that they have not."""

from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.formats import fields


def decoded(name: str, data: bytes) -> Any:
    decoder = fields.decoder_of(name, {})
    return data if decoder is None else decoder(data)


def saved(array: Any, **options: Any) -> bytes:
    made = io.BytesIO()
    np.save(made, array, **options)
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "value"),
    [
        ("txt", "é\n".encode(), "é\n"),
        ("a.b.transcript", b"x", "x"),
        ("json", b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("cls", b"12", 12),
        ("id", b" -3\n", -3),
        ("pkl", b"\x80\x04N.", b"\x80\x04N."),
        ("pth", b"PK", b"PK"),
        ("other", b"\xff", b"\xff"),
    ],
)
def test_each_is_what_its_name_says(name: str, data: bytes, value: Any) -> None:
    assert decoded(name, data) == value


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.int16).reshape(2, 3), np.asfortranarray(np.eye(3)), np.float32(2.5), np.zeros((0, 4))],
    ids=["plain", "fortran", "scalar", "empty"],
)
def test_arrays_are_numpy_s(array: Any) -> None:
    found, theirs = decoded("npy", saved(array)), np.load(io.BytesIO(saved(array)))
    assert (found.dtype, found.shape, found.strides) == (theirs.dtype, theirs.shape, theirs.strides)
    assert found.tolist() == theirs.tolist()
    assert found.flags.writeable


def head(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("npy", saved(np.array([{}], dtype=object), allow_pickle=True)),
        ("npy", head("(1 << 40,)")),
        ("npy", head(f"({1 << 40},)")),
        ("npy", head(f"({1 << 40}, {1 << 40})")),
        ("npy", head("(-1,)") + bytes(4)),
        ("npy", head("(2,)") + bytes(4)),
        ("npy", head("(1,)", "|O") + b"\x80\x04N."),
        ("npy", b"\x93NUMPY\x03\x00\x00\x00\x00\x00"),
        ("npy", b"PK\x03\x04"),
        ("npy", b""),
        ("json", b"[" * 100_000),
        ("json", b"{"),
        ("cls", b"9" * 5000),
        ("cls", b"1.5"),
        ("txt", b"\xff"),
    ],
    ids=repr,
)
def test_what_is_not_what_its_name_says_is_an_error_and_takes_no_memory(name: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):  # noqa: PT011  NumPy's words are its own
            decoded(name, data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_arrays_of_objects_are_refused_as_such() -> None:
    with pytest.raises(ValueError, match="pickle"):
        decoded("npy", saved(np.array([{}], dtype=object), allow_pickle=True))


def test_what_a_script_has_goes_before_the_rules() -> None:
    assert fields.decoder_of("seg.png", {"seg.png": len}) is len
    assert fields.decoder_of("seg.png", {"png": len}) is len
    assert fields.decoder_of("seg.png", {"jpg": len}) is fields.image


@pytest.mark.parametrize("header", [b"(", b"'", b"{'descr': ", b"\n \n", b"(" * 4000, b"-" * 9000 + b"1", b"{1: 2}"])
def test_headers_of_arrays_that_are_no_python_value(header: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  NumPy's words are its own
        decoded("npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


@given(name=st.sampled_from(["txt", "json", "cls", "npy", "png"]), data=st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(name: str, data: bytes) -> None:
    with contextlib.suppress(ValueError, PIL.UnidentifiedImageError):
        decoded(name, data)
    with contextlib.suppress(ValueError):
        decoded("npy", b"\x93NUMPY\x01\x00" + data)
