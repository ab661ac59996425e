"""`farandole hosts`: check, run, copy and clean, over real SSH."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.support import forked, sshd
from tests.support.fake_worker import gone, until
from tests.support.harness import FARANDOLE, Elastic
from tests.support.rack import Rack
from tests.support.sshd import Sshd

pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.skipif(not sshd.AVAILABLE, reason=sshd.WHY_NOT),
    pytest.mark.timeout(300),
]
JOB = Path(__file__).parents[1] / "jobs" / "small.py"


class Verbs(Rack):
    """Verbs on the file of hosts."""

    def verb(self, verb: str, *words: str) -> CompletedProcess[str]:
        command = [*FARANDOLE, "hosts", verb, "--ssh", self.hosts.ssh, str(self.file), *words]
        return forked.run(command, env={**forked.ENVIRON, "COLUMNS": "200"}, timeout=120)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Verbs]:
    with Sshd(tmp_path, 3) as hosts:
        yield Verbs(hosts, tmp_path)


def test_check_says_who_is_ready_and_what_is_wrong_with_the_others(rack: Verbs) -> None:
    rack.write("localhost slots=2", rack.line(0), rack.line(1))
    done = rack.verb("check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 hosts" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith(rack.name(0))).split()
    assert row[1:6] == ["1", "yes", ".".join(map(str, sys.version_info[:3])), torch.__version__, "0.1.0"]
    assert "same" in row
    ports = [line.split()[2:] for line in done.stdout.splitlines() if line[:2] in ("1 ", "2 ", "3 ")]
    assert ports == [["yes"] * 3] * 3, done.stdout

    bare = rack.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    rack.hosts.end(rack.hosts.addresses[1])
    rack.write(rack.line(0), rack.line(1), f"{rack.name(2)} python={bare}", f"{rack.name(0)[:-1]}x", "localhost")
    rack.file.write_text(rack.file.read_text().replace(f"{rack.name(0)[:-1]}x", "nobody@nowhere.invalid"))
    done = rack.verb("check")
    assert done.returncode == 1
    told = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "Connection refused" in told[rack.name(1)]
    assert "python=PATH" in told[rack.name(2)]
    assert told["nobody@nowhere.invalid"]
    assert rack.name(0) not in told
    assert "3 of 5 hosts" in done.stdout


def test_doctor_has_a_row_for_each_host(rack: Verbs) -> None:
    rack.write(rack.line(0), rack.line(1))
    rack.hosts.end(rack.hosts.addresses[1])
    command = [*FARANDOLE, "doctor", "--json", "--ssh", rack.hosts.ssh, "--hosts", str(rack.file)]
    done = forked.run(command, env=forked.ENVIRON, timeout=120)
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert rows[f"host {rack.name(0)}"]["outcome"] == "ok"
    assert rows[f"host {rack.name(1)}"]["outcome"] == "failed"
    assert rows[f"host {rack.name(1)}"]["remedy"]


def test_run_labels_lines_and_gives_the_exit_codes(rack: Verbs) -> None:
    rack.write(rack.line(0), rack.line(1), "localhost")
    done = rack.verb("run", "echo {index} of {count} on {host}; test {index} -ne 2 || exit 7")
    assert done.returncode == 1
    width = len(rack.name(0))
    assert sorted(done.stdout.splitlines()) == sorted(
        [
            f"{rack.name(0)} | 1 of 3 on {rack.name(0)}",
            f"{rack.name(1)} | 2 of 3 on {rack.name(1)}",
            f"{'localhost':<{width}} | 3 of 3 on localhost",
            f"{rack.name(1)}: exit code 7",
        ]
    )
    assert rack.verb("run", "printf", "%s\\n", "two words; $HOME").stdout.count("two words; $HOME\n") == 3


def test_copy_makes_it_what_it_is_to_be_there(rack: Verbs, tmp_path: Path) -> None:
    rack.write(rack.line(0))
    source = tmp_path / "a folder"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(os.urandom(3_000_000))
    target = tmp_path / "it's there" / "x"
    done = rack.verb("copy", str(source), str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "deep" / "file").read_bytes() == (source / "deep" / "file").read_bytes()
    (target / "kept").touch()
    (source / "deep" / "file").write_text("new")
    assert rack.verb("copy", str(source), str(target)).returncode == 0
    assert (target / "deep" / "file").read_text() == "new"
    assert (target / "kept").exists()
    assert rack.verb("copy", str(source / "deep" / "file"), str(tmp_path / "other" / "name")).returncode == 0
    assert (tmp_path / "other" / "name").read_text() == "new"
    (tmp_path / "blocked").write_text("")
    done = rack.verb("copy", str(source), str(tmp_path / "blocked" / "x"))
    assert done.returncode == 1
    assert f"{rack.name(0)}: " in done.stdout
    assert "blocked" in done.stdout
    done = rack.verb("copy", str(tmp_path / "nothing"), "x")
    assert done.returncode == 2
    assert str(tmp_path / "nothing") in done.stderr


def test_clean_ends_what_a_run_has_left_and_nothing_of_another(rack: Verbs, tmp_path: Path) -> None:
    rack.write(rack.line(0, slots=2), rack.line(1))
    options = ["--pool", f"ssh,hosts={rack.file},ssh={rack.hosts.ssh}"]
    pace = tmp_path / "pace"
    pace.write_text("0.05")

    def run(name: str) -> Elastic:
        job = (str(tmp_path / f"{name}.out"), "--pace", str(pace), "--epochs", "100000")
        return Elastic(tmp_path / name, JOB, *job, workers=3, options=options, deadline_s=200.0)

    with run("one") as one, run("two") as two:
        one.until_members(3)
        two.until_members(3)
        done = rack.verb("clean", "--run", str(one.folder))
        assert done.returncode == 2
        assert "farandole stop" in done.stderr
        left = [event["pid"] for event in one.events("ready")]
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()
        assert not any(gone(pid) for pid in left), "they train on without it"
        done = rack.verb("clean", "--run", str(one.folder))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("farandole agent") == 2, "one a host; what else is there may end with them"
        until(lambda: all(gone(pid) for pid in left))
        done = rack.verb("clean", "--run", str(one.folder))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "farandole agent" not in done.stdout, "nothing of it is left"
        step = two.step
        two.until_step(step + 5)
        assert len(two.members) == 3
        assert not two.events("lost")
        two.command("stop")
        two.process.wait(200)
