"""Nobody waits without a limit for a file; what is given up is told, and what comes of it later too."""

from __future__ import annotations

import threading
import time

import pytest

from farandole.platform import files as file_thread
from farandole.platform.files import FileThread, bounded


def test_jobs_are_done_in_their_order_and_give_their_results() -> None:
    files, done = FileThread("t"), []
    for number in range(100):
        assert files.post(lambda number=number: done.append(number))
    assert files.run(lambda: list(done)) == list(range(100))
    assert files.close()


def test_what_a_job_raises_comes_out() -> None:
    files = FileThread("t")
    with pytest.raises(ZeroDivisionError):
        files.run(lambda: 1 // 0)
    assert files.run(int) == 0
    assert files.close()


def test_a_posted_job_that_raises_ends_no_later_one() -> None:
    files = FileThread("t")
    assert files.post(lambda: 1 // 0)
    assert files.run(lambda: 3) == 3
    assert files.close()


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the disk of the run's folder does not answer (a hard mount without its server)",
)
def test_a_job_that_does_not_return_is_given_up_and_those_after_it_are_refused_at_once() -> None:
    files, answers, late = FileThread("t", limit_s=0.05), threading.Event(), threading.Event()
    with pytest.raises(TimeoutError):
        files.run(answers.wait, late=late.set)
    assert files.stuck
    never = threading.Event()
    with pytest.raises(TimeoutError):
        files.run(never.set)
    written = threading.Event()
    assert files.post(written.set), "lines wait"
    assert not files.close() or written.is_set()
    assert not written.is_set()
    answers.set()
    assert late.wait(200), "it has been done after all"
    assert written.wait(200)
    assert not never.is_set()


def test_a_job_that_had_not_begun_when_it_was_given_up_is_never_done() -> None:
    files, answers, never = FileThread("t", limit_s=0.05), threading.Event(), threading.Event()
    files.post(answers.wait)
    with pytest.raises(TimeoutError):
        files.run(never.set, late=never.set)
    answers.set()
    while files.stuck:
        time.sleep(0.001)
    assert files.run(never.is_set) is False
    assert files.close()


def test_more_jobs_than_are_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_thread, "MAX_PENDING", 10)
    files, begun, answers = FileThread("t"), threading.Event(), threading.Event()
    files.post(lambda: (begun.set(), answers.wait()))
    assert begun.wait(200)
    assert [files.post(int) for _ in range(11)] == [True] * 10 + [False]
    answers.set()
    assert files.close()


def test_one_call_in_a_thread_of_its_own() -> None:
    answers = threading.Event()
    with pytest.raises(TimeoutError):
        bounded(answers.wait, limit_s=0.05)
    assert bounded(lambda: 3) == 3
    answers.set()
