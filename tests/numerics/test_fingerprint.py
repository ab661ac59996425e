"""The numeric fingerprint: the same whatever a script has done before; it leaves no trace, and sees kernels."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from farandole.numerics import settings
from farandole.numerics.fingerprint import POOL, Inputs, fingerprint

CPU = torch.device("cpu")
TAKEN = """
import json, sys
import torch
torch.set_num_threads(1)
from farandole.numerics.fingerprint import fingerprint
print(json.dumps(dict(fingerprint(torch.device("cpu")))))
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def taken(**environ: str) -> dict[str, str]:
    """As a new process computes it."""
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_it_is_the_same_again_and_in_another_process() -> None:
    Image.init()
    here = dict(fingerprint(CPU))
    assert dict(fingerprint(CPU)) == here
    assert len(here) > 50
    assert all(len(value) == 16 and int(value, 16) < 2**63 for value in here.values())
    there = taken()
    assert there == {name: value for name, value in here.items() if name in there}
    assert {name for name in here if name not in there} == {
        "decoder JPEG of 83x61, resized to 32x40", "decoder PNG of 83x61, resized to 32x40",
    }, "images are decoded where a decoder is loaded"  # fmt: skip


def test_almost_every_operation_gives_something_else() -> None:
    values = list(dict(fingerprint(CPU)).values())
    assert len(set(values)) == len(values)


class OtherKernels(TorchDispatchMode):
    """A machine on which `operator` gives something else, all of it or the result of that number."""

    def __init__(self, operator: Any, number: int | None = None) -> None:
        super().__init__()
        self._operator, self._number = operator, number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        within = torch._C._current_graph_task_id() >= 0
        if func is not self._operator or within is not ("backward" in str(func)):
            return results
        if self._number is None:
            return results * 1.5
        return tuple(x if x is None or n != self._number else x * 1.5 for n, x in enumerate(results))


CONVOLUTION = torch.ops.aten.convolution_backward.default


@pytest.mark.parametrize(
    ("operator", "number", "operations"),
    [
        (torch.ops.aten.mm.default, None, "operation matmul of "),
        (torch.ops.aten.gelu_backward.default, None, "operation gelu"),
        (torch.ops.aten._softmax_backward_data.default, None, "operation softmax over "),
        (CONVOLUTION, 0, "operation .*convolution"),
        (CONVOLUTION, 1, "operation .*convolution"),
        (CONVOLUTION, 2, "operation convolution [0-9]x[0-9] of "),
    ],
)
def test_results_and_each_gradient_count_by_themselves(operator: Any, number: int | None, operations: str) -> None:
    """What a product gives does not show in its gradients, nor do these in each other."""
    expected = dict(fingerprint(CPU))
    with OtherKernels(operator, number):
        found = dict(fingerprint(CPU))
    changed = {name for name in expected if found[name] != expected[name]}
    assert changed == {name for name in expected if re.match(operations, name)}


def test_nothing_of_the_scripts_is_touched() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    drawn = (torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random())
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    before = (list(settings.setting_facts()), torch.get_num_threads(), torch.is_grad_enabled())
    dict(fingerprint(CPU))
    assert (list(settings.setting_facts()), torch.get_num_threads(), torch.is_grad_enabled()) == before
    assert (torch.rand(4).tolist(), np.random.rand(4).tolist(), random.random()) == drawn


def test_what_a_script_has_in_force_around_it_does_not_show() -> None:
    expected = dict(fingerprint(CPU))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            assert dict(fingerprint(CPU)) == expected
        with torch.inference_mode():
            assert dict(fingerprint(CPU)) == expected
    finally:
        torch.set_default_dtype(before)


def test_a_setting_that_changes_bits_shows_in_the_operations_that_it_changes() -> None:
    expected = dict(fingerprint(CPU))
    try:
        torch.set_float32_matmul_precision("medium")
        changed = [name for name, value in fingerprint(CPU) if expected[name] != value]
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.cuda.matmul.fp32_precision = "none"
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert "operation matmul of 64x1024 by 1024x512" in changed


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_the_kernels_of_another_machine_show() -> None:
    """As far as a switch of MKL's makes one of this machine."""
    plain, other = taken(), taken(MKL_CBWR="COMPATIBLE")
    changed = [name for name in plain if plain[name] != other[name]]
    assert "operation matmul of 64x1024 by 1024x512" in changed
    assert "operation embedding" not in changed


def test_inputs_are_exact_and_lie_aligned() -> None:
    take = Inputs(CPU)
    for shape in ((3, 5), (POOL + 7,)):
        x = take(*shape)
        assert x.data_ptr() % 64 == 0
        assert float(x.abs().max()) < 0.5
        scaled = x.double() * 2**24
        assert bool((scaled == scaled.round()).all())
    a, b = take(1000), take(1000)
    assert not torch.equal(a, b)
    assert abs(float(a.mean())) < 0.05
    assert 0.25 < float(a.std()) < 0.33
    assert set(take.whole(5, 100).tolist()) == set(range(5))
