"""Loader processes that die under way: noticed, named, cleared away, so that the loader can start others.

torch has the training process raise on the death of one of its loader processes, by a handler of SIGCHLD: anywhere in
the script, and then the script has failed. Ours are taken off the handler's list (`adopt`). The user's own DataLoaders
stay on it, and a handler of the user's own stays where it is. The loader looks itself, before each result that it takes
(`dead`), and while it waits torch looks every 5 s.

What the dead leave behind can't be used: a queue's lock may be theirs for ever. So the others have to go too, and
nothing of the pipeline is asked to help (`clear_away`). A process that dies within a write of more than 16 KiB can
leave half a message, which is waited for as for any other standstill of a worker; results in slots are never that long.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import _utils

from farandole.data.source import ProcessStart

_torch: Any = _utils  # torch's annotations leave out what is private

LIMIT = 3  # in a row, without a sample delivered in between
_END_S = 2.0  # after which a process is killed
_CAUSES = {
    signal.SIGKILL: "as the kernel does where memory runs out, on the machine or in the container",
    signal.SIGBUS: "as happens where /dev/shm is full; containers get 64 MB of it unless told otherwise (--shm-size)",
    signal.SIGSEGV: "a crash in the dataset's code, or in a library that it uses",
}


def adopt(results: Any) -> None:
    """`results`, torch's iterator, has just started its processes: torch's handler is not to raise for them."""
    if results._worker_pids_set:
        _torch.signal_handling._remove_worker_pids(id(results))
        results._worker_pids_set = False


def dead(results: Any) -> list[BaseProcess]:
    """Those of the processes that have ended; 1 us each."""
    return [process for process in results._workers if process.exitcode is not None]


def said(died: Sequence[BaseProcess]) -> str:
    """Of what they have died, in words."""
    for process in died:
        code = process.exitcode or 0
        if code < 0:
            number = signal.Signals(-code)
            cause = f", {_CAUSES[number]}" if number in _CAUSES else ""
            return f"a DataLoader process (pid {process.pid}) was ended by {number.name}{cause}"
    if died:
        return f"a DataLoader process (pid {died[0].pid}) ended with exit code {died[0].exitcode}"
    return "a DataLoader process was gone when its result was to be read"


def clear_away(results: Any, start: ProcessStart) -> None:
    """End all processes, and let go of the pipeline, without a lock or an event that the dead may hold."""
    start.stop()
    for process in results._workers:
        process.join(_END_S)
        if process.is_alive():
            process.kill()
            process.join()
    results._shutdown = True
    queues = list(results._index_queues)
    if hasattr(results, "_pin_memory_thread"):
        results._pin_memory_thread_done_event.set()  # it looks every 5 s
    else:
        queues.append(results._worker_result_queue)
    for queue in queues:
        queue.cancel_join_thread()
        queue.close()
