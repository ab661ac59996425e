"""A run whose hosts are instances: AWS is a real server process, and each instance a process that runs the launch
template's user data (`tests/support/aws.py`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farandole.protocol.coordinator.account import account
from tests.support.aws import ENVIRON, TEMPLATE, Machines, Moto, tags, until
from tests.support.harness import FARANDOLE, Elastic, alone

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.timeout(280)]

JOB = Path(__file__).parents[2] / "jobs" / "small.py"


def states(moto: Moto) -> list[str]:
    return [each["State"]["Name"] for each in moto.instances()]


@pytest.mark.usefixtures("machines")
def test_instances_join_train_the_same_bits_and_are_ended(moto: Moto, tmp_path: Path) -> None:
    out, expected, pace = tmp_path / "out", tmp_path / "expected", tmp_path / "pace"
    pace.write_text("0.2")
    alone(tmp_path / "one", JOB, str(expected), "--epochs", "60")
    pool = f"ec2,template={TEMPLATE},size=2"
    job = (str(out), "--pace", str(pace), "--epochs", "60")
    with Elastic(tmp_path / "run", JOB, *job, workers=2, deadline_s=200, options=["--pool", pool]) as run:
        run.until_members(2)
        living = moto.living()
        assert len(living) == 2
        assert run.zones() == {each["InstanceId"]: each["Placement"]["AvailabilityZone"] for each in living}
        run.until(lambda: {tags(each)["farandole:state"] for each in moto.living()} == {"joined"}, "tags that say so")
        moto.client().terminate_instances(InstanceIds=[living[0]["InstanceId"]])  # it is taken back
        run.until(lambda: len({each["InstanceId"] for each in moto.instances()}) >= 3, "another instance")
        run.until_members(2)
        pace.unlink()
        run.finish()
    assert out.read_bytes() == expected.read_bytes()
    assert set(states(moto)) == {"terminated"}
    assert moto.client("ssm").describe_parameters()["Parameters"] == [], "the ticket is gone with the run"


def test_who_is_interrupted_leaves_in_time_and_is_replaced_and_advice_brings_another(
    moto: Moto, machines: Machines, tmp_path: Path
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.2")
    pool = f"ec2,template={TEMPLATE}"
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "4000")
    with Elastic(tmp_path / "run", JOB, *job, workers=2, deadline_s=200, options=["--pool", pool]) as run:
        run.until_members(2)
        first, second = joined(run)
        machines.interrupt(first, 120.0)
        run.until(lambda: bool(run.events("notice")), "the notice")
        [notice] = run.events("notice")
        assert "EC2" in notice["reason"]
        assert "terminate" in notice["reason"]
        run.until(lambda: notice["worker"] not in run.members, "the leave")
        run.until(lambda: len(joined(run)) == 3, "another instance")
        run.until_members(2)
        run.until(lambda: first not in [each["InstanceId"] for each in moto.living()], "it ends itself")

        machines.recommend(second)
        run.until_members(3)
        assert second in [each["InstanceId"] for each in moto.living()], "it trains on"
        run.command("stop")
        run.finish()
        assert not run.events("lost"), run.report()


def test_an_instance_that_is_stopped_and_started_again_comes_back(
    moto: Moto, machines: Machines, tmp_path: Path
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.2")
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "4000")
    options = ["--pool", f"ec2,template={TEMPLATE},market=on-demand"]
    with Elastic(tmp_path / "run", JOB, *job, workers=1, deadline_s=200, options=options) as run:
        run.until_members(1)
        [own] = joined(run)
        moto.client().stop_instances(InstanceIds=[own])
        run.until(lambda: own not in machines.processes, "it stops")
        run.until(lambda: len(set(joined(run))) == 2, "another instance meanwhile")
        moto.client().start_instances(InstanceIds=[own])
        run.until(lambda: joined(run).count(own) == 2, "it comes back")
        run.command("stop")
        run.finish()
    assert moto.living() == []


@pytest.mark.usefixtures("machines")
def test_a_group_joins_by_itself_and_who_loses_the_tag_is_released(moto: Moto, tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.2")
    pool = f"ec2,template={TEMPLATE},size=1"
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "400")
    with Elastic(tmp_path / "run", JOB, *job, workers=1, deadline_s=200, options=["--pool", pool]) as run:
        run.until_members(1)
        [own] = moto.living()
        names = {name: tags(own)[name] for name in ("farandole:run", "farandole:pool")}
        moto.client("autoscaling").create_auto_scaling_group(
            AutoScalingGroupName="g", MinSize=1, MaxSize=1, AvailabilityZones=["us-east-1a"],
            LaunchTemplate={"LaunchTemplateName": TEMPLATE},
            Tags=[{"Key": key, "Value": names[key], "PropagateAtLaunch": True} for key in names],
        )  # fmt: skip
        run.until(lambda: len(joined(run)) == 2, "the group's instance")
        group = next(host for host in joined(run) if host != own["InstanceId"])
        moto.client().delete_tags(Resources=[own["InstanceId"]], Tags=[{"Key": "farandole:run"}])
        run.until(lambda: [event["host"] for event in run.events("ready")][-1:] == [group], "a worker there instead")
        run.until_members(1, without=("w1",))
        run.until(lambda: own["InstanceId"] not in [each["InstanceId"] for each in moto.living()], "it ends itself")
        run.command("stop")
        run.finish()
        assert not [line for line in run.lines() if line.get("event") == "lost"], "it left gracefully"
    assert moto.living() == []
    [found] = moto.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert found["DesiredCapacity"] == 0


def joined(run: Elastic) -> list[str]:
    return [event["host"] for event in run.events("host") if event["state"] == "joined"]


@pytest.mark.usefixtures("machines")
def test_a_run_that_was_killed_is_taken_over_with_its_instances(moto: Moto, tmp_path: Path) -> None:
    out, expected, pace = tmp_path / "out", tmp_path / "expected", tmp_path / "pace"
    pace.write_text("0.2")
    alone(tmp_path / "one", JOB, str(expected), "--epochs", "60")
    options = ["--pool", f"ec2,template={TEMPLATE}"]
    command = (tmp_path / "run", JOB, str(out), "--pace", str(pace), "--epochs", "60")
    with Elastic(*command, workers=2, deadline_s=200, options=options) as first:
        first.until_members(2)
        first.process.kill()
        first.process.wait()
        with Elastic(*command, workers=2, deadline_s=200, options=options) as second:
            second.until(lambda: bool(second.events("view")), "all to be back")
            pace.unlink()
            second.finish()
            assert not second.events("lost") + second.events("resumed"), second.report()
    assert out.read_bytes() == expected.read_bytes()
    assert states(moto) == ["terminated"] * 2, "and no other was asked for"


@pytest.mark.usefixtures("machines")
def test_an_instance_that_has_failed_is_kept_for_a_look_and_then_ends(moto: Moto, tmp_path: Path) -> None:
    options = ["--pool", f"ec2,template={TEMPLATE},size=1", "--prepare", "exit 3", "--keep-failed", "1"]
    job = (str(tmp_path / "out"),)
    with Elastic(tmp_path / "run", JOB, *job, workers=1, deadline_s=200, options=options) as run:
        failed = lambda: [event for event in run.events("host") if event["state"] == "failed"]  # noqa: E731
        run.until(lambda: bool(failed()), "it fails")
        assert "exit code 3" in failed()[0]["reason"]
        kept = failed()[0]["host"]
        run.command("stop")
        run.process.wait(200)
        assert kept in [each["InstanceId"] for each in moto.living()], "for a look, also when the run is over"
    until(lambda: moto.living() == [], "it ends itself then", 120)


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("limit", ["--max-hours", "--max-cost"])
def test_what_a_run_may_last_or_cost_ends_it_with_a_checkpoint(moto: Moto, tmp_path: Path, limit: str) -> None:
    pace, prices = tmp_path / "pace", tmp_path / "prices.csv"
    pace.write_text("0.2")
    prices.write_text("# 2026-11-01\ntype,zone,market,dollars\nc5.large,,spot,3600\n")
    options = [
        "--pool",
        f"ec2,template={TEMPLATE},prices={prices}",
        limit,
        str(60 / 3600 if limit == "--max-hours" else 40),
    ]
    job = (str(tmp_path / "out"), "--pace", str(pace), "--epochs", "4000")
    with Elastic(tmp_path / "run", JOB, *job, workers=1, options=options) as run:
        run.until_step(1)
        assert limit == "--max-cost" or "farandole:until" in tags(moto.living()[0]), "whoever has died by then"
        run.finish()
        assert limit in run.output.read_text()
        assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))
        [priced] = run.events("priced")
        assert (priced["dollars"], priced["day"]) == (3600.0, "2026-11-01")
        with (run.folder / "metrics.jsonl").open("rb") as file:
            found = account("run", file)
        assert found.dollars is not None
        assert found.dollars > 30, "of the instance, in seconds"
    assert moto.living() == []


def crashed(place: Path, *options: str) -> None:
    """A run with one instance, whose processes on this machine are killed."""
    place.mkdir()
    pace = place / "pace"
    pace.write_text("0.2")
    job = (str(place / "out"), "--pace", str(pace), "--epochs", "4000")
    pool = ("--pool", f"ec2,template={TEMPLATE}")
    with Elastic(place / "run", JOB, *job, workers=1, options=[*pool, *options]) as run:
        run.until_step(1)
        run.process.kill()
        run.process.wait()


@pytest.mark.usefixtures("machines")
def test_after_a_crash_of_everything_tags_show_what_is_paid_for_and_instances_end_themselves(
    moto: Moto, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("# 2026-11-01\ntype,zone,market,dollars\nc5.large,,spot,0.034\n")
    crashed(tmp_path / "first", "--orphan-limit", "3600")
    [living] = moto.living()
    for priced, known in ((["--prices", str(prices)], True), ([], False)):
        shown = subprocess.run(
            [*FARANDOLE, "pool", "list", *priced], env=ENVIRON, capture_output=True, text=True, check=True
        ).stdout
        assert living["InstanceId"] in shown
        assert ("0.034 dollars an hour" in shown, "2026-11-01" in shown) == (known, known)
    crashed(tmp_path / "second", "--orphan-limit", "10")
    until(
        lambda: [each["InstanceId"] for each in moto.living()] == [living["InstanceId"]],
        "it is without its run for longer than the orphan limit",
        250,
    )
