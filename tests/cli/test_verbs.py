"""The command line's checks and words: everything that needs no live run. Most is called within this process."""

from __future__ import annotations

import os
import re
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
from farandole.protocol.coordinator.state import RunSettings
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
    # arguments, exit code, which values the one line names
    ("run none.py", 2, r"\bnone\.py"),
    ("run --workers 1 --min 2 train.py", 2, "--workers 1 .*--min 2"),
    ("run --workers 3 --max 2 train.py", 2, "--max 2 .*--workers 3"),
    ("run --min 0 train.py", 2, r"--min 0\b"),
    ("run --threads 0 train.py", 2, r"--threads 0\b"),
    ("run --folder runs/done train.py", 2, "--folder runs/done"),
    ("run --folder runs/old --seed 5 train.py", 2, r"--seed 5\b.*runs/old\b.*\b4\b"),
    ("run --folder runs/zero --seed 5 train.py", 2, r"--seed 5\b.*runs/zero\b.*\b0\b"),
    ("run --folder runs/old --threads 2 train.py", 2, r"--threads 2\b.*runs/old\b.*\b1\b"),
    ("run --folder runs/old --checkpoints x train.py", 2, r"--checkpoints \S+.*runs/old\b"),
    ("run --folder runs/old --resume x train.py", 2, "--folder runs/old.*--resume"),
    ("run --folder runs/torn train.py", 2, "--folder runs/torn"),
    ("run --resume runs/old train.py", 2, "--resume runs/old"),
    ("run --resume none.pt train.py", 2, r"none\.pt.*none\.json"),
    ("run --checkpoints nowhere://x train.py", 2, "nowhere"),
    ("run --checkpoints train.py train.py", 2, r"checkpoints\b.*\btrain\.py"),
    ("run --checkpoint-every 10 train.py", 2, "'10'"),
    ("run --stall 0.1 train.py", 2, r"--stall 0\.1\b.*\b0\.5 s"),
    ("run --orphan-limit 3 train.py", 2, r"--orphan-limit 3\b.*\b5 s"),
    ("run --keep 0 train.py", 2, r"--keep 0\b"),
    ("run --listen a/b train.py", 2, "--listen a/b.*HOST:PORT"),
    ("run --folder train.py train.py", 2, r"train\.py"),
    ("run --folder open train.py", 2, r"\bopen \(mode 0775\).*chmod 700 open"),
    ("status --run open", 2, r"\bopen \(mode 0775\).*chmod 700 open"),
    ("join none train.py", 2, "ticket none"),
    ("join train.py train.py", 2, r"ticket train\.py"),
    ("join runs/old/ticket none.py", 2, r"script none\.py"),
    ("status --run none", 2, "--run none"),
    ("scale 3", 1, "runs/old"),
    ("release w1", 1, "runs/old"),
    ("stop", 1, "runs/old"),
    ("trace", 1, "runs/old"),
    ("trace --steps 0", 2, r"--steps 0\b.*\b1000\b"),
    ("trace --steps 1001", 2, r"--steps 1001\b.*\b1000\b"),
    ("trace -o none/t.json", 2, r"--output none/t\.json"),
]


@pytest.mark.failure(
    "Checkpoints",
    "`farandole run --folder` names a finished run whose checkpoints were deleted",
    seen="an error at once",
    outcome="exit code 2; nothing is started, because the run would start from step 0",
)
@pytest.mark.failure(
    "Command line",
    "an option is invalid, or a script, ticket or folder does not exist",
    seen="one line at once, with the value, the limit and the remedy",
    outcome="exit code 2; nothing is started",
)
@pytest.mark.failure(
    "Command line",
    "`--seed`, `--threads` or `--checkpoints` differs from the value of the run that resumes",
    seen="one line at once, with both values",
    outcome="exit code 2; nothing is started",
)
@pytest.mark.failure(
    "Command line",
    "`farandole scale`, `release` or `stop` is called for a run that is over",
    seen='"the run in FOLDER is over"',
    outcome="exit code 1",
)
@pytest.mark.parametrize(("arguments", "code", "values"), ERRORS)
def test_errors_are_one_line_and_name_the_remedy(
    farandole: Callable[..., Done], tmp_path: Path, arguments: str, code: int, values: str
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
    assert re.search(values, done.err)
    assert len(done.err.splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["done", "old", "torn", "zero"], "none begun"
    assert not (tmp_path / "runs" / "old" / "coordinator.log").exists(), "nothing was begun"


def test_no_run_at_all(farandole: Callable[..., Done], tmp_path: Path) -> None:
    done = farandole("status")
    assert done.code == 2
    assert str(tmp_path / "runs") in done.err
    assert "`farandole run`" in done.err


@pytest.mark.processes
def test_an_error_is_the_exit_code_of_the_process(tmp_path: Path) -> None:
    done = subprocess.run([*FARANDOLE, "stop"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match("farandole: error: .*/runs", done.stderr)


def test_help_names_every_verb(farandole: Callable[..., Done]) -> None:
    assert all(verb in farandole("--help").out for verb in ("run", "join", "scale", "release", "status", "stop"))
    assert "--die-with" not in farandole("join", "--help").out


@pytest.mark.processes
def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import farandole.cli.commands, sys; print([m for m in ('torch', 'numpy', 'aiohttp') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
