"""The manifests of examples/kubernetes: valid, consistent, and the coordinator's pod carried out and evicted."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from farandole.control.ticket import Ticket, new_secret
from farandole.pool.base import PoolContext
from farandole.pool.kubernetes import CONTAINER, KubernetesKind, parse, pod
from farandole.pool.spec import pools
from farandole.protocol.messages import Job
from tests.support.harness import alone, read_lines
from tests.support.kubernetes import IMAGE, ROLE, Cluster, kubernetes, names, until

FOLDER = ROLE.parent
JOB = Path(__file__).parents[2] / "jobs" / "small.py"
EPOCHS = ("--epochs", "60")


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [each for each in manifests("coordinator.yaml") if each["kind"] == kind]
    return found


def words() -> list[str]:
    """The command line of `farandole run` in the coordinator's pod."""
    [container] = of_kind("Job")["spec"]["template"]["spec"]["containers"]
    found = re.search(r"^farandole run .*?(?= &$)", container["command"][-1], re.M | re.S)
    assert found
    return shlex.split(found[0])


def option(name: str) -> str:
    return words()[words().index(name) + 1]


@pytest.mark.parametrize("name", ["role.yaml", "coordinator.yaml"])
def test_each_manifest_is_valid(name: str) -> None:
    for manifest in manifests(name):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


def test_a_pod_from_the_template_is_valid_and_its_container_is_the_agent_s() -> None:
    ticket = Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="mine")
    context = PoolContext(name="pods", run="mine", ticket=ticket, job=Job(script="train.py"), logs=Path())
    terms = parse({"namespace": "ml", "image": IMAGE, "template": str(FOLDER / "host.yaml")}, "")
    manifest = pod(terms, context, "ab-1")
    kubernetes_validate.validate(manifest, "1.37", strict=True)
    assert [container["name"] for container in manifest["spec"]["containers"]] == [CONTAINER]


def test_the_coordinator_listens_at_the_name_that_its_service_gives_it() -> None:
    template, service = of_kind("Job")["spec"]["template"], of_kind("Service")
    [port] = service["spec"]["ports"]
    [terms] = pools([option("--pool")])
    host, subdomain = template["spec"]["hostname"], template["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    expected = f"{host}.{subdomain}.{terms.options['namespace']}.svc.cluster.local:{port['port']}"
    assert option("--listen") == expected


def test_the_coordinator_has_the_role_its_folder_lasts_and_its_image_is_the_hosts() -> None:
    spec, claim = of_kind("Job")["spec"]["template"]["spec"], of_kind("PersistentVolumeClaim")
    account, _role, binding = manifests("role.yaml")
    [container], [volume], [terms] = spec["containers"], spec["volumes"], pools([option("--pool")])
    assert spec["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert option("--folder").startswith(f"{container['volumeMounts'][0]['mountPath']}/")
    assert terms.options["image"] == container["image"]
    assert set(terms.options) <= set(KubernetesKind.options)


# --- carried out ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with kubernetes(tmp_path, nodes=3) as found:
        yield found


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(280)
def test_an_evicted_coordinator_comes_back_and_goes_on_with_its_pods(cluster: Cluster, tmp_path: Path) -> None:
    """The Job's pod, with another address and folder. Its controller creates a pod again after an eviction."""
    folder, pace, out = tmp_path / "runs" / "mine", tmp_path / "pace", tmp_path / "out"
    folder.parent.mkdir()
    pace.write_text("0.2")
    shutil.copy(JOB, cluster.folder / "root" / "train.py")  # the image's
    job = shlex.join(["train.py", str(out), "--pace", str(pace), *EPOCHS])
    spec = of_kind("Job")["spec"]["template"]["spec"]
    [*shell, script] = spec["containers"][0]["command"]
    here = {
        option("--folder"): str(folder), option("--listen"): "127.0.0.1", "train.py": job, "size=8": "size=2",
        spec["containers"][0]["image"]: IMAGE, f"--checkpoints {option('--checkpoints')}": "",
    }  # fmt: skip
    for text, other in here.items():
        assert text in script
        script = script.replace(text, other)

    def members() -> int:
        views = [line["members"] for line in read_lines(folder) if line.get("event") == "view"]
        return len(views[-1]) if views else 0

    def step() -> int:
        return max((line["step"] for line in read_lines(folder) if "event" not in line), default=-1)

    cluster.create("farandole-job-1", *shell, script, serviceAccountName=spec["serviceAccountName"])
    until(lambda: members() == 2, "both hosts", 200)
    hosts = names(cluster.pods()) - {"farandole-job-1"}
    cluster.evict("farandole-job-1")
    until(lambda: cluster.phase("farandole-job-1") == "", "the end of its pod")
    before = step()
    cluster.create("farandole-job-2", *shell, script, serviceAccountName=spec["serviceAccountName"])
    until(lambda: step() > before, "another step", 120)
    assert names(cluster.pods()) - {"farandole-job-2"} == hosts
    pace.unlink()
    until(lambda: cluster.phase("farandole-job-2") in ("Succeeded", "Failed"), "the end", 120)
    assert cluster.phase("farandole-job-2") == "Succeeded", cluster.log("farandole-job-2")
    assert not [line for line in read_lines(folder) if line.get("event") in ("lost", "resumed")]
    assert names(cluster.pods()) == {"farandole-job-2"}
    assert cluster.secrets() == {}
    alone(tmp_path / "alone", JOB, str(tmp_path / "expected"), *EPOCHS)
    assert out.read_bytes() == (tmp_path / "expected").read_bytes()
