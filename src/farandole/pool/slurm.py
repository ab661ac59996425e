"""The Slurm engine of a cluster pool: a job for each host, by `sbatch`, `squeue`, `scancel` and `scontrol`.

A job has one node, and runs the host's agent as a job step. A step gets SIGTERM as soon as Slurm preempts the job, and
the agent reports this as a preemption notice. The job ends when the agent does, and is never requeued: the pool submits
another one. Inside an allocation (`salloc`, `sbatch`) a unit is a job step on one of its nodes instead.

The ticket is never in the job's script, environment, comment or arguments: the agent reads it from the run's folder,
which the nodes must share.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from farandole.control.run_folder import TICKET
from farandole.coordinator import listener
from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.files import open_regular
from farandole.platform.process import within
from farandole.pool import cluster
from farandole.pool.agent import AgentIdentity, mark, run_mark
from farandole.pool.base import PoolContext
from farandole.pool.cluster import ClusterPool, EngineError, ListedUnit
from farandole.protocol.settings import PoolTerms
from farandole.settings import of_other_hosts

# --- errors -----------------------------------------------------------------------------------------------------------
#
# What Slurm prints when a command fails, as one line with the remedy.

LAST_WORDS = 300  # characters of a line of its output
DOUBT = (  # slurmctld is away or too slow, so it may have carried out the command
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Zero Bytes were transmitted",
    "backup controller in standby",
    "temporarily unable to",
)
REMEDIES = {
    "invalid partition": "see the partitions with `sinfo -s`, and name one as partition=NAME",
    "Invalid generic resource": "see what nodes have with `sinfo -o '%P %G'`, and name it as gres=TYPE:NUMBER",
    "Requested node configuration is not available": "no node has all that is asked for; see `sinfo -N -l`, and ask "
    "for less gres, cpus or mem, or for another partition or constraint",
    "Invalid account": "see your accounts with `sacctmgr show associations user=$USER`, and name one as account=NAME",
    "Invalid qos": "see your QOS with `sacctmgr show associations user=$USER format=account,qos`",
    "Invalid feature": "see the features of nodes with `sinfo -o '%P %f'`",
    "Requested time limit": "ask for less time=, or name a partition that allows it",
    "Invalid --time": "write time= as MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS",
    "Invalid numeric value": "write a whole number",
    "Invalid --mem": "write mem= as a number with K, M, G or T",
    "Unable to contact slurm controller": "see whether slurmctld runs with `scontrol ping`",
    "Protocol authentication error": "see whether munged runs on this machine",
    "Access/permission denied": "this user may not use it; ask the cluster's operators",
}
_PREFIX = re.compile(r"^(?:(?:sbatch|squeue|scancel|scontrol|srun|sinfo|slurm_\w+): )*(?:fatal: |error: )?", re.I)


def failure_reason(output: str, code: int) -> str:
    """The cause of a command's failure and its remedy, from what it has printed."""
    lines = [_PREFIX.sub("", line.strip()) for line in output.splitlines() if line.strip()]
    for pattern, remedy in REMEDIES.items():
        if message := next((line for line in lines if pattern.lower() in line.lower()), ""):
            return f"{message[:LAST_WORDS]}; {remedy}"
    return lines[-1][-LAST_WORDS:] if lines else f"the command ended with code {code}"


def in_doubt(output: str) -> bool:
    """Returns True if the command may have been carried out, or would be a moment later."""
    return any(pattern.lower() in output.lower() for pattern in DOUBT)


# --- commands ---------------------------------------------------------------------------------------------------------

COMMAND_S = 60.0  # time until a command must end
OWNER_ONLY = 0o077
OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")  # variables that describe no job


async def run_command(*command: str, stdin: str = "") -> str:
    """Run a command of Slurm. Returns its standard output. What it makes belongs to this user alone.

    Raises:
        EngineError: it failed, or did not end in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment(command[0]), umask=OWNER_ONLY,
        )  # fmt: skip
    except OSError as error:
        raise EngineError(f"{command[0]}: {error.strerror}") from None
    try:
        output, errors = await within(COMMAND_S, process.communicate(stdin.encode()))
    except asyncio.TimeoutError:
        raise EngineError(f"{command[0]} has not answered within {COMMAND_S:g} s", doubt=True) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
    return _output(command[0], output, errors, process.returncode or 0)


def query(*command: str, stdin: str = "") -> str:
    """Run a command as `run_command` does. Blocks."""
    try:
        done = subprocess.run(
            command,
            input=stdin.encode(),
            capture_output=True,
            timeout=COMMAND_S,
            env=environment(command[0]),
            check=False,
        )
    except OSError as error:
        raise EngineError(f"{command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{command[0]} has not answered within {COMMAND_S:g} s", doubt=True) from None
    return _output(command[0], done.stdout, done.stderr, done.returncode)


def environment(command: str) -> dict[str, str]:
    """The environment of a command. A job gets that of `sbatch`, but not what describes the job of this process."""
    environ = of_other_hosts(os.environ)
    inherited = command == "sbatch" and "SLURM_JOB_ID" in environ
    return {n: v for n, v in environ.items() if not (inherited and n.startswith("SLURM_") and n not in OF_CLUSTER)}


def _output(command: str, output: bytes, errors: bytes, code: int) -> str:
    text = output.decode(errors="replace")
    if code:
        words = errors.decode(errors="replace") + text
        raise EngineError(f"{command}: {failure_reason(words, code)}", doubt=in_doubt(words))
    return text


# --- terms ------------------------------------------------------------------------------------------------------------

PASSED_ON = ("partition", "account", "qos", "gres", "constraint", "time", "mem", "reservation")  # options of sbatch
OPTIONS = (*PASSED_ON, "cpus", "slots", "python")


@dataclass(frozen=True, kw_only=True)
class SlurmTerms:
    """The options of `--pool slurm,...`.

    Attributes:
        request: what a job asks for, as options of `sbatch`.
        slots: the number of workers of a job.
        cpus: the number of CPUs of a job; 0: as many as its workers have threads.
        python: the interpreter on the nodes.
    """

    request: tuple[str, ...]
    slots: int
    cpus: int
    python: str

    def job_options(self, threads: int) -> list[str]:
        """The options of `sbatch` for one host."""
        return ["--nodes=1", "--ntasks=1", f"--cpus-per-task={self.job_cpus(threads)}", "--no-requeue", *self.request]

    def job_cpus(self, threads: int) -> int:
        return self.cpus or max(threads, 1) * self.slots


def parse(options: Mapping[str, str], where: str) -> SlurmTerms:
    """Parse the options. Raises UsageError: one is invalid."""
    given = {name: value.replace("+", ",") if name == "gres" else value for name, value in options.items()}
    return SlurmTerms(
        request=tuple(f"--{name}={given[name]}" for name in PASSED_ON if name in given),
        slots=_number(options, "slots", where) or _gpus(given.get("gres", "")) or 1,
        cpus=_number(options, "cpus", where),
        python=options.get("python", sys.executable),
    )


def _gpus(gres: str) -> int:
    """The number of GPUs in a list of generic resources, each NAME[:TYPE][:NUMBER]."""
    parts = [each.split(":") for each in gres.split(",")]
    return sum(int(part[-1]) if part[-1].isdecimal() else 1 for part in parts if part[0] == "gpu")


def _number(options: Mapping[str, str], name: str, where: str) -> int:
    text = options.get(name, "")
    if text and (not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_WORKERS):
        raise UsageError(f"{where}: {name}={text}: must be a whole number from 1 to {MAX_WORKERS}")
    return int(text or 0)


def in_allocation(options: Mapping[str, str]) -> str:
    """The id of the job in which this process runs, if the pool uses its nodes; "" if it submits jobs."""
    return "" if "partition" in options else os.environ.get("SLURM_JOB_ID", "")


# --- cluster facts ----------------------------------------------------------------------------------------------------

KILL_S, GRACE_S = 30.0, 30.0  # Slurm's defaults


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long Slurm waits between SIGTERM and SIGKILL: `kill_s` at a job's end, `grace_s` when it is preempted."""

    kill_s: float = KILL_S
    grace_s: float = GRACE_S


def waits(partition: str) -> Waits:
    """The times of the cluster and the partition. Blocks. Raises EngineError."""
    match = re.search(r"^KillWait\s*=\s*(\d+)", query("scontrol", "show", "config"), re.M)
    kill_s = float(match[1]) if match else KILL_S
    shown = query("scontrol", "--oneliner", "show", "partition", *([partition] if partition else []))
    lines = [line for line in shown.splitlines() if partition or "Default=YES" in line]
    graces = [int(found[1]) for line in lines if (found := re.search(r"\bGraceTime=(\d+)", line))]
    return Waits(kill_s=kill_s, grace_s=float(min(graces, default=0)) or kill_s)


def seconds_left(text: str) -> float:
    """Parse a duration of `squeue`, as DAYS-HOURS:MINUTES:SECONDS. Infinite: there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        return math.inf if text.strip() != "INVALID" else 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


# --- agent ------------------------------------------------------------------------------------------------------------


def agent_command(context: PoolContext, terms: SlurmTerms, name: str, grace_s: float) -> list[str]:
    """The command of the agent of a unit. It reads the ticket from the run's folder."""
    ahead = 0 if context.job.setup or context.job.prepare else context.job.threads  # the modules may come later
    identity = AgentIdentity(folder=Path(), pool=context.name, host=name, threads=ahead, grace_s=grace_s)
    return [terms.python, *identity.command(context.logs.parent.absolute() / TICKET), "--wait"]


# --- jobs -------------------------------------------------------------------------------------------------------------
#
# A unit is a job. Its name is PREFIX-RUN-UNIT, in which RUN is a digest of the run's secret and the pool: only this
# run's pool can know it. The comment names the run and the pool for people.

PREFIX = "farandole"
SEPARATOR = "|"
FORMAT = SEPARATOR.join(("%i", "%j", "%T", "%L", "%N", "%r"))
STATES = {
    "PENDING": cluster.PENDING,
    "CONFIGURING": cluster.PENDING,
    "REQUEUED": cluster.PENDING,
    "REQUEUE_HOLD": cluster.PENDING,
    "REQUEUE_FED": cluster.PENDING,
    "RESV_DEL_HOLD": cluster.PENDING,
    "SPECIAL_EXIT": cluster.PENDING,
    "RUNNING": cluster.RUNNING,
    "SUSPENDED": cluster.RUNNING,
    "STOPPED": cluster.RUNNING,
    "RESIZING": cluster.RUNNING,
    "COMPLETING": cluster.ENDING,
    "SIGNALING": cluster.ENDING,
    "STAGE_OUT": cluster.ENDING,
}  # all others: the job is over
SCRIPT = """#!/bin/sh
# a host of the farandole run {run}, pool {pool}
exec srun --nodes=1 --ntasks=1 --cpus-per-task={cpus} --input=none {command}
"""


def job_prefix(context: PoolContext) -> str:
    """The first part of the names of the jobs of a run's pool."""
    name = mark(context.ticket, context.name, "")
    return f"{PREFIX}-{run_mark(name)[:8]}{name[-8:]}-"


class Jobs:
    """The engine of a pool whose units are jobs. See `cluster.Engine`."""

    label, noun, remedy, fixed = "Slurm", "job", "scancel", 0

    def __init__(self, terms: SlurmTerms, context: PoolContext, waits: Waits) -> None:
        self.slots, self.kill_s = terms.slots, waits.kill_s
        self._terms, self._context = terms, context
        self._prefix = job_prefix(context)
        self._grace_s = waits.grace_s

    def output(self, name: str) -> Path:
        """The file for the output of the unit's agent."""
        return self._context.logs.absolute() / f"{name}.job"

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        context, threads = self._context, self._context.job.threads
        script = SCRIPT.format(
            run=_one_line(context.run), pool=_one_line(context.name), cpus=self._terms.job_cpus(threads),
            command=shlex.join(agent_command(context, self._terms, name, self._grace_s)),
        )  # fmt: skip
        options = [
            *self._terms.job_options(threads),
            f"--job-name={self._prefix}{name}",
            f"--comment=farandole run {context.run}, pool {context.name}",
            f"--output={self.output(name)}",
            *([f"--exclude={','.join(avoid)}"] if avoid else []),
        ]
        return (await run_command("sbatch", "--parsable", *options, stdin=script)).strip().partition(";")[0]

    async def list(self) -> Sequence[ListedUnit]:
        words = ("squeue", "--noheader", "--states=all", f"--user={os.geteuid()}", f"--format={FORMAT}")
        units = listed_jobs(await run_command(*words), self._prefix)
        return [replace(unit, reason=self._explained(unit)) for unit in units]

    def _explained(self, unit: ListedUnit) -> str:
        """The reason, with the last line of the job's output if it has failed."""
        if unit.state != cluster.GONE or unit.reason in ("completed", "cancelled", "preempted"):
            return unit.reason
        try:
            with open_regular(self.output(unit.name)) as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(file.tell() - 10 * LAST_WORDS, 0))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return f"{unit.reason}; no output: is the run's folder on its node?"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"{unit.reason}: {last[-LAST_WORDS:]}"

    async def cancel(self, ids: Sequence[str]) -> None:
        await run_command("scancel", "--quiet", *ids)


def listed_jobs(output: str, prefix: str) -> list[ListedUnit]:
    """The pool's units in the output of `squeue`. Lines of other jobs are ignored."""
    units: dict[str, ListedUnit] = {}
    for line in output.splitlines():
        fields = line.strip().split(SEPARATOR)
        if len(fields) == FORMAT.count(SEPARATOR) + 1 and fields[1].startswith(prefix):
            id, name, state, left, node, reason = fields
            unit = ListedUnit(
                name=name.removeprefix(prefix),
                id=id,
                state=STATES.get(state, cluster.GONE),
                node=node,
                reason=reason.replace("None", "") if state == "PENDING" else state.lower(),
                left_s=seconds_left(left) if STATES.get(state) == cluster.RUNNING else math.inf,
            )
            units[unit.name] = unit
    return list(units.values())


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


# --- allocation -------------------------------------------------------------------------------------------------------
#
# A unit is a job step on a node of the allocation in which `farandole run` was started. `srun` is a child of this
# process in a session of its own, so that the step goes on if this process is killed.

STEP_FORMAT = SEPARATOR.join(("%i", "%j", "%N"))
NODES_USED = "all nodes of the allocation are in use"


class Steps:
    """The engine of a pool whose units are steps of the job `job`. See `cluster.Engine`."""

    label, noun, remedy = "Slurm", "step", "scancel"

    def __init__(self, job: str, nodes: Sequence[str], terms: SlurmTerms, context: PoolContext, waits: Waits) -> None:
        self.slots, self.kill_s, self.fixed = terms.slots, waits.kill_s, len(nodes)
        self._job, self._nodes, self._terms, self._context = job, nodes, terms, context
        self._prefix = job_prefix(context)
        self._grace_s = waits.grace_s
        self._processes: dict[str, tuple[str, asyncio.subprocess.Process]] = {}  # node and srun, by unit
        self._listed: dict[str, str] = {}  # node of each listed step

    def output(self, name: str) -> Path:
        """The file for the output of the unit's agent."""
        return self._context.logs.absolute() / f"{name}.job"

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        used = {*self._listed.values(), *(node for node, _ in self._processes.values()), *avoid}
        node = next((node for node in self._nodes if node not in used), "")
        if not node:
            raise EngineError(f"{NODES_USED}, or could not be used")
        words = ("srun", "--overlap", f"--jobid={self._job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1")
        words = (*words, f"--job-name={self._prefix}{name}", "--cpu-bind=none", "--input=none")
        words = (*words, *agent_command(self._context, self._terms, name, self._grace_s))
        try:
            with open(self.output(name), "ab", opener=_private) as output:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=of_other_hosts(os.environ),
                    start_new_session=True, umask=OWNER_ONLY,
                )  # fmt: skip
        except OSError as error:
            raise EngineError(f"srun can't be started: {error.strerror}") from None
        self._processes[name] = node, process
        return f"on {node}"

    async def list(self) -> Sequence[ListedUnit]:
        left = seconds_left(await run_command("squeue", "--noheader", f"--jobs={self._job}", "--format=%L"))
        rows = await run_command("squeue", "--noheader", "--steps", f"--jobs={self._job}", f"--format={STEP_FORMAT}")
        units = {unit.name: unit for unit in listed_steps(rows, self._prefix, left)}
        for name, (node, process) in tuple(self._processes.items()):
            if process.returncode is not None:
                if name not in units:
                    del self._processes[name]
                    reason = f"srun ended with code {process.returncode}"
                    units[name] = ListedUnit(name=name, id=f"on {node}", state=cluster.GONE, node=node, reason=reason)
            elif name not in units:
                units[name] = ListedUnit(
                    name=name, id=f"on {node}", state=cluster.PENDING, node=node, reason="starting"
                )
        self._listed = {name: unit.node for name, unit in units.items() if unit.state != cluster.GONE}
        return list(units.values())

    async def cancel(self, ids: Sequence[str]) -> None:
        if steps := [each for each in ids if not each.startswith("on ")]:
            await run_command("scancel", "--quiet", *steps)
        for node, process in self._processes.values():
            if f"on {node}" in ids and process.returncode is None:
                process.terminate()


def listed_steps(output: str, prefix: str, left_s: float) -> list[ListedUnit]:
    """The pool's units in the output of `squeue --steps`."""
    units: list[ListedUnit] = []
    for line in output.splitlines():
        fields = line.strip().split(SEPARATOR)
        if len(fields) == STEP_FORMAT.count(SEPARATOR) + 1 and fields[1].startswith(prefix):
            id, name, node = fields
            row = ListedUnit(name=name.removeprefix(prefix), id=id, state=cluster.RUNNING, node=node, left_s=left_s)
            units.append(row)
    return units


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def allocated_nodes() -> list[str]:
    """The nodes of the allocation in which this process runs. Blocks. Raises EngineError."""
    names = query("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    return list(dict.fromkeys(names))


# --- kind -------------------------------------------------------------------------------------------------------------


AGAIN_S, LONGEST_S = 1.0, 30.0  # between two attempts to reach Slurm when a run starts again: first, longest
T = TypeVar("T")


class SlurmKind:
    """The kind of pool that `--pool slurm,...` names. See `spec.PoolKind`."""

    options = OPTIONS
    required: tuple[str, ...] = ()

    def is_sized(self, terms: PoolTerms) -> bool:
        return bool(in_allocation(terms.options))

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        del show
        where = f"--pool {terms.name}"
        parsed = parse(terms.options, where)
        for command in ("sbatch", "squeue", "scancel", "scontrol", "srun"):
            if not shutil.which(command):
                raise UsageError(
                    f"{where}: there is no `{command}` on this machine's PATH; start `farandole run` on a login node "
                    f"of the cluster, or load its module (often `module load slurm`)"
                )
        if priced:
            raise UsageError(f"--max-cost: the price of a job of {where} is unknown; use --max-hours")
        try:
            if not in_allocation(terms.options):
                query("sbatch", "--test-only", *parsed.job_options(1), stdin="#!/bin/sh\n")
            local = _are_here(terms.options)
        except EngineError as error:
            raise UsageError(f"{where}: {error}") from None
        if listener.is_loopback(listener.parse(listen)[0]) and not local:
            raise UsageError(
                f"{where}: its nodes can't reach a run that listens at {listen} alone; name an address of this machine "
                f"in their network with --listen, or 0.0.0.0"
            )

    async def open(self, terms: PoolTerms, context: PoolContext) -> ClusterPool:
        parsed = parse(terms.options, f"--pool {terms.name}")
        job = in_allocation(terms.options)
        times = await _retry(functools.partial(waits, terms.options.get("partition", "")))
        if job:
            engine = Steps(job, await _retry(allocated_nodes), parsed, context, times)
        else:
            engine = Jobs(parsed, context, times)
        return ClusterPool(engine, context, size=terms.size)


def _are_here(options: Mapping[str, str]) -> bool:
    """Returns True if all nodes that the pool may get are this machine."""
    partition = [f"--partition={options['partition']}"] if "partition" in options else []
    addresses = set(query("sinfo", "--noheader", "--Node", "--format=%o", *partition).split())
    return addresses <= {"127.0.0.1", "::1", "localhost", socket.gethostname()}


async def _retry(call: Callable[[], T]) -> T:
    """The result of a call that blocks. Repeats it while Slurm is away. Raises EngineError: it was refused."""
    pause_s = AGAIN_S
    while True:
        try:
            return await asyncio.to_thread(call)
        except EngineError as error:
            if not error.doubt:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
