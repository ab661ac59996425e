"""The pools of `farandole run`: made as they were asked for, each kept by a service of its own, ended together.

Invariant: when `close` has returned, nothing of a local pool is left, and the agents of far hosts that could be reached
have ended with all that they had started.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from farandole.cli.takeover import Left
from farandole.control.run_folder import CODE, LOGS, TICKET
from farandole.control.ticket import Ticket
from farandole.coordinator.listener import is_loopback, parse
from farandole.errors import UsageError
from farandole.membership.hosts import Job
from farandole.membership.messages import Roster
from farandole.membership.preference import PoolTerms
from farandole.membership.records import RunSettings
from farandole.platform import cpu
from farandole.platform.process import aside
from farandole.pool.ec2.pool import Ec2Pool
from farandole.pool.local import OWN, LocalPool, join_command
from farandole.pool.service import keep
from farandole.pool.ssh import hosts_file
from farandole.pool.ssh.pool import SshPool
from farandole.pool.ssh.there import SSH


def check(
    specs: Sequence[PoolTerms], listen: str, show: Callable[[str], None], *, sized: bool = True, priced: bool = False
) -> None:
    """Before anything is made. `show`: what is to be said of them. `sized`: it is known how many workers are wanted;
    `priced`: it is to be known what they cost.

    Raises:
        UsageError: a pool can't be as it was asked for.
    """
    for kind in [spec.kind for spec in specs if spec.kind != "ssh" and spec.size is None and not sized]:
        raise UsageError(f"--pool {kind} without a size, and no --workers: say how many, as --pool {kind},size=2")
    for spec in specs:
        if spec.kind == "ssh":
            lines = hosts_file.read(Path(spec.options["hosts"]))
            if not lines:
                raise UsageError(
                    f"hosts file {spec.options['hosts']}: no host is in it; write HOST slots=NUMBER for each"
                )
            far = next((line.name for line in lines.values() if not line.local and not _is_loopback(line)), "")
            if far and is_loopback(parse(listen)[0]):
                raise UsageError(
                    f"--pool {spec.name}: {far} can't reach a run that listens at {listen} alone; name an address of "
                    f"this machine with --listen, or 0.0.0.0"
                )
        elif spec.kind == "ec2":
            _check_ec2(spec, listen, show, priced=priced)


def _check_ec2(spec: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
    from farandole.pool.ec2.asked import settle

    aws, asked = settle(spec.options)
    if is_loopback(parse(listen)[0]) and not aws.here:
        raise UsageError(
            f"--pool {spec.name}: instances can't reach a run that listens at {listen} alone; name an address of this "
            f"machine in their network with --listen, or 0.0.0.0"
        )
    if priced and (names := asked.unpriced()):
        raise UsageError(
            f"--max-cost: the price of {names[0]} is unknown; name a file with it, as "
            f"--pool {spec.name},prices=FILE (docs/ec2.md)"
        )
    if asked.said:
        show(f"--pool {spec.name}: {asked.said}")


def _is_loopback(line: hosts_file.Line) -> bool:
    try:
        return ipaddress.ip_address(line.address.rpartition("@")[2]).is_loopback
    except ValueError:
        return False


class Pools:
    """`keep` them once the run's ticket is there; `close` them in any case. Needs a running event loop."""

    def __init__(
        self, settings: RunSettings, script: str, arguments: Sequence[str], specs: Sequence[PoolTerms], *,
        prepare: str, fresh: bool, show: Callable[[str], None], left: Left | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._script, self._arguments = settings, script, arguments
        self._specs = specs or (PoolTerms(kind="local", name=OWN),)
        self._prepare, self._show, self._left = prepare, show, left
        self._folder = Path(settings.folder)
        self._local = [self._local_pool(spec, fresh) if spec.kind == "local" else None for spec in self._specs]
        self._far: list[SshPool | Ec2Pool] = []

    async def keep(self, ticket: Ticket, seen: Callable[[Roster], None], count: int) -> Roster:
        """Until the run is over and all have ended. Returns the first pool's last roster. Raises as `service.keep`."""
        both = zip(self._specs, self._local, strict=True)
        pools = [local or await self._far_pool(spec, ticket) for spec, local in both]
        first, *others = pools

        def heard(roster: Roster) -> None:
            seen(roster)
            for far in self._far if roster.over >= 0 else ():
                far.over()

        tasks = [asyncio.create_task(keep(pool, ticket, None, count, self._ended(pool.name))) for pool in others]
        try:
            roster = await keep(first, ticket, heard, count, self._ended(first.name))
            await asyncio.gather(*tasks)
            return roster
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, pool: str) -> list[str]:
        """Its workers that have ended with an earlier process of it."""
        return [worker.id for worker in self._left.local if worker.pool == pool] if self._left else []

    def dollars(self) -> float:
        """What has been paid for so far, as far as prices are known."""
        return sum(far.bill.dollars() for far in self._far if isinstance(far, Ec2Pool))

    async def close(self) -> None:
        for local in self._local:
            if local:
                local.kill_all()
        await asyncio.gather(*(far.close() for far in self._far))

    def _local_pool(self, spec: PoolTerms, fresh: bool) -> LocalPool:
        s = self._settings
        return LocalPool(
            join_command(self._folder / TICKET, self._script, self._arguments, self._prepare),
            logs=self._folder / LOGS,
            threads=s.threads,
            environ={
                **os.environ,
                **cpu.of(s.bits),
                "FARANDOLE_CODE": str(self._folder / CODE),
                "FARANDOLE_PACK": s.job.pack if s.job else "",
            },
            tell=self._show,
            name=spec.name,
            fresh=fresh,
        )

    async def _far_pool(self, spec: PoolTerms, ticket: Ticket) -> SshPool | Ec2Pool:
        job = self._settings.job
        assert job is not None, "a run with pools of other hosts packs its code"
        if spec.kind == "ec2":
            pool: SshPool | Ec2Pool = self._ec2_pool(spec, ticket, job)
        else:
            watched = await aside(lambda: hosts_file.Watched(Path(spec.options["hosts"])))  # its disk may not answer
            pool = self._ssh_pool(spec, watched, ticket, job)
        self._far.append(pool)
        for worker in self._left.far if self._left else ():
            if worker.pool == spec.name:
                pool.remember(worker.id, worker.host)
        return pool

    def _ec2_pool(self, spec: PoolTerms, ticket: Ticket, job: Job) -> Ec2Pool:
        from farandole.pool.ec2.asked import settle

        aws, asked = settle(spec.options)
        spending = self._settings.spending
        return Ec2Pool(
            aws, asked, run=self._settings.tag, ticket=ticket, job=job,
            logs=self._folder / LOGS, name=spec.name, keep_failed_s=spending.keep_failed_s,
            until=math.inf if spending.until is None else spending.until,
        )  # fmt: skip

    def _ssh_pool(self, spec: PoolTerms, watched: hosts_file.Watched, ticket: Ticket, job: Job) -> SshPool:
        return SshPool(
            watched,
            ticket=ticket,
            job=job,
            logs=self._folder / LOGS,
            name=spec.name,
            ssh=shlex.split(spec.options["ssh"]) if "ssh" in spec.options else SSH,
            python=spec.options.get("python", "python3"),
        )
