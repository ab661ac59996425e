"""An S3 server for tests: a real process that speaks the protocol, on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

AWS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


class S3:
    """moto's server on a port of its own, with one bucket. It keeps everything in memory: what is killed is empty."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT"), timeout=200):
                    return
            except OSError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def listing(self) -> str:
        with urllib.request.urlopen(f"{self.url}/bucket?list-type=2", timeout=200) as answer:
            return answer.read().decode()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
