"""What Ray lists and says, and what it means: pure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.pool.cluster import GONE, PENDING, RUNNING, EngineError
from farandole.pool.ray import DRAIN_S, RayKind, death_reason, lacking, listed, parse, result, with_remedy
from farandole.protocol.settings import PoolTerms

NODE = "0ab8f86d99bed70c2928d65a4273d284518f28706b1bc355595bc36c"


def row(state: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": "a-1", "id": "4fe1", "state": state, "node": NODE, "address": "10.0.0.1", "death": "",
        "preempted": False, "drained_by": None, "served": True,
    }  # fmt: skip
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("state", "expected"),
    [("DEPENDENCIES_UNREADY", PENDING), ("PENDING_CREATION", PENDING), ("ALIVE", RUNNING), ("DEAD", GONE)],
)
def test_the_state_of_an_actor(state: str, expected: str) -> None:
    unit = listed(row(state), 0.0)
    assert (unit.name, unit.id, unit.state, unit.notice_s) == ("a-1", "4fe1", expected, math.inf)
    assert "10.0.0.1" in unit.node
    assert listed(row(state, node="", address=""), 0.0).node == ""


def test_a_drain_has_a_deadline_or_none_and_is_no_matter_of_actors_that_have_no_process() -> None:
    assert listed(row("ALIVE", drained_by=70_000), 30.0).notice_s == 40.0
    assert listed(row("ALIVE", drained_by=20_000), 30.0).notice_s == 0.0, "it is over"
    assert listed(row("ALIVE", drained_by=0), 30.0).notice_s == DRAIN_S
    assert listed(row("PENDING_CREATION", drained_by=70_000), 30.0).notice_s == math.inf


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker exits unexpectedly. Worker exits with an exit code 2: no coordinator at 10.0.0.9:7000.\n trace",
            "exit code 2: no coordinator at 10.0.0.9:7000. trace",
        ),
        ("The actor died because its node has died. Node Id: 0ab8\n\tthe node was\tterminated",
         "The actor died because its node has died. Node Id: 0ab8 the node was terminated"),
    ],
)  # fmt: skip
def test_why_an_actor_has_died_is_one_line_in_ray_s_words(message: str, words: str) -> None:
    assert death_reason(message, preempted=False) == words
    preempted = death_reason(message, preempted=True)
    assert words in preempted
    assert preempted != words


def test_a_death_without_a_message_has_a_reason() -> None:
    assert death_reason("", preempted=False)
    assert listed(row("DEAD", death="it is a Monday"), 0.0).reason == "it is a Monday"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Could not find any running Ray instance. Please specify the one to connect to", "address="),
        ("Failed to connect to GCS at address 10.0.0.1:6379: Connection refused", "ray status"),
        ("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\nThis process on node was", "version"),
    ],
)
def test_an_error_is_one_line_in_ray_s_words_with_the_remedy(text: str, words: str) -> None:
    line = with_remedy(text)
    said, _, remedy = line.partition("; ")
    assert "\n" not in line
    assert said in " ".join(text.split())
    assert words in remedy
    assert with_remedy("it is\na Monday") == "it is a Monday"


def test_an_answer_is_a_result_or_an_error_and_without_the_head_a_call_is_in_doubt() -> None:
    assert result(b'{"result": ["a"]}') == ["a"]
    for text, doubt in (("Failed to connect to GCS at address a: b", True), ("bad label", False)):
        with pytest.raises(EngineError) as caught:
            result(b'{"error": "%s"}' % text.encode())
        assert caught.value.doubt == doubt


def test_the_resources_of_an_actor_and_the_nodes_that_it_avoids() -> None:
    plain = parse({}, "--pool ray")
    assert (plain.address, plain.slots, plain.python) == ("auto", 1, "")
    assert plain.demand(2) == {"CPU": 2}
    terms = parse({"num_gpus": "4", "resources": "tpu:2+rack:0.5", "label": "ray.io/market-type:spot"}, "--pool ray")
    assert terms.slots == 4
    assert terms.demand(2) == {"CPU": 8, "GPU": 4, "tpu": 2.0, "rack": 0.5}
    options = terms.actor_options(2, [NODE])
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (8, 4, {"tpu": 2.0, "rack": 0.5})
    assert options["label_selector"] == {"ray.io/market-type": "spot", "ray.io/node-id": f"!in({NODE})"}
    assert parse({"num_gpus": "4", "slots": "2", "num_cpus": "3"}, "--pool ray").demand(1) == {"CPU": 3, "GPU": 4}


def test_an_actor_lacks_room_if_no_node_has_all_that_it_needs() -> None:
    demand = {"CPU": 2.0, "GPU": 1.0}
    assert lacking(demand, {}, [{"CPU": 2.0, "GPU": 1.0}]) == ""
    assert "kind=fast" in lacking(demand, {"kind": "fast"}, [{"CPU": 2.0, "GPU": 1.0}])
    for nodes in ([], [{"CPU": 8.0}, {"CPU": 1.0, "GPU": 8.0}]):
        reason = lacking(demand, {}, nodes)
        assert "2 CPU" in reason
        assert "1 GPU" in reason


@pytest.mark.parametrize(
    "options",
    [
        {"num_cpus": "0"}, {"num_gpus": "many"}, {"slots": "-1"}, {"resources": "tpu"}, {"resources": "tpu:none"},
        {"resources": "tpu:nan"}, {"resources": "GPU:1"}, {"label": "spot"}, {"address": "ray://host:10001"},
    ],
)  # fmt: skip
def test_an_option_that_is_wrong_is_an_error_that_names_it(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        parse(options, "--pool ray")


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"\[ray\]"):
        RayKind().check(PoolTerms(name="ray", kind="ray"), "127.0.0.1:0", print, priced=False)
