"""What `kubectl` asks of an API server besides objects: which kinds there are, a pod's output, a command in a pod.

Source: https://kubernetes.io/docs/reference/using-api/ and client-go's remotecommand (channels of a WebSocket).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

CORE, BATCH, RBAC = "api/v1", "apis/batch/v1", "apis/rbac.authorization.k8s.io/v1"
KINDS: Mapping[str, Mapping[str, str]] = {
    CORE: {
        "namespaces": "Namespace",
        "pods": "Pod",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    BATCH: {"jobs": "Job"},
    RBAC: {"roles": "Role", "rolebindings": "RoleBinding"},
}
STDOUT, STDERR, ERROR = 1, 2, 3  # channels
LENGTH = 2  # protobuf's type of a field with a length
TURN_S = 0.02


def add_discovery(app: web.Application) -> None:
    """Add the paths that tell a client which kinds of objects there are, and that unknown fields are refused."""
    groups = [{"name": _group(path), "versions": [_version(path)], "preferredVersion": _version(path)}
              for path in KINDS if path != CORE]  # fmt: skip
    answers: dict[str, Any] = {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/openapi/v3": {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in KINDS}},
    }
    for path, kinds in KINDS.items():
        verbs = ["create", "delete", "get", "list", "patch", "update"]
        resources = [{"name": name, "singularName": kind.lower(), "kind": kind, "verbs": verbs,
                      "namespaced": kind != "Namespace"} for name, kind in kinds.items()]  # fmt: skip
        version = _version(path)["groupVersion"]
        answers[f"/{path}"] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        answers[f"/openapi/v3/{path}"] = {
            "openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.37.0"},
            "paths": {f"/{path}/{name}": {"patch": _operation(path, kind)} for name, kind in kinds.items()},
        }  # fmt: skip
    for path, answer in answers.items():
        app.router.add_get(path, _always(answer))


def _always(answer: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def respond(request: web.Request) -> web.Response:
        del request
        return web.json_response(answer)

    return respond


def _group(path: str) -> str:
    return path.split("/")[1] if path != CORE else ""


def _version(path: str) -> dict[str, str]:
    return {"groupVersion": "/".join(path.split("/")[1:]), "version": "v1"}


def _operation(path: str, kind: str) -> Any:
    """The description of a request that accepts the parameter `fieldValidation`."""
    kinds = {"group": _group(path), "version": "v1", "kind": kind}
    return {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-group-version-kind": kinds,
    }


def decoded(body: bytes) -> Any:
    """The object in a request. Of one in protobuf, as `kubectl create` sends it, only its kind and its name."""
    if not body.startswith(b"k8s\0"):
        return json.loads(body or b"null")
    envelope = _fields(body[4:])
    kinds, name = _fields(envelope[1]), _fields(_fields(envelope[2])[1])[1]
    return {"apiVersion": kinds[1].decode(), "kind": kinds[2].decode(), "metadata": {"name": name.decode()}}


def _fields(message: bytes) -> dict[int, bytes]:
    """The fields of a message of protobuf that have a length, by their number. Numbers are below 16, as here."""
    found, at = dict[int, bytes](), 0
    while at < len(message):
        number, kind = message[at] >> 3, message[at] & 7
        value, at = _varint(message, at + 1)
        if kind == LENGTH:
            found[number] = message[at : at + value]
            at += value
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of any length, and the place behind it."""
    value = shift = 0
    while message[at] & 0x80:
        value, at, shift = value | (message[at] & 0x7F) << shift, at + 1, shift + 7
    return value | message[at] << shift, at + 1


async def send_log(request: web.Request, log: Path, is_over: Callable[[], bool]) -> web.StreamResponse:
    """Answer with a pod's output; with `follow`, until the pod is over."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    with log.open("rb") as content:
        while True:
            over = is_over() or request.query.get("follow") != "true"
            await response.write(content.read())
            if over:
                break
            await asyncio.sleep(TURN_S)
    await response.write_eof()
    return response


async def execute(
    request: web.Request, words: Sequence[str], environ: Mapping[str, str], folder: Path
) -> web.StreamResponse:
    """Execute a command of a pod, and send its output and its end."""
    socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
    await socket.prepare(request)
    process = await asyncio.create_subprocess_exec(
        *words, env=environ, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    for channel, content in ((STDOUT, output), (STDERR, errors)):
        if content:
            await socket.send_bytes(bytes([channel]) + content)
    status: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if process.returncode:
        causes = [{"reason": "ExitCode", "message": str(process.returncode)}]
        status.update(status="Failure", reason="NonZeroExitCode", details={"causes": causes})
    await socket.send_bytes(bytes([ERROR]) + json.dumps(status).encode())
    await socket.close()
    return socket
