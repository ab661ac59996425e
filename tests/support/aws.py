"""AWS for tests: moto's server, and real processes that stand for the instances that it says are running.

An instance is the launch template's own user data, run by `sh`, with what is an instance's own around it: a metadata
service that enforces its token, a `shutdown` that ends the instance as EC2 would, and a home. The role's credentials
are in the environment, where boto3 finds them; nothing else of the run's is.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from farandole.pool import ec2 as asked
from farandole.pool.ec2 import user_data
from tests.support.forked import ENVIRON
from tests.support.metadata_services import interruption, recommendation
from tests.support.s3_server import AWS, S3

TEMPLATE = "trainers"
IMAGE = "ami-12c6146b"
LOOK_S = 0.1


def role() -> dict[str, str]:
    """The environment of who may call AWS."""
    return {name: value for name, value in ENVIRON.items() if not name.startswith("AWS_")} | AWS


class Moto(S3):
    """The same server, asked for EC2."""

    def client(self, service: str = "ec2") -> Any:
        import boto3

        return boto3.client(
            service, endpoint_url=self.url, region_name=AWS["AWS_DEFAULT_REGION"], aws_access_key_id="key",
            aws_secret_access_key="secret",
        )  # fmt: skip

    def make_template(self, name: str = TEMPLATE, **other: Any) -> None:
        """As docs/ec2.md says; `other`: what is not."""
        data = {
            "ImageId": IMAGE,
            "InstanceType": "c5.large",
            "UserData": base64.b64encode(user_data(sys.executable).encode()).decode(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
            "IamInstanceProfile": {"Name": "farandole"},
        }
        data.update(other)
        data = {key: value for key, value in data.items() if value is not None}
        self.client().create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)

    def instances(self) -> list[dict[str, Any]]:
        answer = self.client().get_paginator("describe_instances").paginate()
        return [each for page in answer for reservation in page["Reservations"] for each in reservation["Instances"]]

    def living(self) -> list[dict[str, Any]]:
        return [each for each in self.instances() if each["State"]["Name"] not in ("shutting-down", "terminated")]


def tags(instance: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}


class Metadata:
    """Of all instances, each under a path of its own: no answer without a token that was asked for by PUT.

    `said`: what else is answered, by instance and item.
    """

    def __init__(self, moto: Moto) -> None:
        tokens: set[str] = set()
        said: dict[tuple[str, str], str] = {}
        self.said = said

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                if self.path.endswith("/latest/api/token") and self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                    token = secrets.token_hex(8)
                    tokens.add(token)
                    self._answer(200, token)
                else:
                    self._answer(400, "")

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") not in tokens:
                    self._answer(401, "")
                    return
                _, me, _, _, what = self.path.split("/", 4)
                found = [each for each in moto.instances() if each["InstanceId"] == me]
                if what == "instance-id":
                    self._answer(200, me)
                elif what == "placement/region":
                    self._answer(200, AWS["AWS_DEFAULT_REGION"])
                elif found and what == "placement/availability-zone":
                    self._answer(200, found[0]["Placement"]["AvailabilityZone"])
                elif found and what.startswith("tags/instance/") and (value := tags(found[0]).get(what[14:])):
                    self._answer(200, value)
                elif text := said.get((me, what)):
                    self._answer(200, text)
                else:
                    self._answer(404, "")

            def _answer(self, code: int, text: str) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def end(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Machines:
    """A process for each instance that moto says is running, until it says otherwise, or the process ends it."""

    def __init__(self, moto: Moto, folder: Path) -> None:
        self.moto, self.folder = moto, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.booting = True  # whether new ones come up
        self._metadata = Metadata(moto)
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        shutdown = self._bin / "shutdown"
        shutdown.write_text('#!/bin/sh\ntouch "$HOME/shutdown"\n')
        shutdown.chmod(0o755)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tend)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        for me in tuple(self.processes):
            self._kill(me)
        self._metadata.end()

    def interrupt(self, me: str, within_s: float) -> None:
        """It has notice, as a spot instance has."""
        self._metadata.said[me, "spot/instance-action"] = interruption(within_s)

    def recommend(self, me: str) -> None:
        """It may be interrupted."""
        self._metadata.said[me, "events/recommendations/rebalance"] = recommendation()

    def log(self, me: str) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / me / "log").read_text(errors="replace")
        return ""

    def _tend(self) -> None:
        ec2 = self.moto.client()
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(Exception):  # the server is down, or ends
                states = {each["InstanceId"]: each["State"]["Name"] for each in self.moto.instances()}
                for me, state in states.items():
                    if state == "running" and me not in self.processes and self.booting:
                        self._boot(me)
                    elif state != "running" and me in self.processes:
                        self._kill(me)
                for me in tuple(self.processes):
                    if (self.folder / me / "shutdown").exists():
                        ec2.terminate_instances(InstanceIds=[me])
                        self._kill(me)

    def _boot(self, me: str) -> None:
        home = self.folder / me
        home.mkdir(exist_ok=True)
        data = self.moto.client().describe_instance_attribute(InstanceId=me, Attribute="userData")["UserData"]
        script = home / "user-data"
        script.write_bytes(base64.b64decode(data.get("Value", "")))
        environ = {
            **role(),
            "AWS_ENDPOINT_URL": self.moto.url,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"{self._metadata.url}/{me}",
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "HOME": str(home),
        }
        with (home / "log").open("ab") as log:
            self.processes[me] = subprocess.Popen(
                ["sh", str(script)], env=environ, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _kill(self, me: str) -> None:
        """As when the power goes: all of it at once."""
        process = self.processes.pop(me)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def account(folder: Path) -> Iterator[Moto]:
    """AWS, with the launch template of docs/ec2.md, for this process and those that it starts."""
    pytest.importorskip("boto3", reason="EC2 takes boto3")
    pytest.importorskip("moto", reason="AWS is moto's server")
    server = Moto(folder / "moto.log")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**AWS, "AWS_ENDPOINT_URL": server.url}.items():
            patch.setitem(ENVIRON, name, value)
            patch.setenv(name, value)
        asked.ask_again()
        server.make_template()
        try:
            yield server
        finally:
            server.end()


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
