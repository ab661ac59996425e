"""A real Slurm cluster in a folder: slurmctld, three slurmd and munged, on loopback, from Debian's packages.

Partition `low` is preempted by `high`, with a grace time. Nothing is installed on the machine. `WHY_NOT` says what is
missing.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.support.forked import ENVIRON

PACKAGES = (
    "slurmctld", "slurmd", "slurm-client", "munge", "libmunge2", "slurm-wlm-basic-plugins", "liblua5.1-0", "libhwloc15",
    "libhttp-parser2.9", "libjwt0", "libfreeipmi17", "libipmimonitoring6", "freeipmi-common",
)  # fmt: skip
NODES = 3
GRACE_S, KILL_S = 8, 5
CONTROLLER, MUNGE = "slurmctld-wlm", "munged"
WHY_NOT = "a Slurm cluster needs root, Linux's dpkg and apt-get with its package lists"
CAN = os.geteuid() == 0 and bool(shutil.which("apt-get")) and bool(shutil.which("dpkg"))
CONFIG = """
ClusterName=c
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CryptoType=crypto/munge
PluginDir={library}/slurm-wlm
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_s}
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=low Nodes=n[1-{count}] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} State=UP
PartitionName=high Nodes=n[1-{count}] PriorityTier=10 PreemptMode=OFF State=UP
"""


class Slurm:
    """The cluster. `root`: where the packages are unpacked."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        library = root / "usr/lib/x86_64-linux-gnu"
        self.environ = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{library}:{library}/slurm-wlm",
            "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "munge", "log"):
            (folder / name).mkdir(parents=True, mode=0o700)
        (folder / "munge/key").write_bytes(secrets.token_bytes(128))
        (folder / "munge/key").chmod(0o400)
        host, ports = socket.gethostname().partition(".")[0], _free_ports(NODES + 1)
        nodes = "\n".join(
            f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n]} CPUs=1 State=UNKNOWN"
            for n in range(1, NODES + 1)
        )
        config = CONFIG.format(
            host=host, port=ports[0], folder=folder, library=library, nodes=nodes, count=NODES, grace_s=GRACE_S,
            kill_s=KILL_S,
        )  # fmt: skip
        (folder / "slurm.conf").write_text(config)

    def begin(self) -> None:
        self.begin_munge()
        self.begin_controller()
        for n in range(1, NODES + 1):
            self.begin_node(f"n{n}")
        until(lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * NODES, "all nodes")

    def begin_munge(self) -> None:
        options = [f"--{name}={self.folder}/munge/{file}" for name, file in (
            ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"),
        )]  # fmt: skip
        self._start(MUNGE, "--force", "--foreground", *options)
        until(lambda: self.answers("munge", "--no-input", f"--socket={self.folder}/munge/sock"), "munged")

    def begin_controller(self) -> None:
        self._start(CONTROLLER, "-D")
        until(lambda: self.answers("scontrol", "ping") and " UP" in self.run("scontrol", "ping"), "slurmctld")

    def begin_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        stepd = str(self.root / "usr/sbin/slurmstepd-wlm")
        self._start("slurmd-wlm", "-D", "-N", name, "-d", stepd, name=name)

    def kill(self, name: str) -> None:
        """Kill a daemon: `CONTROLLER`, `MUNGE`, or the slurmd of a node, by the node's name."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        """End all jobs, then the daemons."""
        with contextlib.suppress(subprocess.SubprocessError):
            if MUNGE not in self._processes:
                self.begin_munge()
            if CONTROLLER not in self._processes:
                self.begin_controller()
            self.run("scancel", f"--user={getpass.getuser()}")
            until(lambda: not self.run("squeue", "-h"), "all jobs to end")
        for process in reversed(self._processes.values()):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, *command: str) -> str:
        """The output of a command of Slurm."""
        environ = {**os.environ, **self.environ}
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout

    def answers(self, *command: str) -> bool:
        environ = {**os.environ, **self.environ}
        return subprocess.run(command, env=environ, capture_output=True, check=False, timeout=60).returncode == 0

    def jobs(self) -> dict[str, str]:
        """The state of each job that is not over, by id, whosoever it is."""
        return dict(line.split() for line in self.run("squeue", "-h", "-o", "%i %T").splitlines())

    def node(self, job: str) -> str:
        return self.run("squeue", "-h", "--states=all", "-j", job, "-o", "%N").strip()

    def state(self, job: str) -> str:
        return self.run("squeue", "-h", "--states=all", "-j", job, "-o", "%T").strip()

    def submit(self, script: str, *options: str) -> str:
        """Submit a job of somebody else. Returns its id."""
        words = ("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script)
        return self.run(*words).strip()

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        name = name or program
        with (self.folder / "log" / name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [self.root / "usr/sbin" / program, *arguments], env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def slurm(folder: Path) -> Generator[Slurm]:
    """A cluster, for this process and those that it starts. Skips the test if there can be none."""
    if not CAN:
        pytest.skip(WHY_NOT)
    root = _unpack(folder)
    cluster = Slurm(root, folder / "slurm")
    with pytest.MonkeyPatch.context() as patch:
        home = folder / "home"
        home.mkdir()
        for name, value in {**cluster.environ, "HOME": str(home)}.items():
            patch.setitem(ENVIRON, name, value)
            patch.setenv(name, value)
        try:
            cluster.begin()
            yield cluster
        finally:
            cluster.end()


def _unpack(folder: Path) -> Path:
    """Download and unpack the packages. Skips the test if they can't be had."""
    debs = folder / "debs"
    debs.mkdir()
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{WHY_NOT}: {done.stderr.strip().splitlines()[-1]}")
    for deb in debs.iterdir():
        subprocess.run(["dpkg", "-x", str(deb), str(folder / "root")], check=True)
    return folder / "root"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
