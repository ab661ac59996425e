"""Loader processes end with the training process, whatever they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_worker import gone, until

pytestmark = [
    pytest.mark.processes,
    # Python 3.12 and later warn when a process with threads forks; torch has threads by now
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


TRAINING = """
import multiprocessing, sys, time
from farandole.plan.batch import GlobalBatch
from torch.utils.data import Dataset
from farandole.data.loader import Key, Loader

class Slow(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index >= 16:
            time.sleep(1000)
        return index

if __name__ == "__main__":
    loader = Loader(Slow(), GlobalBatch(size=8, micro=8), seed=0, shuffle=False, num_workers=2,
                    multiprocessing_context=sys.argv[1])
    loader.expect(Key(0, step, 0, 8 * step, 8 * step + 8) for step in range(12))
    loader.fetch(Key(0, 0, 0, 0, 8))
    loader.fetch(Key(0, 1, 0, 8, 16))
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    {then}
"""


def start(script: Path, then: str, method: str) -> tuple[subprocess.Popen[str], list[int]]:
    script.write_text(TRAINING.replace("{then}", then))
    training = subprocess.Popen([sys.executable, script, method], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    pids = [int(pid) for pid in training.stdout.readline().split()]
    training.stdout.close()
    assert len(pids) == 2
    return training, pids


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, torch's own watchdog ends them, between two requests")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_kill_9_of_the_training_process_ends_its_loader_processes(tmp_path: Path, method: str) -> None:
    """They sleep in the dataset, where torch's own watchdog does not look; under a fork server another one does."""
    training, pids = start(tmp_path / "training.py", "time.sleep(1000)", method)
    assert not any(gone(pid) for pid in pids)
    training.kill()
    training.wait()
    until(lambda: all(gone(pid) for pid in pids), timeout_s=30)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "then"), [("fork", "pass"), ("forkserver", "pass"), ("fork", "loader.close(); loader.close()")]
)
def test_the_end_of_training_is_not_held_up_by_busy_processes(tmp_path: Path, method: str, then: str) -> None:
    """They ignore SIGTERM and sleep for 1000 s; with torch alone this would wait for ever."""
    training, pids = start(tmp_path / "training.py", then, method)
    assert training.wait(timeout=100) == 0
    assert all(gone(pid) for pid in pids)
