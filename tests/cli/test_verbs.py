"""The command line's checks and words: everything that needs no live run. Most is called within this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from farandole import cli
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.process import CoordinatorRecord
from farandole.membership.records import RunSettings
from tests.support.harness import FARANDOLE


@dataclass(frozen=True)
class Done:
    code: object
    out: str
    err: str


@pytest.fixture
def farandole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`farandole ARGUMENTS` in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Done(ended.value.code, *capsys.readouterr())

    return call


def past_run(folder: Path, seed: int = 4) -> None:
    """What a run leaves behind."""
    folder.mkdir(parents=True)
    Ticket(address="http://127.0.0.1:1", secret=new_secret(), run=folder.name).save(folder / "ticket")
    record = CoordinatorRecord(pid=1, address="http://127.0.0.1:1")
    (folder / "coordinator.json").write_bytes(msgspec.json.encode(record))
    (folder / "settings.json").write_bytes(msgspec.json.encode(RunSettings(run=folder.name, seed=seed)))
    (folder / "metrics.jsonl").touch()


ERRORS = [
    # arguments, exit code, what the one line says
    ("run none.py", 2, "script none.py: No such file or directory"),
    ("run --workers 1 --min 2 train.py", 2, "--workers 1 is below --min 2"),
    ("run --workers 3 --max 2 train.py", 2, "--max 2 is below --workers 3"),
    ("run --min 0 train.py", 2, "--min 0: a run needs at least one worker"),
    ("run --threads 0 train.py", 2, "--threads 0"),
    ("run --folder runs/done train.py", 2, "--folder runs/done holds a run that has run to its end, and no checkpoint"),
    ("run --folder runs/old --seed 5 train.py", 2, "--seed 5: the run in runs/old has 4, and is resumed with that"),
    ("run --folder runs/zero --seed 5 train.py", 2, "--seed 5: the run in runs/zero has 0, and is resumed with that"),
    ("run --folder runs/old --threads 2 train.py", 2, "--threads 2: the run in runs/old has 1"),
    ("run --folder runs/old --checkpoints x train.py", 2, "the run in runs/old has none, and is resumed with that"),
    ("run --folder runs/old --resume x train.py", 2, "--folder runs/old holds a run, which goes on from its own"),
    ("run --folder runs/torn train.py", 2, "--folder runs/torn: the settings of the run in it can't be read"),
    ("run --resume runs/old train.py", 2, "--resume runs/old: no checkpoint at "),
    ("run --resume none.pt train.py", 2, "none.pt: no checkpoint there with its manifest none.json beside it"),
    ("run --checkpoints nowhere://x train.py", 2, "Protocol not known: nowhere; name a folder or a URL"),
    ("run --checkpoints train.py train.py", 2, "can't be written"),
    ("run --checkpoint-every 10 train.py", 2, "checkpoint every '10': say"),
    ("run --stall 0.1 train.py", 2, "--stall 0.1: at least 0.5 s, the time between heartbeats"),
    ("run --orphan-limit 3 train.py", 2, "--orphan-limit 3: it must be longer than the heartbeat timeout, 5 s"),
    ("run --keep 0 train.py", 2, "--keep 0: a run keeps at least one checkpoint"),
    ("run --listen a/b train.py", 2, "--listen a/b: no host; give HOST or HOST:PORT"),
    ("run --folder train.py train.py", 2, "train.py is no folder; name another one"),
    ("run --folder open train.py", 2, "others can write to open (mode 0775): chmod 700 open, or name"),
    ("status --run open", 2, "others can write to open (mode 0775): chmod 700 open"),
    ("join none train.py", 2, "ticket none: No such file or directory; a run keeps its ticket in its folder"),
    ("join train.py train.py", 2, "ticket train.py: not a ticket"),
    ("join runs/old/ticket none.py", 2, "script none.py: No such file or directory"),
    ("status --run none", 2, "--run none: no run has been started in this folder"),
    ("scale 3", 1, "the run in runs/old is over"),
    ("release w1", 1, "the run in runs/old is over"),
    ("stop", 1, "the run in runs/old is over"),
    ("trace", 1, "the run in runs/old is over"),
    ("trace --steps 0", 2, "--steps 0: a trace is of 1 to 1000 steps"),
    ("trace --steps 1001", 2, "--steps 1001: a trace is of 1 to 1000 steps"),
    ("trace -o none/t.json", 2, "--output none/t.json: there is no folder none"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), ERRORS)
def test_errors_are_one_line_and_name_the_remedy(
    farandole: Callable[..., Done], tmp_path: Path, arguments: str, code: int, says: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o775)
    for name in ("done", "torn", "old"):  # the newest is what verbs mean without --run
        past_run(tmp_path / "runs" / name)
    past_run(tmp_path / "runs" / "zero", seed=0)
    finished = '{"event":"finished","time":1.0,"fingerprint":"f","equal":true}\n{"event":"over","code":0,"reason":""}\n'
    (tmp_path / "runs" / "done" / "metrics.jsonl").write_text(finished)
    (tmp_path / "runs" / "torn" / "settings.json").write_text('{"run":')
    for age, name in enumerate(("old", "torn", "done", "zero")):
        os.utime(tmp_path / "runs" / name / "coordinator.json", (1e9 - age, 1e9 - age))
    done = farandole(*arguments.split())
    assert done.code == code
    assert done.err.startswith("farandole: error: ")
    assert says in done.err
    assert len(done.err.splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["done", "old", "torn", "zero"], "none begun"
    assert not (tmp_path / "runs" / "old" / "coordinator.log").exists(), "nothing was begun"


def test_no_run_at_all(farandole: Callable[..., Done], tmp_path: Path) -> None:
    done = farandole("status")
    assert done.code == 2
    assert f"no run in {tmp_path / 'runs'}; start one with `farandole run`" in done.err


@pytest.mark.processes
def test_an_error_is_the_exit_code_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run([*FARANDOLE, "stop"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("farandole: error: no run in ")


def test_help_names_every_verb(farandole: Callable[..., Done]) -> None:
    assert all(verb in farandole("--help").out for verb in ("run", "join", "scale", "release", "status", "stop"))
    assert "--die-with" not in farandole("join", "--help").out


@pytest.mark.processes
def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import farandole.cli, sys; print([m for m in ('torch', 'numpy', 'aiohttp') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
