"""The engine's requests to an API server that fails: no pod is started (`tests/support/kubernetes.py`)."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from farandole.control.ticket import Ticket, new_secret
from farandole.errors import UsageError
from farandole.pool.base import PoolContext
from farandole.pool.cluster import PENDING, EngineError, ListedUnit
from farandole.pool.kubernetes import IMAGE_REMEDY, KubernetesKind, Pods, connect, parse
from farandole.protocol.messages import Job
from farandole.protocol.settings import PoolTerms
from tests.support.kubernetes import IMAGE, NAMESPACE, ROLE, TOKEN, Cluster, kubernetes, until

GIVEN = {"namespace": NAMESPACE, "image": IMAGE}
LOOPBACK, OTHERS = "127.0.0.1", "0.0.0.0"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with kubernetes(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Without pods and images: no pod comes to run."""
    shared.images.clear()
    shared.requests.clear()
    yield shared
    for name in shared.secrets():
        shared.delete(name, "secrets")
    for name in shared.pods():
        shared.delete(name)
    until(lambda: not shared.pods(), "the end of all pods")
    shared.quota = None


def context(run: str = "mine", secret: str = "", port: int = 1) -> PoolContext:
    ticket = Ticket(address=f"http://127.0.0.1:{port}", secret=secret or new_secret(), run=run)
    return PoolContext(name="pods", run=run, ticket=ticket, job=Job(script="train.py"), logs=Path())


def engine(its: PoolContext | None = None, **options: str) -> Pods:
    terms = parse({**GIVEN, **options}, "")
    return Pods(connect(terms), terms, its or context())


def play(scenario: Callable[[Pods], Coroutine[None, None, None]], its: PoolContext | None = None) -> None:
    async def perform() -> None:
        pods = engine(its)
        await pods.list()
        try:
            await scenario(pods)
        finally:
            await pods.close()

    asyncio.run(perform())


async def units(pods: Pods) -> dict[str, ListedUnit]:
    return {unit.name: unit for unit in await pods.list()}


def test_a_name_that_is_submitted_twice_is_one_pod(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        first = await pods.submit("a-1", ())
        assert await pods.submit("a-1", ()) == first
        assert list(cluster.pods()) == [first]
        assert set(await units(pods)) == {"a-1"}

    play(scenario)


def test_pods_of_other_runs_are_neither_listed_nor_touched(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        other = engine()
        await other.list()
        cluster.create("somebody-s", "true")
        await pods.submit("a-1", ())
        await other.submit("a-1", ())
        assert len(cluster.pods()) == 3
        assert set(await units(pods)) == {"a-1"}
        await other.close()
        assert len(cluster.secrets()) == 1
        assert set(await units(pods)) == {"a-1"}
        until(lambda: len(cluster.pods()) == 2, "the other run's pods go with its Secret")

    play(scenario)


def test_an_image_that_can_t_be_pulled_is_why_a_pod_is_pending(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        await pods.submit("a-1", ())
        until(lambda: cluster.pods()[next(iter(cluster.pods()))]["status"].get("containerStatuses"), "the kubelet")
        [unit] = (await units(pods)).values()
        assert unit.state == PENDING
        assert unit.reason.startswith("ImagePullBackOff: ")
        assert IMAGE in unit.reason
        assert unit.reason.endswith(IMAGE_REMEDY)

    play(scenario)


@pytest.mark.parametrize(
    ("status", "done", "doubt"),
    [
        (500, True, True),
        (503, False, True),
        (0, False, True),
        (0, True, True),
        (409, False, False),
        (410, False, False),
    ],
)
def test_a_submission_that_fails_is_in_doubt_if_it_may_take_effect(
    cluster: Cluster, status: int, done: bool, doubt: bool
) -> None:
    async def scenario(pods: Pods) -> None:
        cluster.fail(status, "POST", "pods", done=done)
        with pytest.raises(EngineError) as raised:
            await pods.submit("a-1", ())
        assert raised.value.doubt == doubt
        assert "\n" not in str(raised.value)
        assert set(await units(pods)) == ({"a-1"} if done else set())

    play(scenario)


@pytest.mark.parametrize(
    ("method", "kind"), [("GET", "pods"), ("POST", "pods"), ("POST", "secrets"), ("DELETE", "pods")]
)
def test_a_server_that_asks_for_time_gets_it(cluster: Cluster, method: str, kind: str) -> None:
    async def scenario(pods: Pods) -> None:
        cluster.fail(429, method, kind, times=2, after_s=0.01)
        id = await pods.submit("a-1", ())
        assert set(await units(pods)) == {"a-1"}
        await pods.cancel([id])
        assert cluster.pods() == {} or cluster.phase(id) == "Terminating"

    play(scenario)


def test_a_server_that_asks_for_too_much_time_or_names_none_has_refused(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        for after_s in (None, 3600.0):
            cluster.fail(429, "POST", "pods", after_s=after_s)
            with pytest.raises(EngineError, match="429") as raised:
                await pods.submit("a-1", ())
            assert not raised.value.doubt
        assert cluster.pods() == {}

    play(scenario)


@pytest.mark.parametrize("status", [0, 401, 410, 429, 500])
def test_a_list_that_fails_is_an_error_and_the_next_one_is_whole(cluster: Cluster, status: int) -> None:
    async def scenario(pods: Pods) -> None:
        await pods.submit("a-1", ())
        cluster.fail(status, "GET", "pods")
        with pytest.raises(EngineError):
            await pods.list()
        assert set(await units(pods)) == {"a-1"}

    play(scenario)


def test_a_server_that_is_away_is_an_error_in_doubt(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        cluster.go_away()
        try:
            for call in (pods.list(), pods.submit("a-1", ()), pods.cancel(["a"])):
                with pytest.raises(EngineError) as raised:
                    await call
                assert raised.value.doubt
        finally:
            cluster.come_back()
        assert await pods.list() == []

    play(scenario)


def test_a_server_that_does_not_answer_in_time_is_an_error_in_doubt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(pods: Pods) -> None:
        cluster.fail(-1, "POST", "pods", done=True)
        in_doubt: list[bool] = []
        while not cluster.pods():  # the server may be so late that it does not read a request
            monkeypatch.setattr("farandole.pool.kubernetes.REQUEST_S", 0.1)
            try:
                await pods.submit("a-1", ())
            except EngineError as error:
                in_doubt.append(error.doubt)
        monkeypatch.undo()
        assert in_doubt
        assert all(in_doubt)
        assert set(await units(pods)) == {"a-1"}

    play(scenario)


def test_a_quota_is_a_refusal(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        cluster.quota = 1
        await pods.submit("a-1", ())
        with pytest.raises(EngineError, match="quota") as raised:
            await pods.submit("a-2", ())
        assert not raised.value.doubt

    play(scenario)


def test_cancelling_goes_on_after_an_error_and_pods_that_are_gone_are_none(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        ids = [await pods.submit(f"a-{n}", ()) for n in range(3)]
        cluster.fail(500, "DELETE", "pods")
        with pytest.raises(EngineError):
            await pods.cancel(["nobody", *ids])
        until(lambda: not cluster.pods(), "the end of all pods")
        await pods.cancel(ids)

    play(scenario)


def test_an_earlier_process_s_ticket_is_replaced_and_its_pods_are_found(cluster: Cluster) -> None:
    secret = new_secret()

    async def scenario(pods: Pods) -> None:
        id = await pods.submit("a-1", ())
        later = context(secret=secret, port=2)
        assert set(await units(engine(later))) == {"a-1"}
        [stored] = cluster.secrets().values()
        ticket = msgspec.json.decode(base64.b64decode(stored["data"]["ticket"]), type=Ticket)
        assert ticket == later.ticket
        assert cluster.pods()[id]["metadata"]["ownerReferences"][0]["uid"] == stored["metadata"]["uid"]

    play(scenario, context(secret=secret))


def test_a_secret_that_somebody_has_deleted_is_written_again(cluster: Cluster) -> None:
    async def scenario(pods: Pods) -> None:
        await pods.submit("a-1", ())
        [name] = cluster.secrets()
        cluster.delete(name, "secrets")
        until(lambda: not cluster.pods(), "its pods go with it")
        id = await pods.submit("a-2", ())
        [stored] = cluster.secrets().values()
        assert cluster.pods()[id]["metadata"]["ownerReferences"][0]["uid"] == stored["metadata"]["uid"]

    play(scenario)


def test_the_role_has_the_verbs_that_are_used_and_no_others(cluster: Cluster) -> None:
    """The server refuses all others, reads of a Secret and watches included."""
    terms = PoolTerms(name="kubernetes", kind="kubernetes", options=GIVEN)
    KubernetesKind().check(terms, LOOPBACK, lambda _: None, priced=False)
    [role] = [each for each in yaml.safe_load_all(ROLE.read_text()) if each["kind"] == "Role"]
    allowed = {(verb, kind) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    assert {(verb, kind) for verb, kind, _ in cluster.requests} == allowed
    assert cluster.pods() == cluster.secrets() == {}, "a check changes nothing"


# --- what can't be had ------------------------------------------------------------------------------------------------


def check(options: dict[str, str], listen: str = LOOPBACK, *, priced: bool = False) -> list[str]:
    shown: list[str] = []
    terms = PoolTerms(name="kubernetes", kind="kubernetes", options={**GIVEN, **options})
    KubernetesKind().check(terms, listen, shown.append, priced=priced)
    return shown


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"namespace": "mi"}, 'namespaces "mi"'),
        ({"namespace": "Not A Name"}, "Not A Name"),
        ({"context": "nowhere"}, "nowhere"),
        ({"context": "powerless"}, "role.yaml"),
        ({"priority": "royal"}, "royal"),
        ({"service_account": "nobody"}, "nobody"),
        ({"memory": "lots"}, "lots"),
        ({"node_selector": "a=b=c d"}, "a"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_what_can_t_be_had_is_one_line_before_anything_is_made(options: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(options)
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "--pool kubernetes" in str(raised.value)


@pytest.mark.parametrize(("method", "kind"), [("GET", "pods"), ("DELETE", "pods"), ("PUT", "secrets")])
def test_each_right_that_is_missing_is_found_at_the_start(cluster: Cluster, method: str, kind: str) -> None:
    cluster.fail(403, method, kind)
    with pytest.raises(UsageError, match="403"):
        check({})


def test_a_price_is_not_known(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="--max-cost"):
        check({}, priced=True)
    assert cluster.requests == []


def test_a_quota_that_is_used_up_is_a_note(cluster: Cluster) -> None:
    cluster.quota = 0
    assert any("quota" in line for line in check({}, OTHERS))


def test_pods_elsewhere_can_t_reach_a_run_that_listens_at_loopback(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check({}, OTHERS) == []
    assert len(check({}, LOOPBACK)) == 1, "a note: the API server is on this machine too"
    monkeypatch.setattr("farandole.coordinator.listener.is_loopback", lambda host: host == LOOPBACK and not cluster)
    assert check({}, LOOPBACK) == []


@pytest.mark.parametrize("content", ["", "a: b: c", "apiVersion: v1\nkind: Config\n", None])
def test_a_kubeconfig_that_is_none_is_an_error(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "config").write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UsageError, match="KUBECONFIG") as raised:
        check({})
    assert "\n" not in str(raised.value)


def test_in_a_pod_without_a_kubeconfig_the_service_account_s_server_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("content")
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert connect(parse(GIVEN, "")).address == "https://[fd00::1]:443"
    with pytest.raises(EngineError, match="KUBECONFIG"):
        connect(parse({**GIVEN, "context": "elsewhere"}, ""))


def test_credentials_that_are_not_accepted_are_an_error(cluster: Cluster) -> None:
    cluster.write_kubeconfig("expired")
    try:
        with pytest.raises(UsageError, match="401"):
            check({})
    finally:
        cluster.write_kubeconfig(TOKEN)


def test_without_the_client_the_error_names_the_extra() -> None:
    """In a process of its own, in which the package is not to be found."""
    program = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'kubernetes' else find(name, *rest)\n"
        "from farandole.pool.spec import kind_of\n"
        "from farandole.protocol.settings import PoolTerms\n"
        "terms = PoolTerms(name='kubernetes', kind='kubernetes', options={'namespace': 'a', 'image': 'b'})\n"
        "try: kind_of('kubernetes').check(terms, '127.0.0.1', print, priced=False)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("UsageError")
    assert "[kubernetes]" in done.stdout


def test_farandole_and_the_module_of_the_pool_do_not_import_the_client() -> None:
    program = (
        "import farandole, farandole.pool.kubernetes, sys; print('kubernetes' in sys.modules, 'yaml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
