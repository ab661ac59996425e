"""The machine of `farandole run` and the coordinator is lost; another one goes on with the hosts, to the same bits."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from farandole.control.run_folder import PACK
from tests.support import network
from tests.support.fake_worker import until
from tests.support.harness import Elastic, alone
from tests.support.network import Switched

pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.skipif(not network.AVAILABLE, reason=network.WHY_NOT),
]
JOB = Path(__file__).parents[1] / "jobs" / "digits.py"
TIMES = [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 20))]


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone")
    alone(folder, JOB, str(folder / "out"))
    return (folder / "out").read_text()


@pytest.mark.parametrize("time", TIMES)
def test_it_goes_on_from_another_machine(time: int, bits: str, tmp_path: Path) -> None:
    """The old one is not dead, it is cut off: it waits for its hosts, and decides nothing without them."""
    hosts, pace, out, ticket, ssh = (tmp_path / name for name in ("hosts", "pace", "out", "ticket", "ssh"))
    pace.touch()
    with Switched(4) as machines:
        old, new, *others = range(4)
        hosts.write_text("".join(f"{machines.names[number]} slots=1\n" for number in others))
        ssh.write_text('#!/bin/sh\nhost=$1\nshift 2\nexec ip netns exec "$host" sh -c "$*"\n')  # in place of sshd
        ssh.chmod(0o755)
        options = ["--pool", f"ssh,hosts={hosts},ssh={ssh},python={sys.executable}"]
        options += ["--checkpoints", str(tmp_path / "store"), "--checkpoint-every", "never"]
        job = (JOB, str(out), "--pace", str(pace))
        here = ["--listen", machines.addresses[old]]
        with Elastic(
            tmp_path / "old", *job, workers=2, options=[*options, *here], on=machines.on(old), deadline_s=200
        ) as first:
            first.until_members(2)
            first.until_step(2 + time % 7)
            shutil.copy(first.folder / "ticket", ticket)
            until(lambda: stored(tmp_path / "store") == set(first.members))
            machines.unplug(old)
            taking = [*options, "--listen", machines.addresses[new], "--take-over", str(ticket)]
            with Elastic(tmp_path / "new", *job, workers=2, options=taking, on=machines.on(new)) as second:
                second.until(lambda: bool(second.events("view")), "all to be back")
                assert set(second.members) == set(first.members)
                packs = [run.folder / PACK for run in (first, second)]
                assert packs[1].read_bytes() == packs[0].read_bytes(), "for hosts that are yet to come"
                second.until(lambda: joined(second) == {machines.names[number] for number in others}, "their agents")
                pace.unlink()
                second.finish()
                assert not second.events("lost") + second.events("resumed"), second.report()
                assert not first.events("lost"), "nobody decides without the hosts"
            first.process.kill()
        until(lambda: not agents() & {machines.names[number] for number in others})
    assert out.read_text() == bits


def stored(store: Path) -> set[str]:
    """The members of the view in the copy of the coordinator's state, which is written to the store by a thread."""
    found = [json.loads(path.read_bytes()) for path in store.glob("run-*.json")]
    return {member for copy in found for member in (copy["books"]["view"] or {}).get("members", ())}


def joined(run: Elastic) -> set[str]:
    """Hosts whose agents have come."""
    return {event["host"] for event in run.events("host") if event["state"] == "joined"}


def agents() -> set[str]:
    """The hosts of all agents on this machine."""
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            found |= {word for word in words if "agent" in words}
    return found
