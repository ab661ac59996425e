"""The Kubernetes engine of a cluster pool: a pod for each host, by the official client.

A pod runs the host's agent in one container, and is never restarted: the pool creates another one. An eviction, a
preemption and a deletion send SIGTERM to the agent, which reports it as a preemption notice. The pool deletes the pod
objects that are over.

The ticket is in a Secret of the run's pool and nowhere else: pods mount it as a file. The Secret owns the pods, so
Kubernetes deletes pods that outlive it. Pods are listed and not watched: a list is one request, and misses nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email.utils
import importlib.util
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import msgspec

from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator import listener
from farandole.errors import UsageError
from farandole.platform.bounds import MAX_WORKERS
from farandole.platform.extras import how_to_install
from farandole.pool import cluster
from farandole.pool.agent import AgentIdentity, mark, run_mark
from farandole.pool.base import PoolContext
from farandole.pool.cluster import ClusterPool, EngineError, ListedUnit
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

# --- terms ------------------------------------------------------------------------------------------------------------

OPTIONS = (
    "namespace", "image", "context", "cpus", "memory", "gpus", "queue", "priority", "service_account", "node_selector",
    "template", "slots", "grace", "python",
)  # fmt: skip
GRACE_S = 60
LONGEST_GRACE_S = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class KubernetesTerms:
    """The options of `--pool kubernetes,...`.

    Attributes:
        context: the context of the kubeconfig; "": its current one, or the service account of the pod of this process.
        cpus: what a pod requests, as Kubernetes writes it; "": a CPU for each thread of its workers.
        memory: what a pod requests and must not exceed, as Kubernetes writes it; "": no limit.
        gpus: the number of `nvidia.com/gpu` of a pod.
        queue: the LocalQueue of Kueue; "": none.
        priority: the PriorityClass; "": the cluster's default.
        node_selector: labels that the node of a pod must have.
        template: a pod on which those of the pool are based.
        slots: the number of workers of a pod.
        grace_s: the time between SIGTERM and SIGKILL.
        python: the interpreter in the image.
    """

    namespace: str
    image: str
    context: str
    cpus: str
    memory: str
    gpus: int
    queue: str
    priority: str
    service_account: str
    node_selector: Mapping[str, str]
    template: Mapping[str, Any]
    slots: int
    grace_s: int
    python: str


def parse(options: Mapping[str, str], where: str) -> KubernetesTerms:
    """Parse the options. Raises UsageError: one is invalid."""
    gpus = _number(options, "gpus", where, MAX_WORKERS)
    selector: dict[str, str] = {}
    for item in options["node_selector"].split("+") if "node_selector" in options else ():
        label, equals, value = item.partition("=")
        if not label or not equals:
            raise UsageError(f"{where}: node_selector={item}: write it as LABEL=VALUE, and several as A=B+C=D")
        selector[label] = value
    return KubernetesTerms(
        namespace=options["namespace"],
        image=options["image"],
        context=options.get("context", ""),
        cpus=options.get("cpus", ""),
        memory=options.get("memory", ""),
        gpus=gpus,
        queue=options.get("queue", ""),
        priority=options.get("priority", ""),
        service_account=options.get("service_account", ""),
        node_selector=selector,
        template=_template(options["template"], where) if "template" in options else {},
        slots=_number(options, "slots", where, MAX_WORKERS) or gpus or 1,
        grace_s=_number(options, "grace", where, LONGEST_GRACE_S) or GRACE_S,
        python=options.get("python", "python3"),
    )


def _number(options: Mapping[str, str], name: str, where: str, most: int) -> int:
    text = options.get(name, "")
    if text and (not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most):
        raise UsageError(f"{where}: {name}={text}: must be a whole number from 1 to {most}")
    return int(text or 0)


def _template(path: str, where: str) -> Mapping[str, Any]:
    import yaml  # the client needs it too

    try:
        content: object = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"{where}: template={path}: {reason}") from None
    pod = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    if not isinstance(pod.get("spec"), dict) or not isinstance(pod.get("metadata", {}), dict):
        raise UsageError(f"{where}: template={path}: not a pod; it must have `spec:`, as a pod's manifest has")
    return pod


# --- manifests --------------------------------------------------------------------------------------------------------
#
# A pod is named farandole-RUN-UNIT, in which RUN is a digest of the run's secret and the pool: only this run's pool can
# know it. It is a label too, by which the pods are listed. Annotations name the run and the pool for people.

PREFIX = "farandole"
LABEL = "farandole/pool"
CONTAINER = "host"
TICKET_FOLDER, TICKET = "/var/run/farandole", "ticket"
ONLY_OWNER = 0o400
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WHOLE = ("command", "args", "nodeSelectorTerms")  # lists that are replaced, and not added to
GROUP = 1000  # the group that may read the mounted ticket where the image's user is not root


def digest(context: PoolContext) -> str:
    """The part of names that only this pool of this run has."""
    name = mark(context.ticket, context.name, "")
    return run_mark(name)[:8] + name[-8:]


def _metadata(context: PoolContext, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "labels": {"app.kubernetes.io/name": PREFIX, LABEL: digest(context)},
        "annotations": {"farandole/run": context.run, "farandole/pool-name": context.name},
    }


def secret(context: PoolContext) -> dict[str, Any]:
    """The Secret with the run's ticket."""
    content = base64.b64encode(msgspec.json.encode(context.ticket)).decode()
    metadata = _metadata(context, f"{PREFIX}-{digest(context)}")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": {TICKET: content}}


def pod(
    terms: KubernetesTerms, context: PoolContext, unit: str, *, avoid: Sequence[str] = (), owner: str = ""
) -> dict[str, Any]:
    """The pod of a unit, not on the nodes `avoid`. `owner`: the uid of the Secret."""
    job = context.job
    ahead = 0 if job.setup or job.prepare else job.threads  # the modules may come later
    identity = AgentIdentity(folder=Path(), pool=context.name, host=unit, threads=ahead, grace_s=float(terms.grace_s))
    requests = {"cpu": terms.cpus or str(max(job.threads, 1) * terms.slots)}
    limits = {"nvidia.com/gpu": str(terms.gpus)} if terms.gpus else {}
    if terms.memory:
        requests["memory"] = limits["memory"] = terms.memory
    name = f"{PREFIX}-{digest(context)}"
    metadata = _metadata(context, f"{name}-{unit}")
    if terms.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = terms.queue
    if owner:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Secret", "name": name, "uid": owner}]
    container = {
        "name": CONTAINER,
        "image": terms.image,
        "command": [terms.python, *identity.command(Path(TICKET_FOLDER, TICKET)), "--wait"],
        "args": [],
        "resources": {"requests": requests, "limits": limits},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the status has the end of what it has printed
        "volumeMounts": [
            {"name": "farandole-ticket", "mountPath": TICKET_FOLDER, "readOnly": True},
            {"name": "farandole-memory", "mountPath": "/dev/shm"},
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": terms.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [
            {"name": "farandole-ticket", "secret": {"secretName": name, "defaultMode": ONLY_OWNER}},
            {
                "name": "farandole-memory",
                "emptyDir": {"medium": "Memory"},
            },  # 64 MB otherwise, too little for data loaders
        ],
    }
    if terms.priority:
        spec["priorityClassName"] = terms.priority
    if terms.service_account:
        spec["serviceAccountName"] = terms.service_account
    if terms.node_selector:
        spec["nodeSelector"] = dict(terms.node_selector)
    if avoid:
        spec["affinity"] = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": _without(avoid, terms.template)}}}
    own = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return merged(merged({"spec": {"securityContext": {"fsGroup": GROUP}}}, terms.template), own)


def _without(nodes: Sequence[str], template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The template's terms for nodes, one of which must hold, each without these nodes."""
    affinity = template.get("spec", {}).get("affinity") or {}
    terms = ((affinity.get("nodeAffinity") or {}).get(REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    return [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} for term in terms]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, as one; where they differ, `over` counts. Items of lists with the same name are one item."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            result[key] = merged(cast(dict[str, Any], before), cast(dict[str, Any], value))
        elif isinstance(before, list) and isinstance(value, list) and key not in WHOLE:
            result[key] = _merged_items(cast(list[Any], before), cast(list[Any], value))
        else:
            result[key] = value
    return result


def _merged_items(base: Sequence[Any], over: Sequence[Any]) -> list[Any]:
    items = list(base)
    for item in over:
        same = [n for n, other in enumerate(items) if isinstance(other, dict) and "name" in other
                and isinstance(item, dict) and other["name"] == cast(dict[str, Any], item).get("name")]  # fmt: skip
        if same:
            items[same[0]] = merged(items[same[0]], cast(dict[str, Any], item))
        else:
            items.append(item)
    return items


# --- pods -------------------------------------------------------------------------------------------------------------
#
# The fields of a pod that the pool reads, in the API's names.

LAST_WORDS = 300  # characters of a message
IMAGE_REMEDY = "see that image= names an image that nodes can pull, with the pull secrets of the pod's service account"
STARTING = ("ContainerCreating", "PodInitializing", "")


class Condition(msgspec.Struct, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Waiting(msgspec.Struct, rename="camel"):
    reason: str = ""
    message: str = ""


class Terminated(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct, rename="camel"):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, rename="camel"):
    name: str = ""
    state: ContainerState = msgspec.field(default_factory=ContainerState)


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    container_statuses: list[ContainerStatus] = []


class ObjectMeta(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    deletion_timestamp: datetime | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class Pod(msgspec.Struct, rename="camel"):
    metadata: ObjectMeta = msgspec.field(default_factory=ObjectMeta)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


class Items(msgspec.Struct):
    items: list[Pod] = []


def listed(pod: Pod, prefix: str, now: float) -> ListedUnit:
    """The unit of a pod. `now`: the API server's Unix time.

    A pod with other containers may go on when the agent's has ended; the unit is gone then.
    """
    status = pod.status
    own = next((each.state for each in status.container_statuses if each.name == CONTAINER), ContainerState())
    state, reason, left_s = cluster.RUNNING, "", math.inf
    if own.terminated or status.phase in ("Succeeded", "Failed"):
        state, reason = cluster.GONE, _disruption(status) or _end(status, own.terminated)
    elif pod.metadata.deletion_timestamp:
        state, reason = cluster.ENDING, _disruption(status) or "it is deleted"
        left_s = max(pod.metadata.deletion_timestamp.timestamp() - now, 0.0)
    elif status.phase in ("Pending", ""):
        state, reason = cluster.PENDING, _obstacle(status, own.waiting)
    name = pod.metadata.name
    return ListedUnit(
        name=name.removeprefix(prefix), id=name, state=state, node=pod.spec.node_name, reason=reason, left_s=left_s
    )


def _disruption(status: PodStatus) -> str:
    """Why Kubernetes has ended the pod, "" if it has not. Kueue sets a condition of its own."""
    for condition in status.conditions:
        if condition.type in ("DisruptionTarget", "TerminationTarget") and condition.status == "True":
            return _words(condition.reason, condition.message)
    return _words(status.reason, status.message) if status.reason else ""


def _end(status: PodStatus, ended: Terminated | None) -> str:
    if ended is None or not ended.exit_code:
        return "completed" if status.phase != "Failed" else "failed"
    lines = [line.strip() for line in ended.message.splitlines() if line.strip()]
    return _words(f"{ended.reason or 'Error'}, exit code {ended.exit_code}", lines[-1] if lines else "")


def _obstacle(status: PodStatus, waiting: Waiting | None) -> str:
    """Why the pod does not run yet, "" if it starts."""
    if waiting and waiting.reason not in STARTING:
        words = _words(waiting.reason, waiting.message)
        return f"{words}; {IMAGE_REMEDY}" if "Image" in waiting.reason else words
    for condition in status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return _words(condition.reason, condition.message)
    return ""


def _words(reason: str, message: str) -> str:
    return ": ".join(each for each in (reason, " ".join(message.split())[:LAST_WORDS]) if each)


# --- requests ---------------------------------------------------------------------------------------------------------

CONNECT_S, REQUEST_S = 10.0, 30.0
KUBECONFIG = "~/.kube/config"
REMEDIES = {  # for the words of a refusal
    "exceeded quota": "ask for less, or wait until something else ends; see `kubectl describe quota`",
    "PriorityClass": "see `kubectl get priorityclass`, and name one as priority=NAME",
    "service account": "see `kubectl get serviceaccount`, and name one as service_account=NAME",
    "serviceaccount": "see `kubectl get serviceaccount`, and name one as service_account=NAME",
    "violates PodSecurity": "give the pods what it asks for with template=FILE",
    "namespaces ": "see `kubectl get namespace`, and name one as namespace=NAME",
    "cannot ": "it needs the Role in examples/kubernetes/role.yaml",
}
CREDENTIALS = "log in again, or name another context of the kubeconfig as context=NAME"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of the API server. `now`: its Unix time; `after_s`: the request may be repeated after this time."""

    status: int
    body: bytes
    now: float
    after_s: float | None

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def reason(self) -> str:
        """The reason of a refusal, in one word of the API."""
        return str(self._failure().get("reason", ""))

    def refusal(self) -> EngineError:
        """The error that this answer is, with the remedy."""
        message = " ".join(str(self._failure().get("message", "")).split())[:LAST_WORDS] or "no message"
        remedy = next((remedy for words, remedy in REMEDIES.items() if words in message), "")
        text = "; ".join(part for part in (message, CREDENTIALS if self.status == 401 else remedy) if part)
        return EngineError(f"the API server answers {self.status}: {text}", doubt=self.status >= 500)

    def _failure(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found: object = json.loads(self.body)
            if isinstance(found, dict):
                return cast(dict[str, Any], found)
        return {"message": self.body.decode(errors="replace")}


class KubernetesApi:
    """The API server, for pods and Secrets of one namespace. Its calls block."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self.address = str(client.configuration.host)

    def close(self) -> None:
        """Close the connections. A later request opens new ones."""
        self._client.close()

    def request(self, method: str, kind: str, name: str = "", *, body: object = None, **query: str) -> Answer:
        """Send a request. Repeats it when the server asks for that (429 with Retry-After).

        Raises:
            EngineError: there is no answer. It is in doubt, because the server may have carried out the request.
        """
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config.config_exception import ConfigException
        from urllib3.exceptions import HTTPError

        path = f"/api/v1/namespaces/{self._namespace}/{kind}" + (f"/{name}" if name else "")
        end = time.monotonic() + REQUEST_S
        while True:
            headers = {"Accept": "application/json", "Content-Type": "application/json"}
            try:
                request = self._client.param_serialize(
                    method, path, query_params=list(query.items()), header_params=headers, body=body,
                    auth_settings=["BearerToken"],
                )  # fmt: skip
                response = self._client.call_api(*request, _request_timeout=(CONNECT_S, REQUEST_S))
                answer = _answer(response.status, response.read(), response.headers)
            except (ApiException, ConfigException, HTTPError, OSError) as error:
                text = f"the API server at {self.address} does not answer: {_cause(error)}"
                raise EngineError(f"{text}; see `kubectl cluster-info`", doubt=True) from None
            if answer.status != 429 or answer.after_s is None or time.monotonic() + answer.after_s > end:
                return answer
            time.sleep(answer.after_s)

    def check(self, method: str, kind: str, name: str = "", *, body: object = None) -> None:
        """Send a request without effect; `name` need not exist. Raises EngineError: it would be refused."""
        answer = self.request(
            method, kind, name, body=body, **({"limit": "1"} if method == "GET" else {"dryRun": "All"})
        )
        if not answer.is_ok and not (answer.status == 404 and name):
            raise answer.refusal()


def _answer(status: int, body: bytes | None, headers: Mapping[str, str]) -> Answer:
    now, after_s = time.time(), None
    with contextlib.suppress(ValueError, TypeError):
        now = email.utils.parsedate_to_datetime(headers.get("Date", "")).timestamp()
    with contextlib.suppress(ValueError):
        after_s = max(float(headers.get("Retry-After", "")), 0.0)
    return Answer(status=status, body=body or b"", now=now, after_s=after_s)


def _cause(error: Exception) -> str:
    """What a client's error says, in one line, without its objects."""
    reason = getattr(error, "reason", None) or error
    text = re.sub(r"<[^>]*>:? ?|\bHTTPS?Connection(Pool)?\([^)]*\):? ?", "", " ".join(str(reason).split()))
    return text[:LAST_WORDS] or type(error).__name__


def connect(terms: KubernetesTerms) -> KubernetesApi:
    """The API server of the kubeconfig, or of the pod of this process. Blocks.

    Raises:
        EngineError: neither is there, or it can't be read.
    """
    from kubernetes.client import ApiClient, Configuration
    from kubernetes.config.incluster_config import load_incluster_config
    from kubernetes.config.kube_config import load_kube_config

    configuration = Configuration()
    kubeconfig = os.environ.get("KUBECONFIG") or str(Path(KUBECONFIG).expanduser())
    try:
        if terms.context or any(Path(path).exists() for path in kubeconfig.split(os.pathsep)):
            load_kube_config(
                config_file=kubeconfig, context=terms.context or None, client_configuration=configuration,
                persist_config=False,
            )  # fmt: skip
        else:
            load_incluster_config(client_configuration=configuration)
    except Exception as error:  # noqa: BLE001  the client raises what its YAML, its plugins and files raise
        raise EngineError(
            f"no cluster: {_cause(error)}; name the kubeconfig in KUBECONFIG, and a context of it as context=NAME"
        ) from None
    configuration.retries = False  # the pool repeats what it needs
    return KubernetesApi(ApiClient(configuration), terms.namespace)


# --- engine -----------------------------------------------------------------------------------------------------------


class Pods:
    """The engine of a pool whose units are pods. See `cluster.Engine`. Call `close` when the pool is closed."""

    label, noun, fixed = "Kubernetes", "pod", 0

    def __init__(self, api: KubernetesApi, terms: KubernetesTerms, context: PoolContext) -> None:
        self.slots, self.kill_s = terms.slots, float(terms.grace_s)
        self.remedy = f"kubectl --namespace {terms.namespace} delete pod"
        self._api, self._terms, self._context = api, terms, context
        self._name = f"{PREFIX}-{digest(context)}"
        self._owner = ""  # the uid of the Secret, "" until it is written
        self._is_closed = False
        self._lock = threading.Lock()  # held while the Secret is written or deleted

    async def submit(self, name: str, avoid: Sequence[str]) -> str:
        return await asyncio.to_thread(self._submit, name, avoid)

    async def list(self) -> Sequence[ListedUnit]:
        return await asyncio.to_thread(self._list)

    async def cancel(self, ids: Sequence[str]) -> None:
        await asyncio.to_thread(self._delete, "pods", ids)

    async def close(self) -> None:
        """Delete the Secret. Raises EngineError."""
        await asyncio.to_thread(self._delete_secret)

    def _submit(self, name: str, avoid: Sequence[str]) -> str:
        self._write_secret()  # somebody may have deleted it
        manifest = pod(self._terms, self._context, name, avoid=avoid, owner=self._owner)
        answer = self._api.request("POST", "pods", body=manifest)
        if not answer.is_ok and answer.reason != "AlreadyExists":
            raise answer.refusal()
        return f"{self._name}-{name}"

    def _list(self) -> Sequence[ListedUnit]:
        if not self._owner:
            self._write_secret()
        answer = self._api.request("GET", "pods", labelSelector=f"{LABEL}={digest(self._context)}")
        if not answer.is_ok:
            raise answer.refusal()
        try:
            pods = msgspec.json.decode(answer.body, type=Items).items
        except msgspec.MsgspecError as error:
            raise EngineError(f"the API server's list of pods can't be read: {error}") from None
        units = [(each, listed(each, f"{self._name}-", answer.now)) for each in pods]
        over = [unit.id for pod, unit in units if unit.state == cluster.GONE and not pod.metadata.deletion_timestamp]
        with contextlib.suppress(EngineError):  # the next list repeats it
            self._delete("pods", over)
        return [unit for _, unit in units]

    def _delete(self, kind: str, names: Sequence[str]) -> None:
        """Delete what exists of these. Raises EngineError after the last one."""
        error: EngineError | None = None
        for name in names:
            try:
                answer = self._api.request("DELETE", kind, name)
                if not answer.is_ok and answer.status != 404:
                    raise answer.refusal()
            except EngineError as failure:
                error = failure
        if error:
            raise error

    def _write_secret(self) -> None:
        """Write the ticket unless this process has, because an earlier one may have had another address."""
        with self._lock:
            if self._is_closed:
                return
            manifest = secret(self._context)
            answer = self._api.request("POST", "secrets", body=manifest)
            if answer.reason == "AlreadyExists":
                if self._owner:
                    return
                answer = self._api.request("PUT", "secrets", self._name, body=manifest)
            if not answer.is_ok:
                raise answer.refusal()
            self._owner = msgspec.json.decode(answer.body, type=Pod).metadata.uid

    def _delete_secret(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._delete("secrets", [self._name])
                self._is_closed = True
                self._api.close()


_log = logging.getLogger(__name__)
CLOSE_TRIES, AGAIN_S = 5, 2.0


class PodPool(ClusterPool):
    """A pool of pods. At its end nothing of it is left in the namespace, the Secret included."""

    _engine: Pods

    async def close(self) -> None:
        await super().close()
        for number in range(CLOSE_TRIES):
            try:
                return await self._engine.close()
            except EngineError as error:
                if number == CLOSE_TRIES - 1:
                    _log.warning("the run's Secret may be left: %s; see `kubectl get secret`", error)
                else:
                    await asyncio.sleep(AGAIN_S)


# --- kind -------------------------------------------------------------------------------------------------------------


class KubernetesKind:
    """The kind of pool that `--pool kubernetes,...` names. See `spec.PoolKind`."""

    options = OPTIONS
    required = ("namespace", "image")

    def is_sized(self, terms: PoolTerms) -> bool:
        del terms
        return False

    def check(self, terms: PoolTerms, listen: str, show: Callable[[str], None], *, priced: bool) -> None:
        where = f"--pool {terms.name}"
        if importlib.util.find_spec("kubernetes") is None:
            raise UsageError(f"{where}: the package `kubernetes` is not installed; {how_to_install('kubernetes')}")
        parsed = parse(terms.options, where)
        if priced:
            raise UsageError(f"--max-cost: the price of a pod of {where} is unknown; use --max-hours")
        try:
            api = connect(parsed)
            note = _check_rights(api, parsed, terms.name)
        except EngineError as error:
            raise UsageError(f"{where}: {error}") from None
        if note:
            show(f"{where}: {note}")
        if listener.is_loopback(listener.parse(listen)[0]):
            if not listener.is_loopback(urlsplit(api.address).hostname or ""):
                raise UsageError(
                    f"{where}: pods can't reach a run that listens at {listen} alone; name an address of this machine "
                    f"in their network with --listen, or 0.0.0.0"
                )
            show(f"{where}: only pods in the network of this machine reach a run that listens at {listen}")

    async def open(self, terms: PoolTerms, context: PoolContext) -> ClusterPool:
        parsed = parse(terms.options, f"--pool {terms.name}")
        engine = Pods(await asyncio.to_thread(connect, parsed), parsed, context)
        return PodPool(engine, context, size=terms.size)


def _check_rights(api: KubernetesApi, terms: KubernetesTerms, pool: str) -> str:
    """Make each kind of request that the pool makes, without effect. Returns a note, "" for none.

    Raises:
        EngineError: one would be refused. A quota that is used up is a note, because others may leave it meanwhile.
    """
    ticket = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="check")
    context = PoolContext(name=pool, run="check", ticket=ticket, job=Job(script="check"), logs=Path())
    name, note = f"{PREFIX}-{digest(context)}", ""
    try:
        api.check("POST", "pods", body=pod(terms, context, "check"))
    except EngineError as error:
        if "exceeded quota" not in str(error):
            raise
        note = f"no pod can be created now: {error}"
    api.check("GET", "pods")
    api.check("DELETE", "pods", name)
    api.check("POST", "secrets", body=secret(context))
    api.check("PUT", "secrets", name, body=secret(context))
    api.check("DELETE", "secrets", name)
    return note
