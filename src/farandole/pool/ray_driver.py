"""The driver process of a Ray pool: it talks to Ray for `ray.py`, which starts it.

Ray's calls block while its head is away, and Ray ends a process that has been without the head for a minute. So the
driver is a process of its own, which is killed and started again if it does not answer. It reads one request a line
from standard input, as JSON, and answers each with one line. It ends when its standard input does.

A unit is a detached actor (`HostActor`) with a name. The ticket reaches it as an argument of a method: Ray sends that
from process to process, and neither stores nor lists it. The actor gives it to the agent by standard input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import msgspec

# --- actor ------------------------------------------------------------------------------------------------------------
#
# Ray stores this class by its value, because this module is the driver's main module. So the nodes need farandole only
# in the interpreter of the agent, and nothing here may use farandole.

UNSERVED_S = 60.0  # an actor without a ticket ends after this time: its run is gone
READ_S = 1.0  # after the agent's end, the time for its last output
DIE_WITH = (  # the agent is killed when the actor's process ends, for any reason; then this becomes the agent
    "import ctypes,os,sys\n"
    "sys.platform=='linux' and ctypes.CDLL(None).prctl(1,9,0,0,0)\n"  # PR_SET_PDEATHSIG, SIGKILL
    "os.getppid()==int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


class HostActor:
    """Runs the agent of a host. The actor ends when the agent does, and the agent ends when the actor does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents = 0
        timer = threading.Timer(UNSERVED_S, self._end_if_unserved)
        timer.daemon = True
        timer.start()

    def _end_if_unserved(self) -> None:
        with self._lock:
            if not self._agents:
                os._exit(1)

    def serve(self, ticket: str, python: str, arguments: Sequence[str]) -> None:
        """Run an agent until it ends. If one is running, the new process gives it the ticket, and ends."""
        with self._lock:
            self._agents += 1
        last = [""]
        try:
            code: object = self._run(ticket, [python or sys.executable, *arguments], last)
        except OSError as error:
            code, last = error.strerror, [str(error.filename)]
        with self._lock:
            self._agents -= 1
            if self._agents:
                return
        raise SystemExit(f"{code}: {last[0]}" if code else 0)  # Ray lists this as the reason

    def _run(self, ticket: str, command: list[str], last: list[str]) -> int:
        shim = [sys.executable, "-I", "-S", "-c", DIE_WITH, str(os.getpid())]
        process = subprocess.Popen(
            [*shim, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        assert process.stdin
        assert process.stdout
        reading = threading.Thread(target=self._copy, args=(process.stdout, last), daemon=True)
        reading.start()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(ticket)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        code = process.wait()
        reading.join(READ_S)  # what the agent has left behind may keep its output open
        return code

    def _copy(self, lines: TextIO, last: list[str]) -> None:
        for line in lines:
            last[0] = line.strip() or last[0]
            print(line, end="", file=sys.stderr, flush=True)  # to the actor's log


# --- driver -----------------------------------------------------------------------------------------------------------

CONNECT_S = 5.0
CALLS_OF_ACTOR = 4  # calls of `serve` at a time


class RayClient:
    """A connection to a Ray cluster. `ticket`: as the run's ticket file has it."""

    def __init__(self, address: str, namespace: str, ticket: str) -> None:
        import ray
        from ray._private import services

        self._ray, self._ticket = ray, ticket
        self._gcs = services.canonicalize_bootstrap_address_or_die(address)
        self._check_head()
        ray.init(address=self._gcs, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
        self._actors: dict[str, Any] = {}  # the handles of those that are not known to be dead, by name
        self._served: set[str] = set()

    def _check_head(self) -> None:
        """Raise OSError if the head is away. Ray's own calls would wait a minute for it."""
        host, _, port = self._gcs.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            words = error.strerror or str(error)
            raise ConnectionError(f"Failed to connect to GCS at address {self._gcs}: {words}") from None

    def describe(self) -> Mapping[str, Any]:
        """The addresses of the nodes, and this machine's."""
        nodes = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        return {"nodes": nodes, "here": self._ray.util.get_node_ip_address()}

    def submit(self, name: str, options: Mapping[str, Any], python: str, arguments: Sequence[str]) -> str:
        """Create an actor. Returns its id; the actor may wait for a node."""
        self._check_head()
        actor = self._ray.remote(HostActor).options(
            name=name, lifetime="detached", max_restarts=0, max_concurrency=CALLS_OF_ACTOR, **options
        )
        self._actors[name] = actor.remote()
        self.serve(name, python, arguments)
        return self._actors[name]._actor_id.hex()

    def serve(self, name: str, python: str, arguments: Sequence[str]) -> None:
        """Give the actor its ticket. Returns at once; the actor gets it when it has a node."""
        if actor := self._actors.get(name):
            actor.serve.remote(self._ticket, python, arguments)
            self._served.add(name)

    def list(self) -> list[Mapping[str, Any]]:
        """The actors of the namespace, and those that have died since the last call."""
        self._check_head()
        for name in self._ray.util.list_named_actors():
            if name not in self._actors:
                with contextlib.suppress(ValueError):  # it has died meanwhile
                    self._actors[name] = self._ray.get_actor(name)
        state = self._ray._private.state.state
        draining = self._draining_nodes()
        rows: list[Mapping[str, Any]] = []
        for name, actor in tuple(self._actors.items()):
            row = state.actor_table(actor._actor_id.hex())
            if not row or row["State"] == "DEAD":
                del self._actors[name]
            if row:
                rows.append(self._row(name, row, draining))
        return rows

    def _row(self, name: str, row: Mapping[str, Any], draining: Mapping[str, int]) -> Mapping[str, Any]:
        node, death = row["Address"]["NodeID"], row["DeathCause"].actor_died_error_context
        return {
            "name": name,
            "id": row["ActorID"],
            "state": row["State"],
            "node": node if row["Pid"] else "",
            "address": row["Address"]["IPAddress"],
            "death": death.error_message,
            "preempted": "PREEMPTED" in str(death.node_death_info),
            "drained_by": draining.get(node),
            "served": name in self._served,
        }

    def _draining_nodes(self) -> Mapping[str, int]:
        """When each node that is being drained ends, in Unix milliseconds; 0: it is unknown."""
        return self._ray._private.state.state.get_draining_nodes()

    def resources(self) -> list[Mapping[str, float]]:
        """The free resources of each node that is not being drained."""
        draining = self._draining_nodes()
        free = self._ray._private.state.available_resources_per_node()
        return [resources for node, resources in free.items() if node not in draining]

    def cancel(self, ids: Sequence[str]) -> None:
        """End actors, with all their processes."""
        self._check_head()
        for actor in tuple(self._actors.values()):
            if actor._actor_id.hex() in ids:
                self._ray.kill(actor)


# --- requests ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer requests until standard input ends. The first has the arguments of `RayClient`."""
    from farandole.platform.process import die_with_parent

    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    driver: RayClient | None = None
    for line in sys.stdin:
        request = msgspec.json.decode(line)
        call, arguments = request["call"], request["arguments"]
        try:
            if driver is None:
                driver = RayClient(**arguments)
                result = None
            else:
                result = getattr(driver, call)(**arguments)
            answer = {"result": result}
        except Exception as error:  # noqa: BLE001  Ray raises all kinds
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        answers.write(msgspec.json.encode(answer).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
