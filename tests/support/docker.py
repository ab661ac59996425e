"""A Docker daemon and a registry of a test's own, in a network namespace.

Nothing outside is asked for an image: the registry is `registry.example`, and the images that docker/Dockerfile begins
from are made here, of Debian's Python and the wheels that pip finds on this machine. `WHY_NOT` says what it takes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import network
from tests.support.network import ip
from tests.support.pages import ROOT

BASE = "python:3.12-slim"  # what docker/Dockerfile begins from
PROGRAMS = ("dockerd", "docker-registry", "debootstrap", "nsenter", "unshare")
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}  # the Debian that has this version of Python
SUITE = SUITES.get(sys.version_info[:2])
WHY_NOT = "a Docker daemon takes root, apt's docker.io, docker-registry and debootstrap, and Python 3.11 or 3.13"
AVAILABLE = network.AVAILABLE and all(map(shutil.which, PROGRAMS)) and SUITE is not None
CLIENT = "/usr/bin/docker"  # of the daemon's package: it has BuildKit
PIP = "[global]\nno-index = true\nfind-links = /wheels\n"
LOCAL = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}


class Docker:
    """The daemon.

    `on`: what to put before a command that is to be at the daemon's place in the network.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._name = f"farandole-{os.getpid()}-docker"
        self.on = ["nsenter", f"--net=/run/netns/{self._name}"]  # `ip netns exec` hides cgroups
        client = folder / "bin" / "docker"
        client.parent.mkdir()
        client.symlink_to(CLIENT)
        socket = {"DOCKER_HOST": f"unix://{folder / 'socket'}", "DOCKER_CONFIG": str(folder / "config")}
        self.environ = {**os.environ, **LOCAL, **socket, "PATH": f"{client.parent}:{os.environ['PATH']}"}

    def run(self, command: str, folder: Path) -> str:
        """Execute a command of a shell in a folder. It must succeed. Returns what it has printed."""
        done = subprocess.run(
            [*self.on, "bash", "-e", "-c", command], cwd=folder, env=self.environ, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Serve, with the base image and nothing else; all of it is gone at the end."""
        ip("netns", "add", self._name)
        try:
            ip("-n", self._name, "link", "set", "lo", "up")
            with self._process("registry", self._registry()), self._process("daemon", self._daemon()):
                self._until_it_answers()
                self._import_base()
                yield
        finally:
            ip("netns", "del", self._name)
            shutil.rmtree(self.folder)  # gigabytes

    def _registry(self) -> str:
        settings = self.folder / "registry.yml"
        place = f"storage: {{filesystem: {{rootdirectory: {self.folder / 'registry'}}}}}"
        settings.write_text(f'version: 0.1\n{place}\nhttp: {{addr: "127.0.0.1:80"}}\n')
        return f"exec docker-registry serve {settings}"

    def _daemon(self) -> str:
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost registry.example\n")
        places = (
            f"--data-root {self.folder / 'data'} --exec-root {self.folder / 'exec'} --pidfile {self.folder / 'pid'}"
        )
        options = "--iptables=false --ip6tables=false --insecure-registry registry.example"
        socket = self.environ["DOCKER_HOST"]
        return f"mount --bind {hosts} /etc/hosts && exec dockerd -H {socket} {places} {options}"

    @contextlib.contextmanager
    def _process(self, name: str, command: str) -> Iterator[None]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.on, "unshare", "--mount", "sh", "-c", command], env=self.environ, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + 60
        while subprocess.run([CLIENT, "info"], env=self.environ, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, (self.folder / "daemon.log").read_text()
            time.sleep(0.1)

    def _import_base(self) -> None:
        assert SUITE
        root = self.folder / "root"
        debian = ["debootstrap", "--variant=minbase", "--include=python3,python3-pip,ca-certificates", SUITE, root]
        subprocess.run(debian, check=True, stdout=subprocess.DEVNULL)
        for mark in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
        (root / "usr" / "bin" / "python").symlink_to("python3")
        (root / "etc" / "pip.conf").write_text(PIP)
        download(root / "wheels")
        self.run(f"tar -C {root} -c . | docker import - {BASE}", self.folder)
        shutil.rmtree(root)


def download(folder: Path) -> None:
    """All that the image installs, as wheels for this version of Python."""
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "-q", "--constraint", "constraints.txt", "-d", folder),
            *(torch, ".[tls,s3,images,kubernetes]", "setuptools", "wheel"),
        ],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
