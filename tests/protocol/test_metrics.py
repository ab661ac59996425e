"""What counts as a line of metrics.jsonl, and that whoever reads the file passes over what does not, and says so."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from farandole.checkpoint.reach import listed
from farandole.cli.reproduce import history_of
from farandole.coordinator.journal import Journal
from farandole.observe.past import past
from farandole.observe.tables import past_table
from farandole.observe.text import describe
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, as_written, metrics_line, parse_line, parse_lines
from tests.support.damaged_lines import DAMAGED_LINES, SAVED, VIEW
from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.mentioned import mentions
from tests.support.metric_lines import an, logged, made, step_line, stepped, write

STEPS = [step_line(number) for number in range(3)]
WHOLE = [
    *STEPS,
    LogLine(step=3, fields={"accuracy": 0.5, "path": 7, "note": "x", "none": None}),
    *map(made, (VIEW, SAVED)),
]


@pytest.mark.parametrize("line", WHOLE)
def test_what_is_a_line_is_given_as_it_is(line: Line) -> None:
    assert parse_line(as_written(line)) == line


@pytest.mark.parametrize("line", DAMAGED_LINES, ids=lambda line: line[:60].decode(errors="replace"))
def test_what_is_none_is_damaged(line: bytes) -> None:
    assert parse_line(line) is None


def test_whatever_is_written_is_a_line() -> None:
    odd = {"nan": float("nan"), "huge": 2**63 - 1, "text": "\x1b\u202e", "none": None, "yes": True}
    for line in (
        metrics_line(stepped(2**53, loss=float("inf"), samples_per_s=float("inf"), total=None, factor=float("nan"))),
        metrics_line(logged(0, 1, **odd)),
    ):
        assert parse_line(as_written(line)) is not None


# --- those who read it ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run that was saved in step 2 and then cut off, with every kind of damage in between and at its end."""
    path = tmp_path / "metrics.jsonl"
    damage = [line for line in DAMAGED_LINES if line]
    whole = [
        json.dumps(line, separators=(",", ":")).encode()
        for line in (VIEW, *(json.loads(as_written(line)) for line in STEPS), SAVED)
    ]
    mixed = [line for at, each in enumerate(whole) for line in (each, *damage[at :: len(whole)])]
    path.write_bytes(b"\n".join([*mixed, *damage]) + b"\n")
    return path


def count() -> int:
    return 2 * len([line for line in DAMAGED_LINES if line])


@pytest.mark.failure(
    "Files, disks and output",
    "`metrics.jsonl` is damaged (an incomplete write, another program, an older version)",
    seen="`metrics.jsonl is damaged: 3 lines skipped`, an event, and in `status` and `replay`",
    outcome="the run continues, resumes and is replayed from the undamaged lines",
)
def test_a_coordinator_begins_with_what_is_whole_and_counts_the_rest_once(file: Path) -> None:
    with closing(Journal(file.parent)) as journal:
        assert journal.recent == [made(VIEW), *STEPS, made(SAVED)]
        assert journal.damaged == count()
        assert journal.last_line() == (2, 0)
        write(journal, an(events.MetricsDamagedEvent, lines=journal.damaged))
    with closing(Journal(file.parent)) as journal:
        assert journal.damaged == 0, "it has been said"


def test_a_line_that_is_cut_in_two_by_the_tail_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.coordinator.journal.TAIL_BYTES", 400)
    written = b"".join(map(as_written, STEPS * 5))
    (tmp_path / "metrics.jsonl").write_bytes(written)
    with closing(Journal(tmp_path)) as journal:
        assert journal.damaged == 0
        assert 0 < len(journal.recent) < 4


def test_the_past_is_told_from_what_is_whole(file: Path) -> None:
    found = past("r", file.read_bytes().splitlines(keepends=True))
    assert (found.steps, found.loss, found.checkpoint, found.outcome) == (3, 0.5, SAVED["path"], "cut off")
    assert found.damaged > len(DAMAGED_LINES), "of the steps' lines only the newest are looked at"
    shown = io.StringIO()
    Console(file=shown, width=200).print(past_table(found))
    assert mentions(shown.getvalue(), found.damaged, "metrics.jsonl")
    assert listed(file).path == SAVED["path"]


@pytest.mark.failure(
    "Files, disks and output", "`metrics.jsonl` is damaged (an incomplete write, another program, an older version)"
)
def test_a_replay_goes_by_what_is_whole(file: Path) -> None:
    lines, damaged = parse_lines(file.read_bytes().split(b"\n")[:-1])
    assert damaged == count()
    assert history_of(lines, file.parent).changes == ((0, 1),)


@pytest.mark.long
@pytest.mark.failure(
    "Files, disks and output", "`metrics.jsonl` is damaged (an incomplete write, another program, an older version)"
)
@pytest.mark.processes
def test_status_of_a_run_whose_file_is_damaged(file: Path) -> None:
    """Escapes in it do nothing to a terminal, in the table or as JSON."""
    steering = {**SAVED, "path": "/c/\x1b]0;owned\x07\u202e[bold]x.pt"}
    with file.open("ab") as lines:
        lines.write(json.dumps(steering, separators=(",", ":")).encode() + b"\n")
    for option in ([], ["--json"]):
        done = subprocess.run(
            [*FARANDOLE, "status", *option, "--run", str(file.parent)], env=ENVIRON, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout.decode()
        assert not {"\x1b", "\x07", "\u202e"} & set(said)
        assert "x.pt" in said
        assert "[bold]" in said, "it is no markup"
    assert json.loads(said)["checkpoint"] == steering["path"]
    assert json.loads(said)["damaged"] > 0


def test_words() -> None:
    assert mentions(describe(an(events.MetricsDamagedEvent, lines=1)), "metrics.jsonl", 1)
    assert mentions(describe(an(events.NotToldEvent, reason="why")), "why")
    assert mentions(describe(an(events.LinesLostEvent, worker="w1", lines=7, reason="why")), "w1", 7, "why")
