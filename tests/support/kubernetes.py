"""A Kubernetes cluster in one process: an API server, a scheduler, kubelets, controllers of Jobs and of garbage.

It does what the pool of pods relies on, and each answer has the status and the form of the real server's. Manifests are
checked against the schemas of Kubernetes. A pod is a real process of this machine: its container's command, with the
Secret mounted as files. A deletion sends SIGTERM, and after the pod's grace period SIGKILL to all of its processes.
`Cluster` has a method for whatever a test makes happen. What only a real cluster does is not played: networks, images,
nodes that fail, admission by others.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from tests.support.forked import ENVIRON
from tests.support.kubernetes_api import KINDS, add_discovery, decoded, execute, send_log

VERSION = "1.37"
TOKEN, OTHER_TOKEN = "one-with-rights", "one-without"
NAMESPACE, IMAGE = "ml", "registry.example/farandole:1"
ROLE = Path(__file__).parents[2] / "examples" / "kubernetes" / "role.yaml"
MARK = "KUBELET_POD"  # the variable that all processes of a pod have
TURN_S = 0.02
DEFAULT_GRACE_S = 30
QUANTITY, LABEL_VALUE = r"[0-9.]+(m|[kMGTPE]i?)?", r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
VERBS = {"GET": "list", "POST": "create", "PUT": "update", "DELETE": "delete"}
Object = dict[str, Any]


class Refused(Exception):
    """An answer of the API server that is a Status."""

    def __init__(self, status: int, reason: str, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.after_s = status, reason, message, after_s

    def response(self) -> web.Response:
        content = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.status}
        headers = {} if self.after_s is None else {"Retry-After": f"{self.after_s:g}"}
        return web.json_response(
            {**content, "reason": self.reason, "message": self.message}, status=self.status, headers=headers
        )


@dataclass(kw_only=True)
class Fault:
    """What the next requests get, after they were carried out if `done`. `status`: 0 for a connection that breaks, -1
    for no answer.
    """

    status: int
    method: str
    kind: str
    times: int = 1
    done: bool = False
    after_s: float | None = None


@dataclass(kw_only=True)
class Container:
    """The process of a pod. `killed_at`: when the kubelet kills it; `reason`: why it ends, if not by itself.

    `paths`: the folder of this machine for each path that is mounted. `environ`: of its processes.
    """

    process: subprocess.Popen[bytes]
    init: int
    mounts: Mapping[str, Path]  # a folder for each Secret
    paths: Mapping[str, Path]
    environ: Mapping[str, str]
    log: Path
    killed_at: float | None = None
    reason: str = ""


@dataclass(kw_only=True)
class Node:
    """A node that has room for so many pods."""

    pods: int = 1
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """The cluster. Change its attributes and call its methods from a test; `lock` is held for less than a turn.

    Attributes:
        namespaces: one, or none if it is `empty`. Then the account has no rights either: what gives them is created.
        quota: the most pods of the namespace; None: no limit.
        queues: the LocalQueues of Kueue; a pod of one waits until the queue is in `admitted`.
        isolates: each pod has a process namespace of its own, in which its command has the process id 1. Takes root.
        history: each object that was ever stored, in each form that it had.
        requests: the verb, kind and name of each request.
    """

    def __init__(self, folder: Path, nodes: int, *, empty: bool = False) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.nodes = {f"node-{n}": Node() for n in range(1, nodes + 1)}
        self.images = {IMAGE}
        self.priorities = {"urgent": 1000, "cheap": -10}
        self.namespaces = set[str]() if empty else {NAMESPACE}
        self.service_accounts = {"default"} if empty else {"default", "farandole"}
        self.quota: int | None = None
        self.queues: set[str] = {"shared"}
        self.admitted: set[str] = set()
        self.isolates = False
        self.history: list[Object] = []
        self.requests: list[tuple[str, str, str]] = []
        self._id = secrets.token_hex(4)
        self._rules = {} if empty else _rights([_role()])
        self._objects: dict[tuple[str, str], Object] = {}
        self._containers: dict[str, Container] = {}  # by the pod's uid
        self._faults: list[Fault] = []
        self._ends = threading.Event()
        for name in ("home", "root", "logs", "mounts", "claims", "bin"):
            (folder / name).mkdir(parents=True)
        for name, words in {"python3": [], "farandole": ["-m", "farandole"]}.items():  # of the image
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.kubeconfig, self.admin = folder / "kubeconfig", folder / "admin.kubeconfig"
        self._loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._control)]

    # --- what a test does ------------------------------------------------------------------------------------

    def begin(self) -> None:
        for thread in self._threads:
            thread.start()
        until(lambda: self._loop.is_running(), "the API server's thread")
        self.come_back()

    def end(self) -> None:
        """End all pods, then the cluster."""
        self._ends.set()
        self._threads[1].join()
        for uid in tuple(self._containers):
            self._kill(uid)
        if self._runner:
            self.go_away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join()
        self._loop.close()

    def go_away(self) -> None:
        """Nothing listens at the API server's address."""
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._runner = None

    def come_back(self) -> None:
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        self.write_kubeconfig(TOKEN)

    def write_kubeconfig(self, token: str) -> None:
        names = {"cluster": "here", "user": "me"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "main",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "users": [{"name": "me", "user": {"token": token}}, {"name": "other", "user": {"token": OTHER_TOKEN}}],
            "contexts": [
                {"name": "main", "context": names},
                {"name": "powerless", "context": {**names, "user": "other"}},
            ],
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))
        content["clusters"][0]["cluster"]["server"] = f"http://127.0.0.1:{self._admin_port}"
        self.admin.write_text(yaml.safe_dump(content))

    def fail(self, status: int, method: str, kind: str, **options: Any) -> None:
        """The next such requests fail. See `Fault`."""
        with self.lock:
            self._faults.append(Fault(status=status, method=method, kind=kind, **options))

    def pods(self) -> dict[str, Object]:
        """The pods by name, as they are now."""
        return self._of("pods")

    def secrets(self) -> dict[str, Object]:
        return self._of("secrets")

    def _of(self, kind: str) -> dict[str, Object]:
        with self.lock:
            return {name: copy.deepcopy(each) for (of, name), each in self._objects.items() if of == kind}

    def phase(self, name: str) -> str:
        """The phase of a pod; Terminating if it is deleted, "" if it does not exist."""
        found = self.pods().get(name)
        if found is None:
            return ""
        return "Terminating" if "deletionTimestamp" in found["metadata"] else found["status"]["phase"]

    def create(self, name: str, *command: str, priority: str = "", **spec: Any) -> None:
        """Create a pod of somebody else."""
        container = {"name": "main", "image": IMAGE, "command": list(command)}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", **spec},
        }
        body["spec"]["containers"] = [container]
        if priority:
            body["spec"]["priorityClassName"] = priority
        with self.lock:
            self._create("pods", body, store=True)

    def delete(self, name: str, kind: str = "pods", grace_s: int | None = None) -> None:
        """As `kubectl delete` does."""
        with self.lock:
            self._delete(kind, name, grace_s)

    def evict(self, name: str) -> None:
        """As `kubectl drain` does."""
        with self.lock:
            self._disrupt(name, "EvictionByEvictionAPI", "Eviction API: evicting")

    def lose(self, name: str, reason: str = "") -> None:
        """Kill a pod without notice. `reason`: such as OOMKilled."""
        with self.lock:
            uid = self._objects["pods", name]["metadata"]["uid"]
            self._containers[uid].reason = reason
            self._kill(uid)

    def forget(self, name: str) -> None:
        """The pod disappears with all that it was: its node is gone."""
        with self.lock:
            self._kill(self._objects["pods", name]["metadata"]["uid"])
            self._remove("pods", name)

    def processes(self) -> list[int]:
        """All processes of this cluster's pods, whether the pods exist or not."""
        return _marked(self._id)

    def log(self, name: str) -> str:
        path = self.folder / "logs" / name
        return path.read_text(errors="replace") if path.exists() else ""

    # --- API server ------------------------------------------------------------------------------------------

    _runner: web.AppRunner | None = None
    _port = _admin_port = 0  # at the second one anybody is an administrator: kubectl sends no token without TLS

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application()
        add_discovery(app)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/log", self._log)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/exec", self._exec)
        app.router.add_route("*", "/api/v1/{kind:namespaces}", self._answer)
        for group in KINDS:
            for path in ("{kind}", "{kind}/{name}"):
                app.router.add_route("*", f"/{group}/namespaces/{{namespace}}/{path}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        for port in (self._port, self._admin_port):
            await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self._port, self._admin_port = (address[1] for address in self._runner.addresses)

    async def _log(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        return await send_log(request, self.folder / "logs" / name, lambda: self.phase(name) != "Running")

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        with self.lock:
            uid = self._objects["pods", request.match_info["name"]]["metadata"]["uid"]
            container = self._containers[uid]
        words = [_on_this_machine(word, container.paths) for word in request.query.getall("command")]
        return await execute(request, words, container.environ, self.folder / "root")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = decoded(await request.read())
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        with self.lock:
            self.requests.append((VERBS.get(request.method, request.method), kind, name))
            fault = next((f for f in self._faults if (f.method, f.kind) == (request.method, kind)), None)
            if fault:
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
            try:
                if fault and not fault.done:
                    raise Refused(fault.status, "Fault", "a fault of the test", fault.after_s)
                answer = web.json_response(self._carry_out(request, kind, name, body))
                if fault:
                    raise Refused(fault.status, "Fault", "a fault of the test", fault.after_s)
            except Refused as refused:
                answer = refused.response() if refused.status > 0 else None
        if answer is None:
            while fault and fault.status < 0 and request.transport and not request.transport.is_closing():
                await asyncio.sleep(TURN_S)
            if request.transport:
                request.transport.abort()
            return web.Response()
        return answer

    def _carry_out(self, request: web.Request, kind: str, name: str, body: Any) -> Object:
        verb, namespace = VERBS.get(request.method, request.method), request.match_info.get("namespace", "")
        if "watch" in request.query:
            verb = "watch"
        elif verb == "list" and name:
            verb = "get"
        words = request.headers.get("Authorization", "").split()
        assert request.transport
        is_admin = request.transport.get_extra_info("sockname")[1] == self._admin_port
        if not is_admin and (words[:1] != ["Bearer"] or words[1:] not in ([TOKEN], [OTHER_TOKEN])):
            raise Refused(401, "Unauthorized", "Unauthorized")
        if not is_admin and (words[1] != TOKEN or verb not in self._rules.get(kind, ())):
            who = f'User "{words[1]}" cannot {verb} resource "{kind}" in API group "" in the namespace "{namespace}"'
            raise Refused(403, "Forbidden", f"{kind} is forbidden: {who}")
        store = request.query.get("dryRun") != "All"
        if verb == "list":
            [(path, listed)] = [(path, kinds[kind]) for path, kinds in KINDS.items() if kind in kinds]
            version = path.partition("/")[2]
            return {"kind": f"{listed}List", "apiVersion": version, "items": self._selected(kind, request.query)}
        if kind == "namespaces" and verb == "create":
            self.namespaces.add(body["metadata"]["name"])
            return body
        if namespace not in self.namespaces:
            if name:
                raise _absent(kind, name)
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if verb == "create":
            return self._create(kind, body, store=store)
        if (kind, name) not in self._objects:
            raise _absent(kind, name)
        if verb == "get":
            return self._objects[kind, name]
        if verb == "update":
            return self._update(kind, name, body, store=store)
        if verb != "delete":
            raise Refused(405, "MethodNotAllowed", f"this server has no {verb}")
        return self._delete(kind, name, None) if store else self._objects[kind, name]

    def _selected(self, kind: str, query: Mapping[str, str]) -> list[Object]:
        wanted = [item.split("=") for item in query.get("labelSelector", "").split(",") if item]
        found = [each for (of, _), each in self._objects.items() if of == kind]
        return copy.deepcopy(
            [each for each in found if all(each["metadata"].get("labels", {}).get(k) == v for k, v in wanted)]
        )

    def _create(self, kind: str, body: Object, *, store: bool) -> Object:
        body = copy.deepcopy(body)
        _validate(body)
        metadata = body["metadata"]
        name = metadata["name"]
        if (kind, name) in self._objects:
            raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
        metadata.update(namespace=NAMESPACE, uid=f"{self._id}-{secrets.token_hex(4)}", creationTimestamp=_time(0))
        if kind == "pods":
            self._admit(name, body)
        if kind == "jobs":
            labels = {"batch.kubernetes.io/controller-uid": metadata["uid"], "job-name": name}
            body["spec"]["selector"] = {"matchLabels": labels}
            body["spec"]["template"]["metadata"]["labels"].update(labels)
        if store:
            self._objects[kind, name] = body
            self._record(kind, name)
            self._grant()
        return body

    def _grant(self) -> None:
        """Take over the accounts, and the rights of each role that is bound to one of them."""
        self.service_accounts |= self._of("serviceaccounts").keys()
        bound = {
            each["roleRef"]["name"]
            for each in self._of("rolebindings").values()
            if any(subject["name"] in self.service_accounts for subject in each["subjects"])
        }
        roles = [role for name, role in self._of("roles").items() if name in bound]
        self._rules.update(_rights(roles))

    def _admit(self, name: str, body: Object) -> None:
        spec, labels = body["spec"], body["metadata"].get("labels", {})
        priority = spec.get("priorityClassName", "")
        if priority and priority not in self.priorities:
            raise Refused(
                403, "Forbidden", f'pods "{name}" is forbidden: no PriorityClass with name {priority} was found'
            )
        spec["priority"] = self.priorities.get(priority, 0)
        account = spec.setdefault("serviceAccountName", "default")
        if account not in self.service_accounts:
            message = f'error looking up service account {NAMESPACE}/{account}: serviceaccount "{account}" not found'
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: {message}')
        alive = [each for each in self.pods().values() if each["status"]["phase"] in ("Pending", "Running")]
        if self.quota is not None and len(alive) >= self.quota:
            used = f"requested: pods=1, used: pods={len(alive)}, limited: pods={self.quota}"
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: pods, {used}')
        for container in spec["containers"]:
            for part in container.get("resources", {}).values():
                for value in part.values():
                    if not re.fullmatch(QUANTITY, value):
                        raise Refused(400, "BadRequest", f"quantities must match the regular expression: {value!r}")
        for value in spec.get("nodeSelector", {}).values():
            if not re.fullmatch(LABEL_VALUE, value):
                raise Refused(422, "Invalid", f"spec.nodeSelector: Invalid value: {value!r}")
        spec.setdefault("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        if labels.get("kueue.x-k8s.io/queue-name"):
            spec["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        body["status"] = {"phase": "Pending", "conditions": []}

    def _update(self, kind: str, name: str, body: Object, *, store: bool) -> Object:
        _validate(body)
        before = self._objects[kind, name]
        kept = {key: before["metadata"][key] for key in ("uid", "namespace", "creationTimestamp")}
        after = {**copy.deepcopy(body), "metadata": {**body["metadata"], **kept}}
        if store:
            self._objects[kind, name] = after
            self._record(kind, name)
        return after

    def _delete(self, kind: str, name: str, grace_s: int | None) -> Object:
        found = self._objects[kind, name]
        if kind != "pods" or "nodeName" not in found["spec"] or found["status"]["phase"] in ("Succeeded", "Failed"):
            self._remove(kind, name)
            return found
        if "deletionTimestamp" not in found["metadata"]:
            grace_s = found["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
            found["metadata"].update(deletionTimestamp=_time(grace_s), deletionGracePeriodSeconds=grace_s)
            self._record(kind, name)
        return found

    def _remove(self, kind: str, name: str) -> None:
        del self._objects[kind, name]

    def _disrupt(self, name: str, reason: str, message: str) -> None:
        self._set_condition(name, "DisruptionTarget", "True", reason, message)
        self._delete("pods", name, None)

    def _record(self, kind: str, name: str) -> None:
        self.history.append(copy.deepcopy(self._objects[kind, name]))

    def _set_status(self, name: str, **status: Any) -> None:
        found = self._objects["pods", name]["status"]
        if any(found.get(key) != value for key, value in status.items()):
            found.update(status)
            self._record("pods", name)

    def _set_condition(self, name: str, type: str, status: str, reason: str, message: str) -> None:
        others = [each for each in self._objects["pods", name]["status"]["conditions"] if each["type"] != type]
        condition = {"type": type, "status": status, "reason": reason, "message": message}
        self._set_status(name, conditions=[*others, condition])

    # --- controllers -----------------------------------------------------------------------------------------

    def _control(self) -> None:
        while not self._ends.wait(TURN_S):
            with self.lock:
                for name in self._of("jobs"):
                    self._carry_out_job(name)
                for name in sorted(self.pods(), key=lambda name: -self._objects["pods", name]["spec"]["priority"]):
                    self._collect(name)
                    if ("pods", name) in self._objects:
                        self._schedule(name)
                        self._run(name)

    def _carry_out_job(self, name: str) -> None:
        """The controller of Jobs: a pod, until one has succeeded or too many have failed. An eviction is no failure."""
        job = self._objects["jobs", name]
        pods = [pod for pod in self.pods().values() if pod["metadata"].get("labels", {}).get("job-name") == name]
        failed = [pod for pod in pods if pod["status"]["phase"] == "Failed" and not _is_disrupted(pod)]
        over = [pod for pod in pods if pod["status"]["phase"] in ("Succeeded", "Failed")]
        if len(over) < len(pods) or any(pod["status"]["phase"] == "Succeeded" for pod in pods):
            return
        if len(failed) <= job["spec"]["backoffLimit"]:
            template = copy.deepcopy(job["spec"]["template"])
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
            made = {"name": f"{name}-{secrets.token_hex(3)}", "ownerReferences": [owner]}
            metadata = {**template["metadata"], **made}
            self._create("pods", {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}, store=True)

    def _collect(self, name: str) -> None:
        """The garbage collector: delete a pod whose owners are gone."""
        owners = self._objects["pods", name]["metadata"].get("ownerReferences", [])
        uids = {each["metadata"]["uid"] for each in self._objects.values()}
        if owners and not any(owner["uid"] in uids for owner in owners):
            self._delete("pods", name, None)

    def _schedule(self, name: str) -> None:
        found = self._objects["pods", name]
        spec = found["spec"]
        queue = found["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        if spec.get("schedulingGates") and queue in self.admitted:
            del spec["schedulingGates"]
        if spec.get("schedulingGates"):
            message = "Scheduling is blocked due to non-empty scheduling gates"
            self._set_condition(name, "PodScheduled", "False", "SchedulingGated", message)
        if "nodeName" in spec or spec.get("schedulingGates") or "deletionTimestamp" in found["metadata"]:
            return
        usable = [node for node, each in self.nodes.items() if self._fits(spec, node, each)]
        used = {node: [each for each in self.pods().values() if _holds(each, node)] for node in usable}
        free = [node for node in usable if len(used[node]) < self.nodes[node].pods]
        if free and not self._is_behind(spec):
            spec["nodeName"] = free[0]
            self._set_condition(name, "PodScheduled", "True", "", "")
            return
        message = f"0/{len(self.nodes)} nodes are available: {len(usable)} Too many pods"
        self._set_condition(name, "PodScheduled", "False", "Unschedulable", message)
        for pods in used.values():
            victims = [each for each in pods if each["spec"]["priority"] < spec["priority"]]
            if victims and not any("deletionTimestamp" in each["metadata"] for each in pods):
                reason = "default-scheduler: preempting to accommodate a higher priority pod"
                self._disrupt(victims[0]["metadata"]["name"], "PreemptionByScheduler", reason)
                return
            if any("deletionTimestamp" in each["metadata"] for each in pods):
                return

    def _is_behind(self, spec: Object) -> bool:
        """Returns True if a pod of a higher priority waits: the node that it has freed is nominated for it."""
        waiting = [each["spec"] for each in self.pods().values() if "nodeName" not in each["spec"]]
        return any(each["priority"] > spec["priority"] and not each.get("schedulingGates") for each in waiting)

    def _fits(self, spec: Object, name: str, node: Node) -> bool:
        limits = [each.get("resources", {}).get("limits", {}) for each in spec["containers"]]
        gpus = sum(int(each.get("nvidia.com/gpu", 0)) for each in limits)
        affinity = (
            spec.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        )
        terms = affinity["nodeSelectorTerms"] if affinity else [{}]
        allowed = any(all(name not in f["values"] for f in term.get("matchFields", [])) for term in terms)
        labels = spec.get("nodeSelector", {}).items()
        return gpus <= node.gpus and allowed and all(node.labels.get(key) == value for key, value in labels)

    def _run(self, name: str) -> None:
        """The kubelet: start the pod's process, end it, and say what has become of it."""
        found = self._objects["pods", name]
        uid, container = found["metadata"]["uid"], self._containers.get(found["metadata"]["uid"])
        if container is None:
            if "nodeName" in found["spec"] and found["status"]["phase"] == "Pending":
                if "deletionTimestamp" in found["metadata"]:
                    self._remove("pods", name)
                else:
                    self._start(name, uid, found["spec"])
            return
        self._refresh(container)
        if container.process.poll() is None:
            if "deletionTimestamp" in found["metadata"]:
                if container.killed_at is None:
                    container.killed_at = time.monotonic() + found["metadata"]["deletionGracePeriodSeconds"]
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(container.init, signal.SIGTERM)
                elif time.monotonic() > container.killed_at:
                    self._kill(uid)
            return
        for pid in _marked(uid):  # no process outlives the container's first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if _marked(uid):
            return
        del self._containers[uid]
        for mount in container.mounts.values():
            shutil.rmtree(mount)
        code = container.process.returncode
        code = 128 - code if code < 0 else code
        state = {"exitCode": code, "reason": container.reason or ("Error" if code else "Completed")}
        if code and found["spec"]["containers"][0].get("terminationMessagePolicy") == "FallbackToLogsOnError":
            state["message"] = container.log.read_text(errors="replace")[-2048:]
        self._set_status(
            name,
            phase="Failed" if code else "Succeeded",
            containerStatuses=_container(found["spec"], {"terminated": state}),
        )
        if "deletionTimestamp" in found["metadata"]:
            self._remove("pods", name)

    def _start(self, name: str, uid: str, spec: Object) -> None:
        main = spec["containers"][0]
        if main["image"] not in self.images:
            self._set_status(name, containerStatuses=_container(spec, {"waiting": _unpulled(main["image"])}))
            return
        mounts, folders = dict[str, Path](), dict[str, Path]()
        paths = {each["name"]: each["mountPath"] for each in main.get("volumeMounts", [])}
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                secret = volume["secret"]["secretName"]
                if ("secrets", secret) not in self._objects:
                    waiting = {"waiting": {"reason": "ContainerCreating"}}
                    self._set_status(name, containerStatuses=_container(spec, waiting))
                    return
                mounts[secret] = self.folder / "mounts" / uid
                self._mount(secret, mounts[secret], volume["secret"].get("defaultMode", 0o644))
                folders[paths[volume["name"]]] = mounts[secret]
            if "persistentVolumeClaim" in volume:
                claim = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
                claim.mkdir(exist_ok=True)
                folders[paths[volume["name"]]] = claim
        words = [_on_this_machine(word, folders) for word in main["command"]]
        if shutil.which("setpriv"):
            words = ["setpriv", "--pdeathsig", "KILL", *words]  # no pod outlives the tests, however they end
        if self.isolates:
            words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *words]
        environ = {
            **ENVIRON,
            **{each["name"]: each["value"] for each in main.get("env", [])},
            "HOME": str(self.folder / "home"),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            MARK: uid,
        }
        log = self.folder / "logs" / name
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, env=environ, cwd=self.folder / "root", stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        init = _child(process.pid) if self.isolates else process.pid
        self._containers[uid] = Container(
            process=process, init=init, mounts=mounts, paths=folders, environ=environ, log=log
        )
        running = {"running": {"startedAt": _time(0)}}
        self._set_status(name, phase="Running", containerStatuses=_container(spec, running))

    def _mount(self, secret: str, folder: Path, mode: int) -> None:
        """As a kubelet does: the files are links into a folder that is replaced at once."""
        data = self._objects["secrets", secret].get("data", {})
        content = folder / f"..{secrets.token_hex(4)}"
        content.mkdir(parents=True)
        for file, value in data.items():
            (content / file).write_bytes(base64.b64decode(value))
            (content / file).chmod(mode)
            if not (folder / file).is_symlink():
                (folder / file).symlink_to(f"..data/{file}")
        link = folder / "..data_tmp"
        link.symlink_to(content.name)
        before = (folder / "..data").resolve() if (folder / "..data").is_symlink() else None
        link.rename(folder / "..data")
        if before:
            shutil.rmtree(before)

    def _refresh(self, container: Container) -> None:
        """Bring a changed Secret to the pod."""
        for secret, folder in container.mounts.items():
            now = self._objects.get(("secrets", secret), {}).get("data")
            files = {path.name: path for path in folder.iterdir() if not path.name.startswith("..")}
            if now and any(base64.b64decode(now[name]) != path.read_bytes() for name, path in files.items()):
                self._mount(secret, folder, next(iter(files.values())).stat().st_mode & 0o777)

    def _kill(self, uid: str) -> None:
        """SIGKILL to all processes of a pod."""
        container = self._containers.get(uid)
        if container:
            with contextlib.suppress(ProcessLookupError):
                os.kill(container.init, signal.SIGKILL)
            while pids := _marked(uid):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                container.process.poll()
            container.process.wait()


# --- parts ------------------------------------------------------------------------------------------------------------


def _role() -> Object:
    [role] = [each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] == "Role"]
    return role


def _rights(roles: Collection[Object]) -> dict[str, set[str]]:
    """The verbs that the roles allow, by the kind of object."""
    return {each: set(rule["verbs"]) for role in roles for rule in role["rules"] for each in rule["resources"]}


def _on_this_machine(word: str, paths: Mapping[str, Path]) -> str:
    """A word of a pod's command, with the folders of this machine for the paths that are mounted."""
    for path, folder in paths.items():
        word = word.replace(path, str(folder))
    return word


def _is_disrupted(pod: Object) -> bool:
    return any(each["type"] == "DisruptionTarget" for each in pod["status"]["conditions"])


def _validate(body: Object) -> None:
    try:
        kubernetes_validate.validate(body, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(422, "Invalid", error.message) from None
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", body["metadata"]["name"]):
        raise Refused(422, "Invalid", f"metadata.name: Invalid value: {body['metadata']['name']!r}")


def _absent(kind: str, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind} "{name}" not found')


def _time(after_s: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _holds(pod: Object, node: str) -> bool:
    return pod["spec"].get("nodeName") == node and pod["status"]["phase"] in ("Pending", "Running")


def _container(spec: Object, state: Object) -> list[Object]:
    return [{"name": spec["containers"][0]["name"], "ready": "running" in state, "state": state}]


def _unpulled(image: str) -> Object:
    message = f'Back-off pulling image "{image}": ErrImagePull: rpc error: code = NotFound desc = {image}: not found'
    return {"reason": "ImagePullBackOff", "message": message}


def _marked(uid: str) -> list[int]:
    """The processes of the pods whose uid begins so."""
    mark = f"{MARK}={uid}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(word.startswith(mark) for word in (path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
    return found


def _child(pid: int) -> int:
    """The first child of a process, once it has one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: children.read_text().split(), "the first process of the namespace")
    return int(children.read_text().split()[0])


@contextlib.contextmanager
def kubernetes(folder: Path, nodes: int = 2, *, empty: bool = False) -> Generator[Cluster]:
    """A cluster, for this process and those that it starts."""
    found = Cluster(folder / "cluster", nodes, empty=empty)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"KUBECONFIG": str(found.kubeconfig), "NO_PROXY": "127.0.0.1"}.items():
            patch.setitem(ENVIRON, name, value)
            patch.setenv(name, value)
        found.begin()
        try:
            yield found
        finally:
            found.end()


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def names(pods: Collection[str]) -> set[str]:
    """Those of pods of farandole."""
    return {name for name in pods if name.startswith("farandole-")}
