"""Pools of a real Slurm, of a real Ray, of pods, and of an engine whose units are processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.control.run_folder import LOGS, TICKET
from farandole.control.ticket import Ticket
from farandole.platform.files import write_atomically
from farandole.pool import cluster, kubernetes
from farandole.pool import ray as ray_pool
from farandole.pool.agent import kill_agents, mark
from farandole.pool.base import PoolContext
from farandole.pool.cluster import ClusterPool, EngineError, ListedUnit
from farandole.pool.slurm import Jobs, parse, waits
from farandole.protocol.messages import Job
from tests.support.kubernetes import IMAGE, NAMESPACE

LOOK_S, GRACE_S = 0.2, 100.0


def context(folder: Path, name: str, ticket: Ticket, job: Job) -> PoolContext:
    """Of the run in `folder`, with its ticket as a run has it."""
    (folder / LOGS).mkdir(exist_ok=True)
    write_atomically(folder / TICKET, msgspec.json.encode(ticket))
    return PoolContext(name=name, run="r-1", ticket=ticket, job=job, logs=folder / LOGS)


class Processes:
    """A unit is a process, and its id the process's. `away`: the engine does not answer; `full`: new units wait."""

    label, noun, remedy, fixed, kill_s = "Processes", "process", "kill", 0, 2.0

    def __init__(self, context: PoolContext, slots: int) -> None:
        self.context, self.slots = context, slots
        self.away = self.full = False
        self.unanswered = 0  # calls
        self.waiting: set[str] = set()
        self.submitted: list[str] = []
        self._units: dict[str, subprocess.Popen[bytes]] = {}

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        del avoid
        self._answer()
        self.submitted.append(name)
        if self.full:
            self.waiting.add(name)
            return name
        ticket = str(self.context.logs.parent / TICKET)
        words = ["agent", ticket, "--pool", self.context.name, "--host", name, "--wait", "--grace", f"{GRACE_S:g}"]
        with (self.context.logs / f"{name}.unit").open("wb") as output:
            self._units[name] = subprocess.Popen(
                [sys.executable, "-m", "farandole", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        return str(self._units[name].pid)

    async def list(self) -> Sequence[ListedUnit]:
        self._answer()
        return [ListedUnit(name=name, id=name, state=cluster.PENDING, reason="no room") for name in self.waiting] + [
            ListedUnit(
                name=name,
                id=str(process.pid),
                state=cluster.RUNNING if process.poll() is None else cluster.GONE,
                node="here",
                reason=f"code {process.returncode}",
            )
            for name, process in self._units.items()
        ]

    async def cancel(self, ids: Sequence[str]) -> None:
        self._answer()
        self.waiting.difference_update(ids)
        for name, process in self._units.items():
            if str(process.pid) in ids:
                await asyncio.to_thread(self.lose, name)

    def lose(self, name: str) -> None:
        """End the unit with all its processes, without notice. Its agent is stopped first: it must not report that a
        worker has ended while the host still counts as one.
        """
        self._units[name].send_signal(signal.SIGSTOP)
        kill_agents([mark(self.context.ticket, self.context.name, name)])
        self._units[name].kill()
        self._units[name].wait()

    async def ended(self, name: str) -> None:
        """Wait until the unit has ended."""
        await asyncio.to_thread(self._units[name].wait)

    def notice(self, name: str) -> None:
        """The scheduler's signal, to the agent alone."""
        self._units[name].send_signal(signal.SIGTERM)

    def running(self) -> list[str]:
        return [name for name, process in self._units.items() if process.poll() is None]

    def close(self) -> None:
        for process in self._units.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answer(self) -> None:
        if self.away:
            self.unanswered += 1
            raise EngineError("Processes: it does not answer", doubt=True)


def pool_of_processes(folder: Path, ticket: Ticket, job: Job, *, slots: int = 8) -> tuple[ClusterPool, Processes]:
    its = context(folder, "units", ticket, job)
    engine = Processes(its, slots)
    return ClusterPool(engine, its, look_s=LOOK_S), engine


def pool_of_jobs(folder: Path, ticket: Ticket, job: Job) -> ClusterPool:
    """Jobs of the Slurm cluster of this process's environment, in its partition `low`."""
    its = context(folder, "slurm", ticket, job)
    terms = parse({"partition": "low", "slots": "8", "cpus": "1"}, "--pool slurm")
    engine = Jobs(terms, its, waits("low"))
    return ClusterPool(engine, its, look_s=LOOK_S)


def pool_of_actors(folder: Path, ticket: Ticket, job: Job) -> ClusterPool:
    """Actors of the Ray cluster of this process's environment."""
    its = context(folder, "ray", ticket, job)
    engine = ray_pool.Actors(ray_pool.parse({"slots": "8", "num_cpus": "1"}, "--pool ray"), its)
    return ray_pool.RayPool(engine, its, look_s=LOOK_S)


def pool_of_pods(
    folder: Path, ticket: Ticket, job: Job, *, name: str = "kubernetes", slots: int = 8
) -> kubernetes.PodPool:
    """Pods of the cluster of this process's kubeconfig."""
    its = context(folder, name, ticket, job)
    options = {"namespace": NAMESPACE, "image": IMAGE, "slots": str(slots), "cpus": "1", "grace": f"{GRACE_S:.0f}"}
    terms = kubernetes.parse(options, "--pool kubernetes")
    engine = kubernetes.Pods(kubernetes.connect(terms), terms, its)
    return kubernetes.PodPool(engine, its, look_s=LOOK_S)
