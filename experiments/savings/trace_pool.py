"""A pool whose machines come and go as in a trace, played fast: each is a process of this machine.

    --pool played,name=spot,trace=FILE,first=90,seconds=10,machines=4,start=4,price=0.97

The trace's interval `first` begins when the pool opens, and each interval takes `seconds` seconds. `machines`: so many
there are if the trace has its largest number; fewer in proportion, rounded down. Without a trace all are there. A
machine is paid from the request for it, and its worker starts `start` seconds later. A machine that the market takes
back has its notice at the end of the interval, and is gone `NOTICE_S` seconds later.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from farandole.pool.base import (
    Event,
    Events,
    Host,
    HostPreempted,
    HostState,
    PoolContext,
    Priced,
    RemotePool,
    Started,
    WorkerExited,
    WorkerStartFailed,
)
from farandole.pool.local import join_command
from farandole.protocol.settings import PoolTerms

NOTICE_S = 5.0
DAY = "2023-02-01"


class TracePool:
    """`counts`: how many machines there are in each interval; the last number stays. `seconds`: of an interval."""

    def __init__(
        self, context: PoolContext, *, counts: Sequence[int], seconds: float, start_s: float, price: float
    ) -> None:  # fmt: skip
        self.name = context.name
        self._context, self._start_s, self._price = context, start_s, price
        self._hosts = [f"{self.name}-machine-{number + 1}" for number in range(max(counts))]
        self._there = self._hosts[: counts[0]]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._at: dict[str, str] = {}
        self._paid_since: dict[str, float] = {}
        self._paid_s = 0.0
        self._events = Events()
        self._market = asyncio.create_task(self._play(counts, seconds))

    def list(self) -> Sequence[Host]:
        return [Host(name=name, slots=1) for name in self._there]

    def start(self, worker: str, host: str) -> None:
        self._at[worker] = host
        self._paid_since[worker] = time.time()
        self._events.put(Priced(host=host, dollars=self._price, since=time.time(), day=DAY))
        self._tasks[worker] = asyncio.create_task(self._run(worker, host))

    def stop(self, worker: str) -> None:
        if process := self._processes.get(worker):
            os.killpg(process.pid, signal.SIGKILL)
        elif task := self._tasks.get(worker):
            task.cancel()

    async def events(self) -> Sequence[Event]:
        return await self._events.take()

    def remember(self, worker: str, host: str) -> None:
        raise NotImplementedError(f"{worker} on {host}: a run with this pool can't be taken over")

    def over(self) -> None:
        """Hosts end with their workers."""

    def dollars(self) -> float:
        paid_s = self._paid_s + sum(time.time() - since for since in self._paid_since.values())
        return self._price * paid_s / 3600

    async def close(self) -> None:
        self._market.cancel()
        tasks = [*self._tasks.values()]
        for worker in [*self._tasks]:
            self.stop(worker)
        await asyncio.gather(self._market, *tasks, return_exceptions=True)

    async def _run(self, worker: str, host: str) -> None:
        """Start the machine and the worker on it, and wait for its end."""
        started = False
        try:
            await asyncio.sleep(self._start_s)
            job = self._context.job
            log = (self._context.logs / f"{worker}.log").open("wb")
            process = self._processes[worker] = await asyncio.create_subprocess_exec(
                *join_command(self._context.logs.parent / "ticket", job.script, job.arguments),
                env={
                    **os.environ, "FARANDOLE_WORKER": worker, "FARANDOLE_POOL": self.name, "FARANDOLE_HOST": host,
                    "OMP_NUM_THREADS": "1",
                },
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            log.close()
            started = True
            self._events.put(Started(worker, host))
            code = await process.wait()
            self._events.put(WorkerExited(worker, f"exited with code {code}"))
        finally:
            if not started:
                self._events.put(WorkerStartFailed(worker, "its machine is gone"))
            self._paid_s += time.time() - self._paid_since.pop(worker)
            self._events.put(HostState(host, "gone", "its worker has ended"))
            del self._tasks[worker], self._at[worker]
            self._processes.pop(worker, None)

    async def _play(self, counts: Sequence[int], seconds: float) -> None:
        """Let machines come and go."""
        began = time.monotonic()
        for number, (before, after) in enumerate(pairwise(counts), 1):
            await asyncio.sleep(began + number * seconds - time.monotonic())
            self._there = self._hosts[:after]
            for host in self._hosts[after:before]:
                self._events.put(HostPreempted(host, NOTICE_S, "the market takes it back"))
                asyncio.get_running_loop().call_later(NOTICE_S, self._end, [w for w in self._at if self._at[w] == host])
            for host in self._hosts[before:after]:
                self._events.put(HostState(host, "joined", ""))

    def _end(self, workers: Sequence[str]) -> None:
        for worker in workers:
            self.stop(worker)


class TracePoolKind:
    options = ("trace", "first", "seconds", "machines", "start", "price")
    required = ("machines", "start", "price")

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return False

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None: ...

    async def open(self, terms: PoolTerms, context: PoolContext) -> RemotePool:
        given = terms.options
        return TracePool(
            context, counts=counts_of(given), seconds=float(given.get("seconds", "1")), start_s=float(given["start"]),
            price=float(given["price"]),
        )  # fmt: skip


def counts_of(given: dict[str, str]) -> list[int]:
    """Return how many machines there are in each interval, from the pool's options."""
    from farandole.market.traces import read

    machines = int(given["machines"])
    if "trace" not in given:
        return [machines]
    counts = read(Path(given["trace"])).counts
    most = max(counts)
    return [count * machines // most for count in counts[int(given.get("first", "0")) :]]


KIND = TracePoolKind()
