"""Two files, one truth: what each kind of line leaves in metrics.jsonl and in journal.sqlite."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from farandole.control.journal import Journal, event_line, metrics_line
from farandole.membership.messages import Line

STEP = metrics_line(Line(step=3, index=0, fields={"loss": 0.5, "time": 9.0}))
LOGGED = metrics_line(Line(step=3, index=1, fields={"accuracy": float("nan"), "event": "mine"}))
VIEW = event_line("view", {"view": 2, "members": ["w1"], "step": 3}, 10.5)
LOST = event_line("lost", {"worker": "w2", "reason": "why"}, 11.5)


def test_lines_have_their_head_first() -> None:
    assert json.dumps(VIEW) == '{"event": "view", "time": 10.5, "view": 2, "members": ["w1"], "step": 3}'
    assert json.dumps(STEP) == '{"step": 3, "loss": 0.5, "time": 9.0}'
    assert (LOGGED["event"], LOGGED["step"]) == ("log", 3), "a user's field of the same name does not hide the kind"


def test_events_go_to_both_files_metrics_only_to_one(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for line in (VIEW, STEP, LOGGED, LOST):
            journal.write(line)
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) > 0, "readable at once"
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as reader:  # a second process would see the same
            rows = reader.execute("SELECT id, time, event, view, step, worker, detail FROM events").fetchall()
    assert rows == [
        (1, 10.5, "view", 2, 3, None, '{"members":["w1"]}'),
        (2, 11.5, "lost", None, None, "w2", '{"reason":"why"}'),
    ]
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read == [VIEW, STEP, {**LOGGED, "accuracy": None}, LOST]  # JSON has no NaN


def test_reopened_journal_appends(tmp_path: Path) -> None:
    for line in (VIEW, LOST):
        with closing(Journal(tmp_path)) as journal:
            journal.write(line)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as reader:
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (2,)
