"""Too little shared memory for loader processes: one sentence that says how much there is, and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from farandole.data.shared import explained
from farandole.errors import UsageError
from tests.support.harness import ENVIRON, FARANDOLE

ANOTHER_MOUNT = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
SCRIPT = """
import torch, farandole

class Large(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((3_000_000,), float(index))

run = farandole.join()
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.replicate(model=model, optimizer=optimizer)
for step in run.steps(run.loader(Large(), batch=farandole.GlobalBatch(8, micro=4), num_workers=1), epochs=1):
    for rows in step:
        step.backward(model(rows.mean(1, keepdim=True)).square().mean())
    optimizer.step()
"""


def test_other_errors_stay_as_they_are() -> None:
    for error in (OSError(errno.EACCES, "no"), RuntimeError("its own"), KeyError("x")):
        assert explained(error) is error


def test_for_want_of_locks_and_of_tensors() -> None:
    torchs = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError(torchs)):
        said = explained(error)
        assert isinstance(said, UsageError)
        assert "/dev/shm has " in str(said)
        assert "--shm-size" in str(said)


@pytest.mark.world
@pytest.mark.processes
@pytest.mark.skipif(not ANOTHER_MOUNT, reason="a small /dev/shm takes root and mount namespaces")
def test_a_run_says_it_in_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [*FARANDOLE, "run", "--workers", "1", "--folder", str(tmp_path / "run"), str(script)]
    within = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh"]
    done = subprocess.run(
        [*within, *command], env=ENVIRON, capture_output=True, text=True, timeout=90, check=False
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("farandole: error on w1: the loader's processes need more shared memory than is free")
    assert done.stderr.count("\n") == 1
