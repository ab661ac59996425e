"""docs/observing.md has each field of a step in metrics.jsonl, and its examples and names are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from farandole.observe.export_common import OURS, SKIPPED
from farandole.observe.tensorboard import NEWEST
from farandole.protocol import events
from farandole.protocol.metrics import LogLine, StepLine, parse_line
from tests.support.mentioned import mentions

PAGE = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()


def table(head: str) -> list[list[str]]:
    """The rows of the table that begins with `head`."""
    lines = PAGE[PAGE.index(head) :].splitlines()
    rows = [line for line in lines[: lines.index("")] if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]


def test_each_field_of_a_step_has_a_row() -> None:
    assert {row[0].strip("`") for row in table("| field of a step | meaning |")} == set(StepLine.__struct_fields__)


def test_its_lines_are_lines() -> None:
    shown = [line for line in PAGE.splitlines() if line.startswith('{"')]
    found = [parse_line(line.encode()) for line in shown]
    assert [type(line) for line in found] == [StepLine, LogLine, events.ViewEvent]


def test_the_program_that_it_shows_gives_the_losses(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for line in PAGE.splitlines() if line.startswith('{"')]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0].replace("7.04", "9.04"), *lines, lines[0][:30]]))
    names = {"json": json, "Path": Path}
    exec(program.replace("metrics.jsonl", str(tmp_path / "metrics.jsonl")), names)
    assert names["losses"] == {2: 7.049590349197388}


def test_it_names_what_is_written_for_tensorboard() -> None:
    named = set(re.findall(r"`(step/\w+)`", PAGE))
    assert named == OURS - {SKIPPED}
    assert mentions(PAGE, "`events`", NEWEST)
