"""Hosts of a hosts file, over real SSH: they come and go with their lines, and what is wrong with one is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import sshd
from tests.support.harness import Elastic, alone
from tests.support.rack import Rack
from tests.support.sshd import Sshd

pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.skipif(not sshd.AVAILABLE, reason=sshd.WHY_NOT),
]
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"


def seen(run: Elastic, host: str, state: str) -> str:
    """Why, once that was told of the host."""
    told = lambda: [e for e in run.events("host") if e["host"] == host and e["state"] == state]  # noqa: E731
    run.until(lambda: bool(told()), f"{host} to be {state}")
    return told()[-1].get("reason", "")


def test_hosts_come_and_go_with_their_lines_to_the_same_bits(tmp_path: Path) -> None:
    """Also the first; more slots, and fewer. One host has a zone."""
    with Sshd(tmp_path, 2) as hosts:
        rack = Rack(hosts, tmp_path)
        first = f"{rack.line(0)} zone=east"
        rack.write(first)
        with rack.run(JOB) as run:
            run.until_members(1)
            rack.write(first, rack.line(1, slots=2))
            run.until_members(3)
            assert run.zones() == {rack.name(0): "east", rack.name(1): ""}
            rack.write(rack.line(1, slots=2))
            seen(run, rack.name(0), "gone")
            run.until_members(2, without=("w1",))
            rack.write(rack.line(1, slots=1))
            run.until_members(1)
            rack.write(rack.line(1, slots=2))
            run.until_members(2)
            assert not run.events("lost"), run.report()
            rack.pace.unlink()
            run.finish()
    alone(tmp_path / "alone", JOB, str(tmp_path / "alone.out"))
    assert rack.out.read_text() == (tmp_path / "alone.out").read_text()


def test_what_is_wrong_with_a_host_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    with Sshd(tmp_path, 4) as hosts:
        rack = Rack(hosts, tmp_path)
        rack.write(rack.line(0))
        with rack.run(JOB) as run:
            run.until_members(1)
            hosts.end(hosts.addresses[1])
            rack.write(rack.line(0), rack.line(1), f"{rack.name(2)} python=/no/python", f"{rack.name(3)} python=sh")
            assert "Connection refused" in seen(run, rack.name(1), "idle")
            assert "python=PATH" in seen(run, rack.name(2), "idle")
            assert seen(run, rack.name(3), "idle")
            rack.file.write_text("")
            assert str(rack.file) in seen(run, "", "hosts file")
            hosts.begin(hosts.addresses[1])
            rack.write(rack.line(0), rack.line(1), f"nobody@nowhere.invalid python={sys.executable}")
            run.until_members(2)
            assert seen(run, "nobody@nowhere.invalid", "idle")
            assert not run.events("lost"), run.report()
            rack.pace.unlink()
            run.finish()


def test_another_host_key_and_a_key_that_is_not_taken(tmp_path: Path) -> None:
    with Sshd(tmp_path, 3) as hosts:
        rack = Rack(hosts, tmp_path)
        rack.write(rack.line(0))
        with rack.run(JOB) as run:
            run.until_members(1)
            rack.write(rack.line(0), rack.line(1))
            run.until_members(2)
            rack.write(rack.line(0))
            seen(run, rack.name(1), "gone")
            hosts.other_key(hosts.addresses[1])
            rack.write(rack.line(0), rack.line(1))
            assert "ssh-keygen -R" in seen(run, rack.name(1), "idle")
            hosts.forbid()
            rack.write(rack.line(0), rack.line(2))
            assert "ssh-copy-id" in seen(run, rack.name(2), "idle")
            assert run.members == ("w1",)
            rack.pace.unlink()
            run.finish()
