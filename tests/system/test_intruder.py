"""Promise 6 as an intruder meets it: a run of real processes, attacked in every way at once, never notices.

The run has a worker here and one that has joined by its ticket. Once on this machine, in plain text on loopback; once
over TLS between two machines, where root is to be had: then the second worker and the intruder are on the other one.
Both end with the weights of a world of one, in the view that they had before the attack; each attack has left its
events, few and counted; and the secret is in the ticket and in no other file, log, command line or environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.control.ticket import load
from farandole.coordinator.listener import CROWDED, LINES, NOT_HTTP, NOT_TLS
from tests.support.harness import ENVIRON, FARANDOLE, Elastic, alone
from tests.support.network import AVAILABLE, WHY_NOT, Machines

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

HERE = Path(__file__).parents[1]
JOB = HERE / "jobs" / "digits.py"
WINDOWS = 3  # of a minute each, at most, that the attack may take
STRANGERS_DO = {"a wrong ticket", "no ticket", NOT_HTTP, CROWDED}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("one")
    alone(folder, JOB, str(folder / "out"))
    return (folder / "out").read_text()


@contextmanager
def process(command: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, env={**ENVIRON, **environ}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def who_holds(secret: bytes) -> list[str]:
    """Processes with the secret on their command line or in their environment: anybody on the machine may look."""
    holders: list[str] = []
    for path in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with contextlib.suppress(OSError):
            if secret in path.read_bytes():
                holders.append(str(path))
    return holders


def attacked(tmp_path: Path, *, listen: str, intruder_host: str, here: list[str], there: list[str]) -> Elastic:
    """A run that has been attacked in the middle and has come to its good end."""
    pace = tmp_path / "pace"
    pace.touch()
    job = [str(tmp_path / "out"), "--pace", str(pace)]
    options = ["--listen", listen, "--max", "2"]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            Elastic(tmp_path / "run", JOB, *job, workers=1, deadline_s=240.0, options=options, on=here)
        )
        run.until(lambda: (run.folder / "ticket").exists(), "a ticket")
        intrude = [
            *there,
            sys.executable,
            str(HERE / "support" / "intruder.py"),
            str(run.folder / "ticket"),
            intruder_host,
        ]
        intruder = stack.enter_context(process([*intrude, str(tmp_path)], tmp_path / "intruder.log"))
        run.until(lambda: (tmp_path / "ticket").exists() or intruder.poll() is not None, "an intruder")
        join = [*there, *FARANDOLE, "join", str(tmp_path / "ticket"), str(JOB), *job]
        joined = stack.enter_context(process(join, tmp_path / "join.log", FARANDOLE_WORKER="far"))
        run.until(lambda: set(run.members) == {"w1", "far"}, f"both: {(tmp_path / 'join.log').read_text()}")
        view = run.events("view")[-1]

        (tmp_path / "attack").touch()
        run.until(lambda: (tmp_path / "done").exists() or intruder.poll() is not None, "the end of the attack")
        assert (tmp_path / "done").exists(), (tmp_path / "intruder.log").read_text()
        secret = load(str(run.folder / "ticket")).secret.encode()
        assert who_holds(secret) == []
        run.command("status")
        assert all(set(each["members"]) == set(view["members"]) for each in views_since(run, view)), run.report()
        pace.unlink()
        run.finish()
        assert joined.wait(200) == 0, (tmp_path / "join.log").read_text()
        (tmp_path / "attack").unlink()
        intruder.wait(200)
    assert "far" not in [event["worker"] for event in run.events("lost")]
    assert all(set(each["members"]) == set(view["members"]) for each in views_since(run, view))
    return run


def views_since(run: Elastic, view: dict[str, Any]) -> list[dict[str, Any]]:
    """Later views. A worker that gets no answer for 3 s, on a busy machine, connects again: that is a new view."""
    return [each for each in run.events("view") if each["view"] > view["view"]]


def check(run: Elastic, tmp_path: Path, expected: str, *more: str) -> None:
    assert (tmp_path / "out").read_text() == expected, "the weights of a world of one"
    written = Counter(event["reason"] for event in run.events("stranger"))
    counted = Counter({event["reason"]: event["more"] for event in run.events("strangers")})
    assert set(written) >= STRANGERS_DO | set(more)
    assert max(written.values()) <= WINDOWS * LINES
    assert counted[CROWDED] > 500, "of a thousand"
    assert 0 < len(run.events("malformed")) <= WINDOWS * LINES
    assert len(run.events("malformed")) + counted["malformed"] >= 20, "twenty frames"
    ticket = load(str(run.folder / "ticket"))
    for path in run.folder.rglob("*"):
        if path.is_file():
            private = path.name in ("ticket", "tls.pem")
            assert not private or path.stat().st_mode & 0o777 == 0o600
            assert path.name == "ticket" or ticket.secret.encode() not in path.read_bytes(), path
    assert ticket.secret not in run.output.read_text() + (tmp_path / "join.log").read_text()
    assert "Traceback" not in (run.folder / "coordinator.log").read_text()


@pytest.mark.long
def test_on_this_machine(tmp_path: Path, undisturbed: str) -> None:
    run = attacked(tmp_path, listen="127.0.0.1", intruder_host="127.0.0.1", here=[], there=[])
    check(run, tmp_path, undisturbed)


@pytest.mark.world
@pytest.mark.skipif(not AVAILABLE, reason=WHY_NOT)
def test_between_two_machines(tmp_path: Path, undisturbed: str) -> None:
    with Machines() as machines:
        run = attacked(
            tmp_path,
            listen="0.0.0.0",
            intruder_host=machines.addresses[1],
            here=machines.on(0),
            there=machines.on(1),
        )
    check(run, tmp_path, undisturbed, NOT_TLS)
    ticket = json.loads((run.folder / "ticket").read_text())
    assert ticket["address"].startswith(f"https://{machines.addresses[0]}:"), "where the other machine reaches it"
    assert len(ticket["fingerprint"]) == 64
    assert os.path.getsize(run.folder / "tls.pem")
