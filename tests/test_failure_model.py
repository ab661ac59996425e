"""docs/failure_model.md says nothing that no test shows: every row is whole and every test that it names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failure_model.md").read_text()
NAME = re.compile(r"`(tests/\w+\.py)::(test_\w+)`")


def rows(page: str) -> Iterator[list[str]]:
    """The cells of every table's rows, heads included, rules left out."""
    for line in page.splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


@cache
def defined_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def faults(page: str) -> list[str]:
    """What is wrong with the page."""
    found: list[str] = []
    for cells in rows(page):
        row = " | ".join(cells)[:80]
        if cells[-1] == "test":
            continue
        if len(cells) != 4 or not all(cells):
            found.append(f"not four cells with something in each: {row}")
            continue
        named = NAME.findall(cells[-1])
        if NAME.sub("", cells[-1]).strip(" ,") or not named:
            found.append(f"the last cell must be tests, as `tests/file.py::test_name`: {row}")
        for file, test in named:
            if not (ROOT / file).exists() or test not in defined_in(file):
                found.append(f"{file}::{test} is not there: {row}")
    return found


def test_every_row_is_whole_and_names_tests_that_exist() -> None:
    assert faults(PAGE) == []
    assert sum(1 for _ in rows(PAGE)) > 110


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| a | b | c | `tests/test_failure_model.py::test_that_nobody_wrote` |", "is not there"),
        ("| a | b | c | `tests/test_nothing.py::test_faults` |", "is not there"),
        ("| a | b | c | by inspection |", "must be tests"),
        ("| a | b | c | |", "not four cells"),
        ("| a |  | c | `tests/test_failure_model.py::test_faults` |", "not four cells"),
        ("| a | b | `tests/test_failure_model.py::test_faults` |", "not four cells"),
    ],
)
def test_faults_of_a_row_are_found(row: str, fault: str) -> None:
    [found] = faults(row)
    assert fault in found
