"""`farandole ticket`: the verbs with a live coordinator; an external worker joins by a ticket and is put out again."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from farandole.cli.commands import app
from farandole.cli.options import seconds
from farandole.control.api import Api
from farandole.control.run_folder import RECORD, TICKET, TICKETS
from farandole.control.security import read_tickets
from farandole.control.ticket import load
from farandole.coordinator.process import CoordinatorRecord
from farandole.errors import UsageError
from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.stage import Stage, play

JOB = Path(__file__).parents[1] / "jobs" / "small.py"


def test_the_verbs(tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.ticket.save(scene.folder / TICKET)
        record = CoordinatorRecord(pid=1, address=scene.ticket.address)
        (scene.folder / RECORD).write_bytes(msgspec.json.encode(record))
        await asyncio.to_thread(verbs, scene.folder)
        await scene.until(lambda: scene.events("ticket revoked"))
        assert [event["ticket"] for event in scene.events("ticket issued")] == ["bob", "ticket-1"]

    play(tmp_path, scenario)


def verbs(folder: Path) -> None:
    def say(*words: str) -> tuple[str, str]:
        done = CliRunner().invoke(app, ["ticket", *words, "--run", str(folder)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    def refused(*words: str) -> str:
        with pytest.raises(UsageError) as raised:
            say(*words)
        return str(raised.value)

    out = folder / "bob.ticket"
    printed, told = say("new", "--name", "bob", "--expires", "12h", "--out", str(out))
    assert printed == ""
    assert re.search(r"\bbob\b.*\b20\d\d-", told)
    assert out.stat().st_mode & 0o777 == 0o600
    bob, owner = load(str(out)), load(str(folder / TICKET))
    assert bob == msgspec.structs.replace(owner, secret=bob.secret)
    assert bob.secret != owner.secret
    assert Api(bob).status().run == "r"
    assert 12 * 3600 - 60 < read_tickets(folder / TICKETS)[0].expires - time.time() <= 12 * 3600

    printed, _ = say("new")
    other = msgspec.json.decode(printed, type=type(bob))
    Api(other).alive()
    assert (folder / TICKETS).stat().st_mode & 0o777 == 0o600
    listed, _ = say("list")
    assert [line.split("  ")[0] for line in listed.splitlines()] == ["bob", "ticket-1"]
    assert [bool(re.search(r"\b20\d\d-", line)) for line in listed.splitlines()] == [True, False]
    assert not any(secret in listed + told for secret in (bob.secret, other.secret, owner.secret))

    assert "--name bob" in refused("new", "--name", "bob")
    assert re.search(r"--name \.\./bob\b.*\b64\b", refused("new", "--name", "../bob"))
    assert re.search(r"--expires soon\b.*\b30m\b.*\b12h\b.*\b7d\b", refused("new", "--expires", "soon"))
    assert re.search(r"revoke eve\b.*\bbob, ticket-1", refused("revoke", "eve"))
    assert str(folder / "nowhere" / "t") in refused("new", "--out", str(folder / "nowhere" / "t"))
    assert len(read_tickets(folder / TICKETS)) == 2, "what was refused has left nothing"

    assert re.search(r"\bbob\b", say("revoke", "bob")[0])
    assert "bob  revoked" in say("list")[0]
    with pytest.raises(UsageError, match=r"\bbob\b"):
        Api(bob).status()
    Api(other).status()


@pytest.mark.parametrize(("text", "expected"), [("30m", 1800), ("12h", 43200), ("7d", 604800)])
def test_times(text: str, expected: float) -> None:
    assert seconds("--expires", text) == expected


@pytest.mark.parametrize("text", ["", "12", "h", "0h", "-1h", "1.5h", "12 h", "1w", "9" * 20 + "d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=rf"--expires {re.escape(text)}.*\b30m\b.*\b12h\b.*\b7d\b"):
        seconds("--expires", text)


@pytest.mark.failure(
    "External workers, pools and machines",
    "an unauthorized person has a ticket",
    seen="`farandole ticket revoke NAME`, for a ticket that was issued",
    outcome=(
        "all workers with that ticket end with exit code 5 and can't join again; the owner's ticket ends with the run"
    ),
)
@pytest.mark.processes
def test_an_external_worker_joins_by_one_and_goes_when_it_is_revoked(tmp_path: Path) -> None:
    """Also by a coordinator that has come back since; and the run goes on."""
    pace, ticket = tmp_path / "pace", tmp_path / "ticket"
    pace.write_text("0.5")
    arguments = [str(tmp_path / "out"), "--pace", str(pace), "--epochs", "60"]  # it lasts until both have come
    with Elastic(tmp_path / "run", JOB, *arguments, workers=1, options=["--max", "2"]) as run:
        run.until_step(1)
        run.command("ticket", "new", "--name", "bob", "--out", str(ticket))
        pid = json.loads((run.folder / RECORD).read_text())["pid"]
        subprocess.run(["kill", "-9", str(pid)], check=True)
        command = [*FARANDOLE, "join", str(ticket), str(JOB), *arguments]
        environ = {**ENVIRON, "FARANDOLE_WORKER": "bobs"}
        external_worker = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        run.until(lambda: set(run.members) == {"w1", "bobs"} or external_worker.poll() is not None, "the guest")
        run.command("ticket", "revoke", "bob")
        _, said = external_worker.communicate(timeout=200)
        assert external_worker.returncode == 5, said
        assert re.search(r"\bbob\b", said)
        run.until(lambda: run.members == ("w1",), "w1 alone")
        again = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
        assert again.returncode == 1
        assert re.search(r"\bbob\b", again.stderr)
        pace.unlink()
        run.finish()
        assert len(run.events("ticket issued")) == len(run.events("ticket revoked")) == 1
