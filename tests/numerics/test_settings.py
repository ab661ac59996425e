"""Torch's settings as facts: each is seen when it changes, can be put back, and is watched over the steps of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from farandole.numerics import settings
from farandole.numerics.settings import Alterations

DENORMALS, DTYPE = "setting denormals flushed", "setting default dtype"
OTHERS = {
    "intra-op threads": "3", DTYPE: "float64", DENORMALS: "on",
    "setting deterministic algorithms": "warn",
    "setting precision of products": "ieee",
    "setting precision of products, oneDNN": "bf16",
    "setting precision of convolutions, oneDNN": "bf16",
    "setting precision of recurrent layers, oneDNN": "bf16",
    "setting precision of products, CUDA": "tf32",
    "setting precision of convolutions, cuDNN": "ieee",
    "setting precision of recurrent layers, cuDNN": "ieee",
    "setting sums in bfloat16, CUDA": "off",
    "setting sums in float16, CUDA": "off",
    "setting oneDNN": "off",
    "setting oneDNN deterministic": "on",
    "setting cuDNN": "off",
    "setting cuDNN benchmark": "on",
    "setting cuDNN deterministic": "on",
    "setting attention by flash kernels": "off",
    "setting attention by memory-efficient kernels": "off",
    "setting attention by plain kernels": "off",
    "setting autocast on CPU": "float16",
    "setting autocast on CUDA": "bfloat16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    torch.set_num_threads(1)
    before = dict(settings.setting_facts())
    yield
    for name, value in before.items():
        settings.put(name, value)
    assert dict(settings.setting_facts()) == before, "each can be put back"


def test_each_is_read_by_itself_and_can_be_put() -> None:
    before = dict(settings.setting_facts())
    assert set(OTHERS) == set(before)
    for name, value in OTHERS.items():
        assert before[name] != value
        settings.put(name, value)
        changed = {n: v for n, v in settings.setting_facts() if before[n] != v}
        assert changed.pop(name) == value
        assert name == "setting precision of products" or not changed, "that one is inherited by others"
        settings.put(name, before[name])
        for inherited in changed:
            settings.put(inherited, before[inherited])
    settings.put("setting of another version", "on")  # not known here


def test_what_scripts_call_shows() -> None:
    def seen(name: str) -> str:
        return dict(settings.setting_facts())[name]

    torch.set_float32_matmul_precision("medium")
    assert seen("setting precision of products, oneDNN") == "bf16"
    torch.use_deterministic_algorithms(True)
    assert seen("setting deterministic algorithms") == "on"
    torch.set_flush_denormal(True)
    assert seen(DENORMALS) == "on"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert seen("setting autocast on CPU") == "bfloat16"
    assert seen("setting autocast on CPU") == "off"
    for name, value in (("CUDA", "none"), ("oneDNN", "none")):
        settings.put(f"setting precision of products, {name}", value)


def test_flushing_is_each_threads_own() -> None:
    torch.set_flush_denormal(True)
    seen: list[bool] = []

    def other() -> None:
        settings.flush_as(False)
        seen.append(settings.flushes())
        settings.flush_as(True)
        seen.append(settings.flushes())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False, True]
    assert settings.flushes()
    assert float(torch.tensor(2.0**-126) * 0.5) == 0.0


def test_a_watch_tells_each_change_once() -> None:
    watch = Alterations()
    assert watch.look() == []
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(True)
    assert watch.look() == [(DTYPE, "float32", "float64"), (DENORMALS, "off", "on")]
    assert watch.look() == []
    assert watch.altered == {DTYPE: "float64", DENORMALS: "on"}
    torch.set_default_dtype(torch.float32)
    assert watch.look() == [(DTYPE, "float64", "float32")]
    assert watch.altered == {DENORMALS: "on"}
    assert watch.known_values == dict(settings.setting_facts())


def test_who_joins_takes_over_what_was_altered_and_nothing_else() -> None:
    torch.set_flush_denormal(True)  # by the script, before it asked in
    joiner = Alterations()
    joiner.take({DTYPE: "float64"})
    assert torch.get_default_dtype() == torch.float64
    assert settings.flushes()
    assert joiner.look() == []
    assert joiner.altered == {DTYPE: "float64"}
    joiner.take({})  # another state, of before
    assert torch.get_default_dtype() == torch.float32
    assert joiner.altered == {}
