"""What the system refuses to loader processes: one sentence that says why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from farandole.data.loader import Loader
from farandole.data.shared_memory import explained
from farandole.errors import UsageError
from tests.support.drawing import Drawing, keys
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


@pytest.mark.failure("Data and loader processes", "`/dev/shm` is too small for loader processes (64 MB in a container)")
def test_for_want_of_locks_and_of_tensors() -> None:
    torchs = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError(torchs)):
        said = explained(error)
        assert isinstance(said, UsageError)
        assert "/dev/shm has " in str(said)
        assert "--shm-size" in str(said)


@pytest.mark.parametrize(("name", "number"), [("EROFS", 30), ("EACCES", 13), ("EFBIG", 27), ("ENOENT", 2)])
@pytest.mark.skipif(sys.platform != "linux", reason="errors' numbers are Linux's")
def test_each_refusal_of_a_tensor_s_memory_names_the_place_and_the_reason(name: str, number: int) -> None:
    assert getattr(errno, name) == number
    torchs = f"unable to open shared memory object </torch_1_2_0> in read-write mode: no ({number})"
    said = str(explained(RuntimeError(torchs)))
    assert "/dev/shm" in said
    assert os.strerror(number) in said
    assert "num_workers=0" in said


@pytest.mark.failure(
    "Data and loader processes",
    "loader processes need more open files or processes than the limit",
    seen="one sentence with the limit and the remedy when they start",
    outcome="exit code 1",
)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_for_want_of_files_and_processes(number: int) -> None:
    said = explained(OSError(number, os.strerror(number)))
    assert isinstance(said, UsageError)
    assert "ulimit" in str(said)
    assert "/dev/shm" not in str(said)


@contextlib.contextmanager
def no_file_grows() -> Generator[None]:
    """No file of this process becomes longer than a byte, those of shared memory included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere shared memory is no file")


@pytest.mark.failure(
    "Data and loader processes", "`/dev/shm` is read-only, full, missing or not writable, and loader processes are used"
)
@LINUX
def test_without_locks_no_loader_is_made(make: Callable[..., Loader]) -> None:
    with no_file_grows():
        make(Drawing(), num_workers=0)
        with pytest.raises(UsageError, match="/dev/shm") as raised:
            make(Drawing())
    assert isinstance(raised.value.__cause__, OSError)


def _limit(_: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


def _with_gaps(samples: list[Any]) -> Any:
    """A tensor that no slot takes: torch sends it in a file of its own."""
    return {"x": torch.stack([sample[3] for sample in samples])[:, ::2]}


@pytest.mark.failure("Data and loader processes", "`/dev/shm` is too small for loader processes (64 MB in a container)")
@LINUX
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_tensor_that_gets_no_memory_is_an_error(make: Callable[..., Loader]) -> None:
    loader = make(Drawing(), collate_fn=_with_gaps, worker_init_fn=_limit)
    with pytest.raises(UsageError, match="/dev/shm"):
        loader.fetch(keys(loader)[0])


TINY = "/dev/shm has "


@pytest.mark.failure(
    "Data and loader processes",
    "`/dev/shm` is too small for loader processes (64 MB in a container)",
    seen="one sentence with the free size, the total size and the remedy, at their start or in the first micro-batch",
    outcome="exit code 1",
)
@pytest.mark.failure(
    "Data and loader processes",
    "`/dev/shm` is read-only, full, missing or not writable, and loader processes are used",
    seen=(
        "one sentence with the reason and the remedy when the loader is created; also of `data prepare` with several "
        "processes"
    ),
    outcome="exit code 1; nothing is trained",
)
@pytest.mark.world
@pytest.mark.processes
@pytest.mark.skipif(not ANOTHER_MOUNT, reason="another /dev/shm takes root and mount namespaces")
@pytest.mark.parametrize(
    ("options", "said"),
    [("size=8m", TINY), ("ro", "Read-only file system")],
    ids=["small", "read-only"],
)
def test_a_run_says_it_in_one_sentence(tmp_path: Path, options: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [*FARANDOLE, "run", "--workers", "1", "--folder", str(tmp_path / "run"), str(script)]
    within = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    done = subprocess.run(
        [*within, *command], env=ENVIRON, capture_output=True, text=True, timeout=90, check=False
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("farandole: error on w1: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.world
@pytest.mark.skipif(not ANOTHER_MOUNT, reason="another /dev/shm takes root and mount namespaces")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("ro", "Read-only file system"),
        ("size=4k,nr_inodes=1", "nr_inodes"),
        ("size=4k", " MB"),
    ],
    ids=["read-only", "without inodes", "full"],
)
def test_each_mount_is_named_before_anything_is_started(options: str, reason: str) -> None:
    fill = "{ cat /dev/zero > /dev/shm/x 2>/dev/null; true; }"
    within = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && {fill} && exec "$@"', "sh"]
    code = "from farandole.data import shared_memory; shared_memory.check()"
    done = subprocess.run(
        [*within, sys.executable, "-c", code], env=ENVIRON, capture_output=True, text=True, timeout=90, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("farandole.errors.UsageError: ")
    assert "/dev/shm" in last
    assert reason in last
