"""The pages of failures say nothing that no test shows: every row is whole and every test that it names exists.

docs/failure_model.md is about the protocol, docs/what_can_go_wrong.md is for users; nothing stands in both.
docs/security.md is about those who mean harm, and names attacks of `make attack` as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from attack.table import ATTACKS

ROOT = Path(__file__).parents[1]
OF_FAULTS = ("failure_model.md", "what_can_go_wrong.md")
PAGES = {name: (ROOT / "docs" / name).read_text() for name in (*OF_FAULTS, "security.md")}
NAME = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
ATTACK = re.compile(r"attack `([^`]+)`")
MADE = {attack.name for attack in ATTACKS}


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
        if ATTACK.sub("", NAME.sub("", cells[-1])).strip(" ,") or not named:
            found.append(f"the last cell must be tests, as `tests/file.py::test_name`: {row}")
        for file, test in named:
            if not (ROOT / file).exists() or test not in defined_in(file):
                found.append(f"{file}::{test} is not there: {row}")
        found += [f"attack {name} is not there: {row}" for name in ATTACK.findall(cells[-1]) if name not in MADE]
    return found


@pytest.mark.parametrize(
    ("name", "least"), [("failure_model.md", 110), ("what_can_go_wrong.md", 50), ("security.md", 20)]
)
def test_every_row_is_whole_and_names_tests_that_exist(name: str, least: int) -> None:
    assert faults(PAGES[name]) == []
    assert sum(1 for _ in rows(PAGES[name])) > least


def in_both(one: str, other: str) -> set[str]:
    """What goes wrong on both pages. Words decide, not how they are set; what refers to the row above has no match."""

    def faulty(page: str) -> set[str]:
        plain = [" ".join(re.findall(r"\w+", cells[0])).casefold() for cells in rows(page) if cells[-1] != "test"]
        return {words for words in plain if not words.startswith("the same")}

    return faulty(one) & faulty(other)


def test_nothing_stands_in_both() -> None:
    assert in_both(*(PAGES[name] for name in OF_FAULTS)) == set()


def test_what_stands_in_both_is_found() -> None:
    row = "| {} | seen | done | `tests/test_failure_model.py::test_faults` |"
    assert in_both(row.format("`rank` is lost, twice"), row.format("Rank is *lost* twice")) == {"rank is lost twice"}
    assert in_both(row.format("a worker dies"), row.format("a worker hangs")) == set()
    assert in_both(row.format("the same, at the end"), row.format("the same, at the end")) == set()


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| a | b | c | `tests/test_failure_model.py::test_that_nobody_wrote` |", "is not there"),
        ("| a | b | c | `tests/test_nothing.py::test_faults` |", "is not there"),
        ("| a | b | c | `tests/test_failure_model.py::test_nothing_stands_in_both`, attack `magic` |", "is not there"),
        ("| a | b | c | attack `port: junk` |", "must be tests"),
        ("| a | b | c | by inspection |", "must be tests"),
        ("| a | b | c | |", "not four cells"),
        ("| a |  | c | `tests/test_failure_model.py::test_faults` |", "not four cells"),
        ("| a | b | `tests/test_failure_model.py::test_faults` |", "not four cells"),
    ],
)
def test_faults_of_a_row_are_found(row: str, fault: str) -> None:
    [found] = faults(row)
    assert fault in found


def test_every_attack_stands_on_the_page_about_those_who_mean_harm() -> None:
    assert MADE - set(ATTACK.findall(PAGES["security.md"])) == set()
