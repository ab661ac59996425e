"""The pods that the pool creates, and what it reads of them: pure."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest

from farandole.control.ticket import Ticket, new_secret
from farandole.errors import UsageError
from farandole.pool import kubernetes as engine
from farandole.pool.base import PoolContext
from farandole.pool.cluster import ENDING, GONE, PENDING, RUNNING, ListedUnit
from farandole.pool.kubernetes import CONTAINER, IMAGE_REMEDY, LABEL, Answer, Pod, digest, listed, merged, parse
from farandole.protocol.messages import Job

GIVEN = {"namespace": "ml", "image": "registry.example/farandole:1"}
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()


def context(name: str = "kubernetes", **job: Any) -> PoolContext:
    ticket = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="mine")
    return PoolContext(name=name, run="mine-1a2b", ticket=ticket, job=Job(script="train.py", **job), logs=Path())


def valid(manifest: dict[str, Any]) -> dict[str, Any]:
    kubernetes_validate.validate(manifest, "1.37", strict=True)
    return manifest


# --- manifests --------------------------------------------------------------------------------------------------------


def test_a_pod_runs_the_agent_once_and_has_the_grace_of_its_deadline() -> None:
    its = context(threads=2)
    manifest = valid(engine.pod(parse({**GIVEN, "grace": "90"}, ""), its, "ab12-1", owner="u-1"))
    spec, metadata = manifest["spec"], manifest["metadata"]
    [container] = spec["containers"]
    assert metadata["name"] == f"farandole-{digest(its)}-ab12-1"
    assert metadata["labels"][LABEL] == digest(its)
    assert metadata["ownerReferences"][0]["uid"] == "u-1"
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 90
    assert spec["automountServiceAccountToken"] is False
    assert container["name"] == CONTAINER
    assert container["command"][:4] == ["python3", "-m", "farandole", "agent"]
    assert container["command"][container["command"].index("--grace") + 1] == "90"
    assert container["command"][container["command"].index("--host") + 1] == "ab12-1"
    assert container["resources"] == {"requests": {"cpu": "2"}, "limits": {}}


def test_the_ticket_is_in_the_secret_alone_and_mounted_for_its_owner_and_group() -> None:
    its = context()
    manifest, pod = valid(engine.secret(its)), engine.pod(parse(GIVEN, ""), its, "ab12-1")
    decoded = base64.b64decode(manifest["data"]["ticket"])
    assert msgspec.json.decode(decoded, type=Ticket) == its.ticket
    assert its.ticket.secret not in json.dumps(manifest["metadata"])
    assert its.ticket.secret not in json.dumps(pod)
    [volume] = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert volume == {"secretName": manifest["metadata"]["name"], "defaultMode": 0o400}
    assert pod["spec"]["securityContext"]["fsGroup"], "else only root can read it"


def test_all_that_is_asked_for_is_in_the_pod() -> None:
    options = {
        "cpus": "4500m", "memory": "16Gi", "gpus": "2", "queue": "shared", "priority": "cheap",
        "service_account": "trainer", "node_selector": "cloud.example/spot=true+zone=a", "python": "/venv/bin/python",
    }  # fmt: skip
    terms = parse({**GIVEN, **options}, "")
    manifest = valid(engine.pod(terms, context(), "ab12-1", avoid=["node-1", "node-2"]))
    spec = manifest["spec"]
    [container] = spec["containers"]
    assert terms.slots == 2, "a worker for each GPU"
    assert container["resources"] == {
        "requests": {"cpu": "4500m", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    assert container["command"][0] == "/venv/bin/python"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "shared"
    assert spec["priorityClassName"] == "cheap"
    assert spec["serviceAccountName"] == "trainer"
    assert spec["nodeSelector"] == {"cloud.example/spot": "true", "zone": "a"}
    [term] = spec["affinity"]["nodeAffinity"][engine.REQUIRED]["nodeSelectorTerms"]
    assert [field["values"] for field in term["matchFields"]] == [["node-1"], ["node-2"]]


def test_two_pools_and_two_runs_have_other_names() -> None:
    one = context()
    other = PoolContext(name="other", run=one.run, ticket=one.ticket, job=one.job, logs=one.logs)
    assert len({digest(one), digest(other), digest(context())}) == 3


TEMPLATE = """
metadata:
  labels: {team: vision}
spec:
  tolerations: [{key: spot, operator: Exists}]
  securityContext: {runAsUser: 1000, fsGroup: 2000}
  containers:
    - name: host
      env: [{name: DATA, value: /data}]
      volumeMounts: [{name: data, mountPath: /data}]
    - {name: other, image: other}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
"""


def test_a_template_adds_to_the_pod(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(TEMPLATE)
    manifest = valid(engine.pod(parse({**GIVEN, "template": str(tmp_path / "pod.yaml")}, ""), context(), "ab12-1"))
    spec = manifest["spec"]
    host, other = spec["containers"]
    assert manifest["metadata"]["labels"]["team"] == "vision"
    assert LABEL in manifest["metadata"]["labels"]
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert spec["securityContext"] == {"runAsUser": 1000, "fsGroup": 2000}
    assert [volume["name"] for volume in spec["volumes"]] == ["data", "farandole-ticket", "farandole-memory"]
    assert [mount["name"] for mount in host["volumeMounts"]] == ["data", "farandole-ticket", "farandole-memory"]
    assert host["image"] == GIVEN["image"]
    assert host["env"] == [{"name": "DATA", "value": "/data"}]
    assert other["image"] == "other"


def test_nodes_are_avoided_in_each_term_of_a_template() -> None:
    """Kubernetes takes a node for which one of the terms holds."""
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    affinity = {"nodeAffinity": {engine.REQUIRED: {"nodeSelectorTerms": zones}}}
    terms = replace(parse(GIVEN, ""), template={"spec": {"affinity": affinity}})
    manifest = valid(engine.pod(terms, context(), "ab12-1", avoid=["node-1"]))
    found = manifest["spec"]["affinity"]["nodeAffinity"][engine.REQUIRED]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in found] == [zone["matchExpressions"] for zone in zones]
    assert [term["matchFields"][0]["values"] for term in found] == [["node-1"], ["node-1"]]
    assert valid(engine.pod(terms, context(), "ab12-2"))["spec"]["affinity"] == affinity


def test_where_two_differ_the_second_counts() -> None:
    assert merged({"a": 1, "b": {"c": 1, "d": [1]}}, {"a": 2, "b": {"d": [2]}}) == {"a": 2, "b": {"c": 1, "d": [1, 2]}}
    assert merged({"command": ["a"]}, {"command": ["b"]}) == {"command": ["b"]}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gpus": "many"}, "gpus"),
        ({"slots": "0"}, "slots"),
        ({"grace": "-1"}, "grace"),
        ({"node_selector": "spot"}, "node_selector"),
        ({"template": "/nowhere/pod.yaml"}, "template"),
    ],
)
def test_an_option_that_is_no_number_label_or_file_is_an_error(options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse({**GIVEN, **options}, "--pool kubernetes")


@pytest.mark.parametrize("content", ["[1]", "a: b: c", "kind: Pod", "spec: 1", "{spec: {}, metadata: 1}"])
def test_a_template_that_is_no_pod_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(content)
    with pytest.raises(UsageError, match="template="):
        parse({**GIVEN, "template": str(tmp_path / "pod.yaml")}, "--pool kubernetes")


# --- pods -------------------------------------------------------------------------------------------------------------

SCHEDULED = {"type": "PodScheduled", "status": "True"}
FULL = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}
GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
STOPPED = {"type": "TerminationTarget", "status": "True", "reason": "Preempted", "message": "by Kueue"}


def read(phase: str, *conditions: object, state: object = None, deleted: str = "", **status: object) -> ListedUnit:
    statuses = [{"name": "sidecar", "state": {"running": {}}}, {"name": CONTAINER, "state": state or {}}]
    content = {
        "metadata": {"name": "farandole-d-ab-1", "uid": "u", **({"deletionTimestamp": deleted} if deleted else {})},
        "spec": {"nodeName": "node-1", "containers": []},
        "status": {"phase": phase, "conditions": conditions, "containerStatuses": statuses, **status},
    }
    return listed(msgspec.json.decode(json.dumps(content), type=Pod), "farandole-d-", NOW)


@pytest.mark.parametrize(
    ("state", "unit"),
    [
        (PENDING, read("Pending", SCHEDULED, state={"waiting": {"reason": "ContainerCreating"}})),
        (PENDING, read("Pending", FULL)),
        (RUNNING, read("Running", SCHEDULED, state={"running": {}})),
        (RUNNING, read("Unknown", SCHEDULED, state={"running": {}})),
        (ENDING, read("Running", SCHEDULED, state={"running": {}}, deleted="2026-01-01T00:00:40Z")),
        (GONE, read("Succeeded", state={"terminated": {"exitCode": 0}})),
        (GONE, read("Failed", state={"terminated": {"exitCode": 1}})),
        (GONE, read("Running", state={"terminated": {"exitCode": 0}})),  # a sidecar goes on
        (GONE, read("Running", EVICTED, state={"terminated": {"exitCode": 0}}, deleted="2026-01-01T00:00:40Z")),
    ],
)
def test_the_state_of_a_unit_is_that_of_the_agent_s_container(state: str, unit: ListedUnit) -> None:
    assert (unit.state, unit.name, unit.id, unit.node) == (state, "ab-1", "farandole-d-ab-1", "node-1")


def test_a_deleted_pod_has_the_rest_of_its_grace_by_the_server_s_clock() -> None:
    assert read("Running", deleted="2026-01-01T00:00:40Z").left_s == 40.0
    assert read("Running", deleted="2025-12-31T23:59:00Z").left_s == 0.0
    assert read("Running").left_s == math.inf


@pytest.mark.parametrize(
    ("words", "unit"),
    [
        ("Unschedulable: 0/2 nodes are available", read("Pending", FULL)),
        ("SchedulingGated: gates", read("Pending", GATED)),
        ("CreateContainerConfigError: no key",
         read("Pending", state={"waiting": {"reason": "CreateContainerConfigError", "message": "no\n key"}})),
        (f"ErrImagePull: not found; {IMAGE_REMEDY}",
         read("Pending", SCHEDULED, state={"waiting": {"reason": "ErrImagePull", "message": "not found"}})),
        ("EvictionByEvictionAPI: evicting", read("Running", EVICTED, deleted="2026-01-01T00:00:40Z")),
        ("Preempted: by Kueue", read("Failed", STOPPED, state={"terminated": {"exitCode": 137, "reason": "Error"}})),
        ("Evicted: low on memory", read("Failed", reason="Evicted", message="low on memory")),
        ("OOMKilled, exit code 137", read("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
        ("Error, exit code 1: no module",
         read("Failed", state={"terminated": {"exitCode": 1, "reason": "Error", "message": "a\n\nno module\n"}})),
    ],
)  # fmt: skip
def test_a_reason_is_in_kubernetes_words(words: str, unit: ListedUnit) -> None:
    assert unit.reason == words


def test_a_pod_that_starts_or_runs_has_no_reason() -> None:
    assert read("Pending", SCHEDULED, state={"waiting": {"reason": "ContainerCreating"}}).reason == ""
    assert read("Running", SCHEDULED, state={"running": {}}).reason == ""


# --- answers ----------------------------------------------------------------------------------------------------------


def refusal(status: int, message: str = "", body: bytes = b"") -> tuple[str, bool]:
    content = body or json.dumps({"kind": "Status", "reason": "R", "message": message}).encode()
    error = Answer(status=status, body=content, now=0.0, after_s=None).refusal()
    return str(error), error.doubt


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (401, "Unauthorized", "context="),
        (403, 'pods is forbidden: User "me" cannot create resource "pods"', "role.yaml"),
        (403, 'pods "p" is forbidden: exceeded quota: pods, requested: pods=1', "kubectl describe quota"),
        (403, "no PriorityClass with name urgent was found", "priority="),
        (403, 'error looking up service account ml/x: serviceaccount "x" not found', "service_account="),
        (403, 'pods "p" is forbidden: violates PodSecurity "restricted:latest"', "template="),
        (404, 'namespaces "mi" not found', "namespace="),
    ],
)
def test_a_refusal_is_one_line_in_kubernetes_words_with_the_remedy(status: int, message: str, remedy: str) -> None:
    text, doubt = refusal(status, message)
    assert message in text
    assert remedy in text.partition(message)[2]
    assert "\n" not in text
    assert not doubt


@pytest.mark.parametrize(
    ("status", "doubt"),
    [(400, False), (409, False), (410, False), (422, False), (429, False), (500, True), (504, True)],
)
def test_the_server_may_have_carried_out_what_it_failed_at(status: int, doubt: bool) -> None:
    assert refusal(status, "a")[1] == doubt


@pytest.mark.parametrize("body", [b"no healthy upstream", b"[]", b"\xff"])
def test_an_answer_of_somebody_in_between_is_an_error_too(body: bytes) -> None:
    text, doubt = refusal(503, body=body)
    assert "503" in text
    assert doubt
