"""Which codec a resumed run may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.cli.resume import _codec
from farandole.errors import UsageError


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [
        (None, "bf16", "bf16"), (None, "none", "none"), ("bf16+zstd", "bf16", "bf16+zstd"),
        ("fp16", "fp16+zstd", "fp16"), ("float32+zstd", "none", "float32+zstd"), ("none", "float32+zstd", "none"),
        ("auto", "none", "auto"), ("none", "auto", "none"), ("auto", "float32+zstd", "auto"),
        ("bf16+auto", "bf16", "bf16+auto"),
        ("fp16+zstd", "fp16+auto", "fp16+zstd"),
    ],
)  # fmt: skip
def test_the_format_stays_and_the_compression_may_change(given: str | None, before: str, after: str) -> None:
    assert _codec(given, before, Path("run")) == after


@pytest.mark.parametrize(
    ("given", "before"),
    [
        ("fp16", "bf16"),
        ("none", "bf16+zstd"),
        ("bf16", "none"),
        ("bf16+zstd", "float32+zstd"),
        ("auto", "bf16"),
        ("bf16", "auto"),
        ("bf16+auto", "fp16+auto"),
    ],
)
def test_another_format_is_an_error_with_both(given: str, before: str) -> None:
    with pytest.raises(UsageError) as error:
        _codec(given, before, Path("run"))
    assert given in str(error.value)
    assert before in str(error.value)
