"""State that can't travel is refused by its path; bytes that are no state are an error of ours, never a crash."""

from __future__ import annotations

import enum
from collections import defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.collective.state_transfer import decode, encode, restore
from farandole.errors import FarandoleError, UnknownState

# --- what can't be sent ----------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "builtins.object"),
        (lambda: None, "builtins.function"),
        ({1, 2}, "builtins.set"),
        (np.float32(1), "numpy.float32"),
        (np.zeros(2), "numpy.ndarray"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (defaultdict(list), "collections.defaultdict"),
        (torch.float32, "torch.dtype"),
        (torch.Generator(), "torch._C.Generator"),
        (1j, "builtins.complex"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_need_pickling_is_refused_with_its_path(value: Any, named: str) -> None:
    state = {"objects": {"optimizer": {"state": {0: [1.0, value]}}}}
    with pytest.raises(UnknownState) as caught:
        encode(state)
    text = str(caught.value)
    assert text.startswith("state['objects']['optimizer']['state'][0][1]: ")
    assert named in text


def test_keys_and_dtypes_that_cannot_be_sent_are_refused_with_their_path() -> None:
    with pytest.raises(UnknownState, match=r"^state\['a'\]: .*\(1, 2\)"):
        encode({"a": {(1, 2): 0}})
    with pytest.raises(UnknownState, match=r"^state\['q'\]: .*torch\.uint16.*float64"):
        encode({"q": torch.zeros(2, dtype=torch.uint16)})


@pytest.mark.parametrize(
    "value",
    [1 << 64, -(1 << 63) - 1, "\ud800", torch.eye(3).to_sparse()],
    ids=["2^64", "-2^63-1", "half a character", "sparse"],
)
def test_values_that_the_format_has_no_place_for_are_refused_with_their_path(value: Any) -> None:
    with pytest.raises(UnknownState, match=r"state\['a'\]"):
        encode({"a": value})


# --- what a stranger might send --------------------------------------------------------------------------------

ALLOWED = (msgspec.MsgspecError, FarandoleError)
NESTED = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 2**64 - 1),
        st.text(max_size=2),
        st.sampled_from(["T", "C", "d", "l", "t", "float32"]),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=60), NESTED.map(msgspec.msgpack.encode)), st.integers(0, 200))
def test_arbitrary_bytes_never_raise_anything_but_ours(skeleton: bytes, size: int) -> None:
    payload = torch.zeros(size, dtype=torch.uint8)
    for action in (lambda: decode(skeleton, []), lambda: restore(skeleton, payload)):
        try:
            action()
        except ALLOWED:
            continue


@pytest.mark.parametrize(
    "skeleton",
    [
        [],
        ["l"],
        ["l", 3],
        ["T"],
        ["T", "float99", [1]],
        ["T", "float32", [1 << 40]],
        ["d", [[[], 1]]],
        ["d", [[1]]],
        ["x", []],
    ],
    ids=str,
)
def test_a_skeleton_that_is_none_is_an_error_of_ours(skeleton: Any) -> None:
    with pytest.raises(ALLOWED):
        restore(msgspec.msgpack.encode(skeleton), torch.zeros(64, dtype=torch.uint8))


def test_a_skeleton_nested_beyond_reason_is_an_error_of_ours() -> None:
    with pytest.raises(ALLOWED):
        restore(b"\x92\xa1l\x91" * 100_000 + b"\x01", torch.zeros(0, dtype=torch.uint8))
