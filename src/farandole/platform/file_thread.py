"""A thread for files, so that an event loop doesn't wait for a disk that doesn't answer.

A write to a mount whose server is gone blocks its thread, in the kernel, until the server is back. So the thread that
may block is one that nobody waits for without a limit. The jobs of one `FileThread` are done in the order in which
they were given.

Who knows what when: a job is finished or given up, under its lock, and never both. One that is given up before it has
begun is never done. One that is given up while it runs may still be done later: `late` then tells. Until it returns,
`stuck` is true, and `run` refuses every job at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar, cast

T = TypeVar("T")
_log = logging.getLogger(__name__)

LIMIT_S = 2.0  # below it, a disk is slow; beyond, it doesn't answer
MAX_PENDING = 100_000  # jobs


class _Job:
    """`result` or `error` is there once `ended` is set."""

    def __init__(self, call: Callable[[], object], late: Callable[[], object] | None) -> None:
        self.call, self.late = call, late
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.given_up = False
        self.result: object = None
        self.error: BaseException | None = None


class FileThread:
    """`name`: of the thread. `limit_s`: the longest wait for a job, in seconds."""

    def __init__(self, name: str, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._jobs: SimpleQueue[_Job | Callable[[], object] | None] = SimpleQueue()
        self._given_up: set[_Job] = set()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        """True if a job that was given up has not returned yet."""
        return bool(self._given_up)

    def run(self, call: Callable[[], T], late: Callable[[], object] | None = None) -> T:
        """Do `call` after all earlier jobs, and return its result.

        Args:
            late: is called, in the thread, if the call was given up and succeeds later.

        Raises:
            TimeoutError: it was given up after `limit_s`, or one before it has not returned yet.
            BaseException: what `call` raises.
        """
        if self.stuck:
            raise TimeoutError(f"the disk has not answered for more than {self._limit_s:g} s")
        job = _Job(call, late)
        self._jobs.put(job)
        if not job.ended.wait(self._limit_s):
            with job.lock:
                if not job.ended.is_set():
                    job.given_up = True
                    self._given_up.add(job)
                    raise TimeoutError(f"the disk has not answered for {self._limit_s:g} s")
        if job.error is not None:
            raise job.error
        return cast("T", job.result)

    def post(self, call: Callable[[], object]) -> bool:
        """Do `call` after all earlier jobs; don't wait. What it raises is logged. False: too many are pending."""
        if self._jobs.qsize() >= MAX_PENDING:
            return False
        self._jobs.put(call)
        return True

    def end(self) -> None:
        """The thread ends after the jobs so far; don't wait."""
        self._jobs.put(None)

    def close(self) -> bool:
        """The thread ends after the jobs so far. Returns False if they are not done within the limit."""
        self.end()
        self._thread.join(0.0 if self.stuck else self._limit_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Job):
                self._do(job)
            else:
                try:
                    job()
                except Exception:  # noqa: BLE001  later jobs must not wait for a thread that has ended
                    _log.exception("a job of the thread %s failed", self._thread.name)

    def _do(self, job: _Job) -> None:
        with job.lock:
            given_up = job.given_up
        try:
            if not given_up:
                job.result = job.call()
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            job.error = error
        with job.lock:
            job.ended.set()
        if job.given_up:
            if not given_up and job.error is None and job.late is not None:
                job.late()
            self._given_up.discard(job)


def bounded(call: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    """The result of `call`, in a thread of its own. Raises as `FileThread.run` does."""
    thread = FileThread("file", limit_s)
    try:
        return thread.run(call)
    finally:
        thread.end()
