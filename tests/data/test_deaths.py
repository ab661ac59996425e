"""Loader processes that die: others take their place and the batches stay; a sample that is always deadly ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling

from farandole.data.loader import Loader
from farandole.data.workers import LIMIT
from farandole.errors import LoaderDied
from farandole.plan.batch import GlobalBatch
from tests.support.drawing import Drawing, Made, keys, same
from tests.support.fake_worker import until

pytestmark = [
    pytest.mark.processes,
    # Python 3.12 and later warn when a process with threads forks; torch has threads by now
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.mark.failure("Data and loader processes", "a DataLoader process is killed (out of memory, `kill -9`)")
def test_a_loader_process_that_dies_is_reported_and_replaced(
    make: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised in the script's own code, where torch's handler of SIGCHLD would; the batches are the same."""
    reported: list[str] = []
    loader, alone = make(Drawing(), on_deaths=reported.append), make(Drawing(), num_workers=0)
    all_keys = keys(loader)
    loader.expect(iter(all_keys))
    for number, key in enumerate(all_keys):
        assert same(loader.fetch(key), alone.fetch(key))
        if number in (1, 3):
            killed = multiprocessing.active_children()
            for process in killed[: 1 + number // 2]:
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join()
    assert len(reported) == 2
    assert "SIGKILL" in reported[1]
    assert any(str(process.pid) in reported[1] for process in killed)
    assert sum("SIGKILL" in message and " 2 " in message for message in caplog.messages) == 2


class Deadly(Made):
    """Whichever process makes one of these samples is ended."""

    def __init__(self, path: Path, samples: Container[int], number: int) -> None:
        super().__init__(path)
        self.deadly = samples
        self.number = number

    def __getitem__(self, index: int) -> int:
        if index in self.deadly and get_worker_info() is not None:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


@pytest.mark.failure(
    "Data and loader processes",
    "DataLoader processes die as often as they are started (memory, a sample that crashes a library)",
    seen="an error with the signal and its likely cause, after three deaths in a row without a sample",
    outcome="the run ends as after an error of the script; the state is saved",
)
def test_a_sample_that_is_always_deadly_ends_it_with_the_signal_and_the_likely_cause(
    make: Callable[..., Loader], tmp_path: Path
) -> None:
    loader = make(Deadly(tmp_path / "made", [100], signal.SIGBUS), GlobalBatch(size=10, micro=5), shuffle=False)
    all_keys = keys(loader)
    loader.expect(iter(all_keys))
    said = rf"\bSIGBUS\b.*/dev/shm\b.*\b{LIMIT}.*\bnum_workers\b"
    with pytest.raises(LoaderDied, match=said):  # noqa: PT012  what lies before it may go with it
        for key in all_keys[:21]:
            loader.fetch(key)
    assert loader.fetch(all_keys[30]).tolist() == [150, 151, 152, 153, 154]


@pytest.mark.failure("Data and loader processes", "a DataLoader process is killed (out of memory, `kill -9`)")
@pytest.mark.long
def test_a_death_among_many_samples_does_not_add_up(make: Callable[..., Loader], tmp_path: Path) -> None:
    """Four deaths with samples in between, each by a process that has become too large, say."""
    loader = make(Made(tmp_path / "made"), GlobalBatch(size=10, micro=5), shuffle=False)
    all_keys = keys(loader)
    loader.expect(iter(all_keys))
    for number, key in enumerate(all_keys):
        assert loader.fetch(key).tolist() == list(range(5 * number, 5 * number + 5))
        if number % 10 == 0:
            os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)


def test_the_user_s_own_handler_and_data_loaders_are_as_they_were(make: Callable[..., Loader]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
    monkey = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = False
    try:
        loader, alone = make(Drawing()), make(Drawing(), num_workers=0)
        loader.expect(iter(keys(loader)))
        loader.fetch(keys(loader)[0])
        process = multiprocessing.active_children()[0]
        os.kill(process.pid or 0, signal.SIGKILL)
        until(lambda: heard)
        assert same(loader.fetch(keys(loader)[5]), alone.fetch(keys(loader)[5]))
        loader.close()
        own = iter(DataLoader(Drawing(), num_workers=1))
        next(own)
        os.kill(own._workers[0].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"DataLoader worker .* is killed by signal"):
            until(lambda: False)  # torch's handler raises, as it does without us
        with contextlib.suppress(RuntimeError):
            del own
    finally:
        signal.signal(signal.SIGCHLD, before)
        signal_handling._SIGCHLD_handler_set = monkey
