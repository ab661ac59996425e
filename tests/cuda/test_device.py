"""What is asked of the device itself: its fingerprint, its generators, and who may fork from whom."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
import torch

from farandole.data.order import keep_random_state, set_random_state
from farandole.numerics.fingerprint import fingerprint
from farandole.platform.process import SUPPORTED
from farandole.pool.base import WorkerExited
from farandole.pool.local import LocalPool
from farandole.protocol.numeric_facts import OPERATION
from tests.support.forked import ENVIRON
from tests.support.gpu import GPU, NEEDS_GPU

pytestmark = NEEDS_GPU

MARKED = """
import pathlib, sys
forked = "torch" in sys.modules
import torch
from farandole.worker import fork_server
x = torch.ones(64, 64, device="cuda")
pathlib.Path(sys.argv[1]).write_text(f"{fork_server.unfit()}|{forked}|{float((x @ x).sum())}")
"""


def test_a_fingerprint_is_the_same_twice_and_has_every_operation() -> None:
    before = torch.get_deterministic_debug_mode()
    try:
        torch.use_deterministic_algorithms(True)
        first, second = dict(fingerprint(GPU)), dict(fingerprint(GPU))
    finally:
        torch.set_deterministic_debug_mode(before)
    assert first == second
    assert first.keys() == dict(fingerprint(torch.device("cpu"))).keys()
    assert [name for name, value in first.items() if value.startswith("none")] == [OPERATION + "pooling"]


def test_generators_are_seeded_once_cuda_is_in_use() -> None:
    torch.zeros(1, device=GPU)
    set_random_state(99)
    first = torch.rand(5, device=GPU)
    set_random_state(99)
    assert torch.equal(first, torch.rand(5, device=GPU))


def test_generators_are_put_back() -> None:
    torch.zeros(1, device=GPU)
    set_random_state(99)
    put_back = keep_random_state()
    first = torch.rand(5, device=GPU)
    put_back()
    assert torch.equal(first, torch.rand(5, device=GPU))


@pytest.mark.processes
@pytest.mark.skipif(not SUPPORTED, reason="workers are forked on Linux only")
def test_a_forked_worker_uses_the_gpu_which_its_server_never_did(tmp_path: Path) -> None:
    """Two from one server: had it begun CUDA, or the first one's reached it, the second could not."""
    (tmp_path / "job_on_gpu.py").write_text(MARKED)
    told: list[str] = []

    async def scenario() -> None:
        environ = {**ENVIRON, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "job_on_gpu", str(tmp_path / "out")]
        pool = LocalPool(command, logs=tmp_path / "logs", threads=1, environ=environ, tell=told.append)
        try:
            for worker in ("w1", "w2"):
                pool.start(worker, "here")
                ended: list[WorkerExited] = []
                while not ended:
                    ended = [event for event in await pool.events() if isinstance(event, WorkerExited)]
                assert ended[0].reason.endswith("code 0"), (tmp_path / "logs" / f"{worker}.log").read_text()
                assert (tmp_path / "out").read_text() == "CUDA is in use as soon as Python starts|True|262144.0"
        finally:
            pool.kill_all()

    asyncio.run(scenario())
    assert told == []
