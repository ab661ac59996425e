"""The Ray engine of a cluster pool: a detached actor for each host, which runs the host's agent.

An actor that waits for a node is a demand that Ray's autoscaler sees. No placement group is used, because it has a
fixed number of nodes, and no `request_resources`, because it outlives the run. The actors of a run's pool are in a
namespace of their own. Ray announces that it drains a node, with a deadline: the pool reports this as a preemption
notice.

The ticket is in no argument of a process, environment, `runtime_env` or listing of Ray: see `ray_driver.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from farandole.coordinator import listener
from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.extras import how_to_install
from farandole.platform.files import append
from farandole.platform.process import within
from farandole.pool import cluster
from farandole.pool.agent import AgentIdentity, mark, run_mark
from farandole.pool.base import PoolContext
from farandole.pool.cluster import ClusterPool, EngineError, ListedUnit
from farandole.protocol.settings import PoolTerms
from farandole.settings import of_other_hosts

# --- errors -----------------------------------------------------------------------------------------------------------
#
# What Ray says when a call fails, as one line with the remedy.

LAST_WORDS = 300  # characters of an error
HERE = "start `farandole run` on a node of the cluster or by `ray job submit`"
REMEDIES = {
    "Could not find any running Ray instance": f"{HERE}, or name its head as address=HOST:PORT",
    "Failed to connect to GCS": "see whether the head runs with `ray status`, and name it as address=HOST:PORT",
    "Invalid address format": "name the head as address=HOST:PORT, or leave it out",
    "Version mismatch": "install that version of ray and Python beside farandole",
    "node_ip_address.json": HERE,
    "cannot find a local Raylet": HERE,
    "can not find the matched Raylet": HERE,
    "No node info found": HERE,
}


def with_remedy(text: str) -> str:
    """Ray's words in one line, with the remedy if one is known."""
    line = " ".join(text.split())[:LAST_WORDS]
    remedy = next((remedy for pattern, remedy in REMEDIES.items() if pattern in text), "")
    return f"{line.rstrip('.')}; {remedy}" if remedy else line


_DEATH = re.compile(
    r".*(?:Worker exit detail: (?:Worker exits unexpectedly\. )?|Worker exits with an (?=exit code ))", re.S
)


def death_reason(message: str, *, preempted: bool) -> str:
    """Why an actor has died, from Ray's message: one line."""
    line = " ".join(_DEATH.sub("", message, count=1).split())[:LAST_WORDS] or "no reason is known"
    return f"its node was preempted: {line}" if preempted else line


# --- terms ------------------------------------------------------------------------------------------------------------

OPTIONS = ("address", "num_cpus", "num_gpus", "resources", "label", "slots", "python")


@dataclass(frozen=True, kw_only=True)
class RayTerms:
    """The options of `--pool ray,...`.

    Attributes:
        address: the head's, as HOST:PORT, or auto.
        slots: the number of workers of an actor.
        cpus, gpus: the numbers for an actor; `cpus` 0: as many as its workers have threads.
        resources: amounts of custom resources for an actor.
        labels: the labels that its node must have.
        python: the interpreter of the agents; "": that of Ray on the node.
    """

    address: str
    slots: int
    cpus: int
    gpus: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    python: str

    def demand(self, threads: int) -> dict[str, float]:
        """The resources of an actor."""
        cpus = self.cpus or max(threads, 1) * self.slots
        return {"CPU": cpus, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}

    def actor_options(self, threads: int, avoid: Sequence[str]) -> dict[str, Any]:
        """The options of an actor that is placed on none of the nodes `avoid`."""
        labels = dict(self.labels)
        if avoid:
            labels["ray.io/node-id"] = f"!in({','.join(avoid)})"
        return {
            "num_cpus": self.demand(threads)["CPU"],
            "num_gpus": self.gpus,
            "resources": dict(self.resources),
            "label_selector": labels,
        }


def parse(options: Mapping[str, str], where: str) -> RayTerms:
    """Parse the options. Raises UsageError: one is invalid."""
    address = options.get("address", "auto")
    if "://" in address:
        raise UsageError(f"{where}: address={address}: Ray Client is not supported; {HERE}")
    gpus = _number(options, "num_gpus", where)
    resources: dict[str, float] = {}
    for name, amount in _pairs(options, "resources", where):
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = 0.0
        if not 0 < resources[name] < math.inf:
            raise UsageError(f"{where}: resources={name}:{amount}: the amount must be a number above 0")
        if name in ("CPU", "GPU"):
            raise UsageError(f"{where}: resources={name}:{amount}: use num_{name.lower()}s={amount}")
    return RayTerms(
        address=address,
        slots=_number(options, "slots", where) or gpus or 1,
        cpus=_number(options, "num_cpus", where),
        gpus=gpus,
        resources=resources,
        labels=dict(_pairs(options, "label", where)),
        python=options.get("python", ""),
    )


def _pairs(options: Mapping[str, str], name: str, where: str) -> list[tuple[str, str]]:
    pairs = [each.partition(":") for each in options.get(name, "").split("+") if each]
    if wrong := next((each for each in pairs if not all(each)), None):
        raise UsageError(f"{where}: {name}={''.join(wrong)}: must be NAME:VALUE, or several of them with + between")
    return [(key, value) for key, _, value in pairs]


def _number(options: Mapping[str, str], name: str, where: str) -> int:
    text = options.get(name, "")
    if text and (not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MAX_WORKERS):
        raise UsageError(f"{where}: {name}={text}: must be a whole number from 1 to {MAX_WORKERS}")
    return int(text or 0)


# --- driver -----------------------------------------------------------------------------------------------------------

CALL_S = 60.0  # time until the driver must answer
LONGEST_ANSWER = 1 << 26  # bytes
COMMAND = (sys.executable, "-m", "farandole.pool.ray_driver")


class RayDriver:
    """The driver process, started when it is needed.

    `opening`: the arguments of `ray_driver.RayClient`. `log`: a file for what Ray prints.
    """

    def __init__(self, opening: Mapping[str, str], log: Path) -> None:
        self._opening, self._log = opening, log
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def call(self, call: str, **arguments: object) -> Any:
        """The result of a call of `ray_driver.RayClient`. A cancelled caller leaves the call to its end.

        Raises:
            EngineError: Ray refused it, or there was no answer.
        """
        return await asyncio.shield(asyncio.ensure_future(self._call(call, arguments)))

    async def _call(self, call: str, arguments: Mapping[str, object]) -> Any:
        async with self._lock:
            if self._process is None:
                self._process = await self._start()
                try:
                    await self._exchange(self._process, "open", self._opening)
                except EngineError:
                    await self._end()
                    raise
            return await self._exchange(self._process, call, arguments)

    async def _start(self) -> asyncio.subprocess.Process:
        with append(self._log) as log:
            return await asyncio.create_subprocess_exec(
                *COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, limit=LONGEST_ANSWER,
                env=of_other_hosts(os.environ), start_new_session=True,
            )  # fmt: skip

    async def _exchange(self, process: asyncio.subprocess.Process, call: str, arguments: Mapping[str, object]) -> Any:
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(ConnectionError):
            process.stdin.write(request(call, arguments))
        try:
            line = await within(CALL_S, process.stdout.readline())
        except asyncio.TimeoutError:
            line = b""
        if line:
            return result(line)
        await self._end()
        raise EngineError(
            f"Ray has not answered within {CALL_S:g} s, or its driver has ended; see {self._log}", doubt=True
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def close(self) -> None:
        """End the process. Waits for the call that is in progress."""
        async with self._lock:
            await self._end()


def request(call: str, arguments: Mapping[str, object]) -> bytes:
    """A request for the driver, as one line."""
    return msgspec.json.encode({"call": call, "arguments": arguments}) + b"\n"


def result(line: bytes) -> Any:
    """The result in an answer of the driver. Raises EngineError: it is an error."""
    answer = msgspec.json.decode(line)
    if "error" in answer:
        raise EngineError(with_remedy(answer["error"]), doubt="Failed to connect to GCS" in answer["error"])
    return answer["result"]


def describe(address: str) -> Mapping[str, Any]:
    """The addresses of a cluster's nodes and of this machine. Blocks. Raises EngineError."""
    opening = {"address": address, "namespace": "farandole", "ticket": ""}
    requests = request("open", opening) + request("describe", {})
    try:
        done = subprocess.run(
            COMMAND, input=requests, capture_output=True, timeout=CALL_S, env=of_other_hosts(os.environ),
            check=False, start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"Ray has not answered within {CALL_S:g} s; see whether its head runs with `ray status`"
        ) from None
    answers = done.stdout.splitlines()
    if not answers:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"]
        raise EngineError(f"Ray's driver has ended: {with_remedy(words[-1])}")
    return [result(line) for line in answers][-1]


# --- actors -----------------------------------------------------------------------------------------------------------
#
# A unit is an actor with the unit's name, in the namespace farandole-RUN, in which RUN is a digest of the run's secret
# and the pool: only this run's pool can know it.

STATES = {
    "DEPENDENCIES_UNREADY": cluster.PENDING,
    "PENDING_CREATION": cluster.PENDING,
    "RESTARTING": cluster.PENDING,
    "ALIVE": cluster.RUNNING,
    "DEAD": cluster.GONE,
}
LOOK_S = 1.0  # the list costs little, and shows what is being drained
PATIENCE_S = 10.0  # an actor that waits for longer waits for a node
NODE_DIGITS = 8
DRAIN_S = 120.0  # a drain without a deadline


def namespace(context: PoolContext) -> str:
    """The namespace of the actors of a run's pool."""
    name = mark(context.ticket, context.name, "")
    return f"farandole-{run_mark(name)[:8]}{name[-8:]}"


def node_name(node: str, address: str) -> str:
    """A node's name for users: its address and the first digits of its id."""
    return f"{address} ({node[:NODE_DIGITS]})" if node else ""


def listed(row: Mapping[str, Any], now: float) -> ListedUnit:
    """The unit in a row of the driver's list, at Unix time `now`."""
    state, ends_ms = STATES[row["state"]], row["drained_by"]
    notice_s, reason = math.inf, ""
    if state == cluster.GONE:
        reason = death_reason(row["death"], preempted=row["preempted"])
    elif state == cluster.RUNNING and ends_ms is not None:
        notice_s, reason = (max(ends_ms / 1000 - now, 0.0) if ends_ms else DRAIN_S), "Ray drains it"
    name, node = row["name"], node_name(row["node"], row["address"])
    return ListedUnit(name=name, id=row["id"], state=state, node=node, reason=reason, notice_s=notice_s)


def lacking(demand: Mapping[str, float], labels: Mapping[str, str], nodes: Sequence[Mapping[str, float]]) -> str:
    """Why no node has room for an actor, by the free resources of each; "" if one has.

    A node that has room may lack the labels.
    """
    has_room = any(all(free.get(name, 0.0) >= amount for name, amount in demand.items()) for free in nodes)
    if has_room and not labels:
        return ""
    kind = f" with the label {', '.join(f'{name}={value}' for name, value in labels.items())}" if labels else ""
    return f"no node{kind} has {', '.join(f'{amount:g} {name}' for name, amount in demand.items())} free"


class Actors:
    """The engine of a pool whose units are actors. See `cluster.Engine`."""

    label, noun, fixed, kill_s = "Ray", "actor", 0, 5.0

    def __init__(self, terms: RayTerms, context: PoolContext) -> None:
        self.slots = terms.slots
        self._terms, self._context = terms, context
        self._threads = context.job.threads
        its = namespace(context)
        opening = {
            "address": terms.address,
            "namespace": its,
            "ticket": msgspec.json.encode(context.ticket).decode(),
        }
        self._driver = RayDriver(opening, context.logs / f"{context.name}.ray")
        self.remedy = (
            f"python -c \"import ray; ray.init('{terms.address}', namespace='{its}'); "
            f'[ray.kill(ray.get_actor(a)) for a in ray.util.list_named_actors()]"'
        )
        self._nodes: dict[str, str] = {}  # the ids of nodes, by their names for users
        self._waits_since: dict[str, float] = {}

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        ids = [self._nodes[node] for node in avoid if node in self._nodes]
        options = self._terms.actor_options(self._threads, ids)
        return await self._driver.call("submit", name=name, options=options, **self._agent(name))

    def _agent(self, name: str) -> Mapping[str, object]:
        ahead = 0 if self._context.job.setup or self._context.job.prepare else self._threads
        identity = AgentIdentity(folder=Path(), pool=self._context.name, host=name, threads=ahead)
        return {"python": self._terms.python, "arguments": [*identity.command(Path("-")), "--wait"]}

    async def list(self) -> Sequence[ListedUnit]:
        rows: Sequence[Mapping[str, Any]] = await self._driver.call("list")
        for row in rows:
            self._nodes[node_name(row["node"], row["address"])] = row["node"]
            if not row["served"] and row["state"] != "DEAD":  # an earlier driver has submitted it
                await self._driver.call("serve", name=row["name"], **self._agent(row["name"]))
        units = [listed(row, time.time()) for row in rows]
        return [*(unit for unit in units if unit.state != cluster.PENDING), *await self._explained(units)]

    async def _explained(self, units: Sequence[ListedUnit]) -> Sequence[ListedUnit]:
        """The pending units, with the reason if they wait for a node."""
        pending, now = [unit for unit in units if unit.state == cluster.PENDING], time.monotonic()
        self._waits_since = {unit.name: self._waits_since.get(unit.name, now) for unit in pending}
        late = {name for name, since in self._waits_since.items() if now - since > PATIENCE_S}
        free = await self._driver.call("resources") if late else ()
        reason = lacking(self._terms.demand(self._threads), self._terms.labels, free)
        return [replace(unit, reason=reason) if unit.name in late else unit for unit in pending]

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._driver.call("cancel", ids=ids)

    async def close(self) -> None:
        """End the driver."""
        await self._driver.close()


class RayPool(ClusterPool):
    """A pool of actors."""

    _engine: Actors

    async def close(self) -> None:
        await super().close()
        await self._engine.close()


# --- kind -------------------------------------------------------------------------------------------------------------


class RayKind:
    """The kind of pool that `--pool ray,...` names. See `spec.PoolKind`."""

    options = OPTIONS
    required: tuple[str, ...] = ()

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return False

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        del show
        where = f"--pool {terms.name}"
        parsed = parse(terms.options, where)
        if importlib.util.find_spec("ray") is None:
            raise UsageError(f"{where}: ray is not installed; {how_to_install('ray')}, in the cluster's version of ray")
        if priced:
            raise UsageError(f"--max-cost: the price of a node of {where} is unknown; use --max-hours")
        try:
            found = describe(parsed.address)
        except EngineError as error:
            raise UsageError(f"{where}: {error}") from None
        if listener.is_loopback(listener.parse(listen)[0]) and set(found["nodes"]) - {found["here"], "127.0.0.1"}:
            raise UsageError(
                f"{where}: its nodes can't reach a run that listens at {listen} alone; name an address of this machine "
                f"in their network with --listen, or 0.0.0.0"
            )

    async def open(self, terms: PoolTerms, context: PoolContext) -> ClusterPool:
        engine = Actors(parse(terms.options, f"--pool {terms.name}"), context)
        return RayPool(engine, context, size=terms.size, look_s=LOOK_S)
