"""Hosts over real SSH, a file of them, and a run on it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.harness import Elastic
from tests.support.sshd import Sshd


class Rack:
    """`job` is a script and its arguments; `--pace` is added, and its file is there until it is taken away."""

    def __init__(self, hosts: Sshd, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.file, self.pace, self.out = folder / "hosts", folder / "pace", folder / "out"

    def write(self, *lines: str) -> None:
        self.file.write_text("".join(f"{line}\n" for line in lines))

    def name(self, number: int) -> str:
        return f"{self.hosts.addresses[number]}:{self.hosts.port}"

    def line(self, number: int, slots: int = 1) -> str:
        return f"{self.name(number)} slots={slots} python={sys.executable}"

    def run(self, script: Path, *arguments: str, pace: str = "", workers: int = 4) -> Elastic:
        self.pace.write_text(pace)
        options = ["--pool", f"ssh,hosts={self.file},ssh={self.hosts.ssh}"]
        job = (script, str(self.out), "--pace", str(self.pace), *arguments)
        return Elastic(self.folder / "run", *job, workers=workers, options=options, deadline_s=500.0)
