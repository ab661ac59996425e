"""What of the study lies on the shelf, and that its page says it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from experiments.dynamic_sgd import measures, page, shelf
from experiments.dynamic_sgd.cases import FULL, LETTERS, QUICK, SMALL, TASKS, Case, by_samples, cases
from experiments.dynamic_sgd.measures import Result, shared


def test_what_is_put_on_the_shelf_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "RESULTS", tmp_path)
    case = Case(task="cifar", history="jump12", policy="linear", seed=2, rate=0.3)
    result = Result(
        bin=10, loss=(1.0, None), factor=(1.0, 4.0), tests=((20, None, 0.5),), steps=1, seconds=1.5, fingerprint="abc"
    )
    assert shelf.get(case, QUICK) is None
    shelf.put(case, QUICK, result)
    assert shelf.get(case, QUICK) == result
    other = shelf.path(case, FULL)
    other.parent.mkdir(parents=True)
    other.write_text(shelf.path(case, QUICK).read_text())
    with pytest.raises(SystemExit, match=re.escape(str(other))):
        shelf.get(case, FULL)


def test_what_is_there_of_a_comparison_is_all_that_its_tables_say() -> None:
    """Of nothing there is no verdict, and no table asks for a training that no experiment has."""
    for name in page.blocks(page.PAGE.read_text()):
        table, *arguments = name.split()
        for line in page.TABLES[table](FULL, *arguments).splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for cell in cells:
                assert not cell.startswith("0 of") or not {"holds", "open", "calm", "**loses**", "**spikes**"} & {
                    *cells
                }
                if found := re.fullmatch(r"(\d+) of (\d+)", cell):
                    assert int(found[1]) <= int(found[2])


def test_the_page_says_what_the_results_say() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text, FULL) == text, "run `python -m experiments.dynamic_sgd plot`"
    assert {name.split()[0] for name in page.blocks(text)} == set(page.TABLES), "a table that the page does not show"


def test_the_results_are_those_of_the_cases() -> None:
    """Nothing on the shelf that no experiment asks for: a figure that nobody could make again. Up to the first change
    each run is the static run of its seed."""
    trained = [letter for letter in LETTERS if letter != "D"]
    for scale, letters in ((FULL, [each for each in trained if each != "M"]), (QUICK, trained), (SMALL, ["M"])):
        known = {shelf.path(case, scale) for letter in letters for case in cases(letter, scale, TASKS)}
        there = {place for task in TASKS for place in (shelf.RESULTS / scale.name / task).glob("*.json")}
        assert there <= known
        for place in there:
            facts = json.loads(place.read_text())
            assert set(facts) == {"case", "sizes", "result"}
            case = Case(**facts["case"])
            found = msgspec.convert(facts["result"], Result)
            still = shelf.static(case.task, scale, case.policy).get(case.seed)
            changes = by_samples(case.history, scale.total, case.seed)
            if still and case.rate == scale.rate(case.task, case.policy):
                assert shared(found, still, changes), (
                    f"{place}: made on another machine than the static run of its seed"
                )
    assert measures.HORIZON * FULL.bin <= FULL.total // 2
    assert sum(place.stat().st_size for place in shelf.RESULTS.rglob("*") if place.is_file()) < 2_000_000
