"""A real Ray cluster on this machine: a head without CPUs, and nodes, each a raylet of its own.

A process of its own holds the cluster, because Ray's library leaves files open. `WHY_NOT` says what is missing if
there can be no cluster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import ENVIRON
from tests.support.slurm import until

OF_JOBS = ("aiohttp_cors", "colorful", "opencensus", "smart_open", "virtualenv")  # packages that Ray's job server needs
WHY_NOT = "a Ray cluster needs the package ray"
CAN = find_spec("ray") is not None
STORE_BYTES = 80 << 20
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_DEDUP_LOGS": "0"}
REDIS = (
    "redis-server", "redis-tools", "libatomic1", "libjemalloc2", "liblzf1", "liblua5.1-0", "lua-cjson", "lua-bitop",
    "libhiredis0.14",
)  # fmt: skip
LIVE = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING")


_SPACES = (b"", b"cluster", b"fun", b"session", b"tracing", b"dashboard", b"job")
_IS_WORSE = re.compile(r"\[[\d -:,]+ [WEC] ").match  # than information, in a log of Ray's
SHOWN_LINES = 20
_IS_OF_AGENT = re.compile(rb"FARANDOLE_AGENT=").match


class RayCluster:
    """The cluster. A node is named by its number.

    `folder`: for Ray's session and logs. `home`: the user's, on the nodes. `most`: Ray's autoscaler adds up to so many
    nodes by itself.
    """

    def __init__(self, folder: Path, home: Path, *, dashboard: bool, most: int) -> None:
        self.folder, self.home = folder, home
        self._spoiled: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            addresses: list[str] = self._call("begin", folder=str(folder), dashboard=dashboard, most=most)
            self.address, self.dashboard = addresses
        except BaseException:
            self.end()
            raise

    def _call(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([call, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def add(self, **options: Any) -> int:
        """Add a node with one CPU."""
        return self._call("add", options=options)

    def nodes(self) -> dict[str, int]:
        """The numbers of the nodes that were not removed, by their ids."""
        return self._call("node_ids")

    def kill(self, node: int) -> None:
        """Send SIGKILL to the node's raylet, and to nothing else."""
        self._spoiled.add(node)
        self._call("kill", node=node)

    def remove(self, node: int) -> None:
        """Take the node away, as an operator does."""
        self._spoiled.discard(node)
        self._call("remove", node=node)

    def kill_head(self) -> None:
        """Send SIGKILL to the GCS."""
        self._call("kill_head")

    def restart_head(self) -> None:
        """Start the GCS again, at the same address; it needs a Redis that has what it knew."""
        self._call("restart_head")

    def drain(self, node: int, seconds: float) -> bool:
        """Announce that the node is preempted. Returns True if Ray accepts it."""
        self._spoiled.add(node)
        return self._call("drain", node=node, seconds=seconds)

    def restore(self) -> None:
        """Replace the nodes that were drained or killed and not removed, as after a test that has failed."""
        for node in tuple(self._spoiled):
            self.remove(node)
            self.add()

    def actors(self, *states: str) -> list[Mapping[str, Any]]:
        """The actors that are alive or pending, or those in one of these states, whosesoever they are."""
        return self._call("actors", states=states or LIVE)

    def live(self) -> int:
        """The number of nodes that are alive, without the head."""
        return self._call("live")

    def is_free(self, node: int) -> bool:
        """Return True if nothing uses the node's CPU. Ray ends a drained raylet when it is idle."""
        return self._call("is_free", node=node)

    def exchange_version(self, version: str) -> str:
        """Have the cluster claim to be of that version of Ray. Returns the one before."""
        return self._call("exchange_version", version=version)

    def stored(self) -> bytes:
        """What the head stores of actors, jobs and workers, and under keys."""
        return bytes.fromhex(self._call("stored"))

    def processes(self) -> list[int]:
        """The agents on the nodes and all that they have started."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                is_agent = (folder / "cmdline").read_bytes().split(b"\0")[1:4] == [b"-m", b"farandole", b"agent"]
                if f"HOME={self.home}".encode() in environ and (is_agent or any(map(_IS_OF_AGENT, environ))):
                    found.append(int(folder.name))
        return found

    def end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


class _Held:
    """The cluster, in its process."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        logging.getLogger("ray").setLevel(logging.ERROR)
        self._cluster, self._nodes = Cluster(), dict[int, Any]()

    def begin(self, folder: str, dashboard: bool, most: int) -> list[str]:
        port = free_port()
        options = _autoscaling(Path(folder, "autoscaling.json"), port, most) if most else {}
        self._cluster.add_node(
            num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=dashboard, dashboard_port=0, temp_dir=folder,
            gcs_server_port=port, **options,
        )  # fmt: skip
        return [self._cluster.address, f"http://{self._cluster.webui_url}"]

    def add(self, options: Mapping[str, Any]) -> int:
        node = self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **options)
        number = max(self._nodes, default=0) + 1
        self._nodes[number] = node
        return number

    def node_ids(self) -> dict[str, int]:
        return {node.node_id: number for number, node in self._nodes.items()}

    def kill(self, node: int) -> None:
        self._nodes[node].kill_raylet(check_alive=False)

    def remove(self, node: int) -> None:
        self._cluster.remove_node(self._nodes.pop(node), allow_graceful=False)

    def kill_head(self) -> None:
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def restart_head(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def drain(self, node: int, seconds: float) -> bool:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + seconds) * 1000)
        client = GcsClient(address=self._cluster.address)
        return client.drain_node(self._nodes[node].node_id, reason, "spot", deadline_ms)[0]

    def actors(self, states: list[str]) -> list[Mapping[str, Any]]:
        table = self._cluster.global_state.actor_table(None).values()
        return [{**row, "DeathCause": str(row["DeathCause"])} for row in table if row["State"] in states]

    def live(self) -> int:
        return sum(node["Alive"] for node in self._cluster.global_state.node_table()) - 1

    def is_free(self, node: int) -> bool:
        free = self._cluster.global_state.available_resources_per_node()
        return free.get(self._nodes[node].node_id, {"CPU": 1.0}).get("CPU") == 1.0

    def exchange_version(self, version: str) -> str:
        from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
        from ray._raylet import GcsClient

        client, place = GcsClient(address=self._cluster.address), (CLUSTER_METADATA_KEY, b"cluster")
        metadata = json.loads(client.internal_kv_get(*place))
        before, metadata["ray_version"] = metadata["ray_version"], version
        client.internal_kv_put(place[0], json.dumps(metadata).encode(), True, place[1])
        return before

    def stored(self) -> str:
        from ray._raylet import GcsClient

        client = GcsClient(address=self._cluster.address)
        keys = [(space, key) for space in _SPACES for key in client.internal_kv_keys(b"", space)]
        values = [client.internal_kv_get(key, space) for space, key in keys]
        accessor = self._cluster.global_state._connect_and_get_accessor()
        rows = [*accessor.get_actor_table(None, None), *accessor.get_job_table(), *accessor.get_worker_table()]
        return b"\0".join([key for _, key in keys] + [each for each in (*values, *rows) if each]).hex()

    def end(self) -> None:
        self._cluster.shutdown()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def _autoscaling(file: Path, port: int, most: int) -> dict[str, Any]:
    """The options of a head whose autoscaler adds raylets of this machine, as Ray's own tests have it."""
    from ray.util import get_node_ip_address

    os.environ.update(RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1")
    worker = {"resources": {"CPU": 1, "object_store_memory": STORE_BYTES}, "min_workers": 0, "max_workers": most}
    head = {"resources": {"CPU": 0}, "max_workers": 0}
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    gcs = f"{get_node_ip_address()}:{port}"
    provider = {"type": "fake_multinode", "gcs_address": gcs, "disable_node_updaters": True}
    config: dict[str, Any] = {
        "cluster_name": "tests",
        "max_workers": most,
        "provider": provider,
        "available_node_types": {
            "ray.head.default": {"node_config": {}, **head},
            "worker": {"node_config": {}, **worker},
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in lists},
    }
    file.write_text(json.dumps(config))
    return {"autoscaling_config": str(file)}


@contextlib.contextmanager
def redis(folder: Path) -> Generator[None]:
    """A Redis from Debian's packages, in which the heads that start meanwhile keep what they know. Skips the test if it
    can't be had.

    Nodes that start meanwhile wait for their head for ten minutes, as KubeRay sets it up, and not for one.
    """
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("a Redis needs apt-get and dpkg")
    folder.mkdir()
    done = subprocess.run(["apt-get", "download", *REDIS], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no Redis: {done.stderr.strip().splitlines()[-1]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
    port, environ = free_port(), {**os.environ, "LD_LIBRARY_PATH": str(folder / "root/usr/lib/x86_64-linux-gnu")}
    command = [folder / "root/usr/bin/redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
            patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
            yield
    finally:
        server.terminate()
        server.wait()


def _print_logs(folder: Path) -> None:
    """Print the last warnings and errors of the heads and the raylets, for the report of a test that fails."""
    for path in sorted(folder.glob("session_latest/logs/[gr]*.out")):
        if path.name.startswith(("gcs_server", "raylet")):
            lines = [line for line in path.read_text(errors="replace").splitlines() if _IS_WORSE(line)]
            print(f"--- {path.name}", *lines[-SHOWN_LINES:], sep="\n")


def _end_rest(folder: Path) -> None:
    """End what Ray leaves behind: the log monitors of the nodes that its autoscaler has added."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"--session-dir={folder}/".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def ray_cluster(home: Path, *, nodes: int = 0, dashboard: bool = False, most: int = 0) -> Generator[RayCluster]:
    """A cluster, which this process and those that it starts find by itself. Skips the test if there can be none."""
    if not CAN:
        pytest.skip(WHY_NOT)
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets are in it, so its path is short
    (folder / "ray").mkdir()  # where Ray's library keeps the address of the newest cluster
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:

        def set_variables(variables: Mapping[str, str]) -> None:
            for name, value in variables.items():
                patch.setitem(ENVIRON, name, value)
                patch.setenv(name, value)

        set_variables({**QUIET, "HOME": str(home), "RAY_TMPDIR": str(folder)})
        cluster = RayCluster(folder, home, dashboard=dashboard, most=most)
        try:
            set_variables({"RAY_ADDRESS": cluster.address})
            for _ in range(nodes):
                cluster.add()
            yield cluster
        except BaseException:
            _print_logs(folder)
            raise
        finally:
            cluster.end()
            _end_rest(folder)
            until(lambda: not cluster.processes(), "the end of all agents")
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Carry out calls until standard input ends, and end the cluster."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    held = _Held()
    try:
        for line in sys.stdin:
            call, arguments = json.loads(line)
            answers.write(json.dumps(getattr(held, call)(**arguments)) + "\n")
            answers.flush()
    finally:
        held.end()


if __name__ == "__main__":
    main()
