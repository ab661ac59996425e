"""What farandole asks for is what is tested and was audited, and an audit that reached nobody does not pass for one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.audit import ACCEPTED, judge, least, main, minimums, pins


def test_what_is_tested_is_what_may_be_installed() -> None:
    for requirement in minimums():
        pin = pins()[requirement.name]
        assert requirement.specifier.contains(pin), f"{requirement}, and {pin} is tested"
        assert Version(least(requirement)) <= Version(pin)


AUDITED = {
    "aiohttp": "3.14.3",  # GHSA-cq5v-8q36-5273
    "cryptography": "50.0.0",  # CVE-2026-69247
    "filelock": "3.20.3",  # CVE-2026-22701
    "pillow": "12.3.0",  # PYSEC-2026-2253 and on
    "torch": "2.10",  # CVE-2026-24747: of torch.load(weights_only=True)
}


def test_no_minimum_is_older_than_the_last_that_something_was_known_against() -> None:
    found = {requirement.name: Version(least(requirement)) for requirement in minimums()}
    assert {name for name, version in AUDITED.items() if found[name] < Version(version)} == set()


@pytest.mark.parametrize("text", ["x", "x<3", "x>1"])
def test_a_requirement_without_a_first_version_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}: "):
        least(Requirement(text))


def found(name: str, *ids: str) -> dict[str, Any]:
    return {"name": name, "version": "1", "vulns": [{"id": i, "fix_versions": ["2"], "aliases": []} for i in ids]}


UNASKED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (1)"}


def test_what_is_known_accepted_and_unasked_are_told_apart() -> None:
    accepted = next(iter(ACCEPTED))
    known, passed, unasked = judge({"dependencies": [found("a", "CVE-1", accepted), UNASKED, found("c")]})
    [line] = known
    assert all(value in line for value in ("a 1", "CVE-1", "'2'"))
    assert [line.split(":")[0] for line in passed] == ["a 1"]
    assert unasked == ["b"]
    renamed = {"id": "GHSA-x", "fix_versions": [], "aliases": [accepted]}
    assert judge({"dependencies": [{"name": "a", "version": "1", "vulns": [renamed]}]})[0] == []


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ([found("a")], 0, "0 advisories"),
        ([found("a", "CVE-1"), UNASKED], 1, "CVE-1"),
        ([UNASKED], 2, "NOT AUDITED, pip-audit could not reach its data: b"),
        (None, 2, "NOT AUDITED, pip-audit could not reach its data: "),
    ],
)
def test_an_audit_that_reached_nobody_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: Any, code: int, said: str
) -> None:
    """A program in the place of pip-audit, which says what that says."""
    program, answer = tmp_path / "pip-audit", tmp_path / "answer"
    answer.write_text("" if report is None else json.dumps({"dependencies": report, "fixes": []}))
    program.write_text(f'#!/bin/sh\ntest "$1" = -r && grep -q == "$2" && cat {answer}\n')
    program.chmod(0o755)
    assert main(str(program)) == code
    assert said in capsys.readouterr().out
