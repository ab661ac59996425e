"""An instance on its own: what it does where there is no run for it, or none that it can reach."""

from __future__ import annotations

import time

import pytest

from farandole.control.ticket import new_secret
from farandole.pool.ec2 import Aws, secret_name
from tests.support.aws import TEMPLATE, Machines, Moto, until

pytestmark = [pytest.mark.processes, pytest.mark.world]


def launch(moto: Moto, **labels: str) -> str:
    """As a person at the console."""
    named = [{"Key": f"farandole:{key}", "Value": value} for key, value in labels.items()]
    answer = moto.client().run_instances(
        MinCount=1, MaxCount=1, LaunchTemplate={"LaunchTemplateName": TEMPLATE},
        TagSpecifications=[{"ResourceType": "instance", "Tags": named}],
    )  # fmt: skip
    return answer["Instances"][0]["InstanceId"]


def living(moto: Moto) -> set[str]:
    return {instance["InstanceId"] for instance in moto.living()}


def test_what_keeps_it_from_a_run_is_in_its_log_and_it_ends_when_its_time_is_over(
    moto: Moto, machines: Machines
) -> None:
    later, secret = f"{time.time() + 3600:.0f}", new_secret()
    dead = f'{{"address":"http://127.0.0.1:9","secret":"{secret}","run":"r"}}'
    Aws().put_secret(secret_name("dead", "ec2"), dead)
    expected = {
        launch(moto, until=later): "belongs to no run",
        launch(moto, until=later, run="over"): "ParameterNotFound",
        launch(moto, until=later, run="dead"): "no answer at http://127.0.0.1:9",
    }
    brief = launch(moto, until=f"{time.time() + 20:.0f}", run="over")
    for me, said in expected.items():
        until(lambda me=me, said=said: said in machines.log(me), f"{said}: {machines.log(me)}", 250)
    until(lambda: brief not in living(moto), "it ends itself", 250)
    assert set(expected) == living(moto)
    assert secret not in "".join(map(machines.log, (*expected, brief)))
