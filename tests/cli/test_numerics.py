"""`farandole numerics`: what it writes down, compares and says; clear errors for what can't be compared."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from farandole.cli import commands
from farandole.control.status import VERSION, read, write
from farandole.errors import UsageError
from farandole.protocol.messages import Signature
from farandole.protocol.numeric_facts import THREADS, TORCH, numeric_differences, numerics, verdict
from farandole.training import run_state
from tests.support.stage import Stage, play

Call = Callable[..., Result]
EXP = "operation exp"


@pytest.fixture
def farandole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()

    def call(*arguments: str) -> Result:
        result = CliRunner().invoke(commands.app, ["numerics", *arguments])
        torch.set_num_threads(threads)
        return result

    return call


def test_what_is_written_down_is_compared_by_exit_code_and_a_sentence(farandole: Call, tmp_path: Path) -> None:
    written = farandole("--json", "here.json")
    assert written.exit_code == 0
    assert EXP in written.output
    found = read(tmp_path / "here.json")
    assert found.facts[THREADS] == "1"
    assert found.facts == dict(numerics(run_state.local_facts(1, "same")))
    same = farandole("--against", "here.json")
    assert same.exit_code == 0
    [line] = same.output.splitlines()
    assert "here.json" in line
    assert "--bits same" in line
    rows = farandole("--against", "here.json", "--rows").output
    assert len(rows.splitlines()) > len(found.facts)
    assert EXP in rows
    assert rows.endswith(same.output)
    write(tmp_path / "other.json", {**found.facts, EXP: "0" * 16, "setting default dtype": "float64"}, "same")
    other = farandole("--against", "other.json")
    assert other.exit_code == 1
    [last] = other.output.splitlines()
    assert all(value in last for value in ("other.json", "--bits any", "--bits portable", EXP))
    assert "default dtype" not in last, "settings are the script's, not the machine's"
    torch.set_default_dtype(torch.float32)  # which was put in force to compare with


def test_the_threads_are_those_of_the_other_side(farandole: Call, tmp_path: Path) -> None:
    assert farandole("--json", "two.json", "--threads", "2").exit_code == 0
    assert read(tmp_path / "two.json").facts[THREADS] == "2"
    assert farandole("--against", "two.json").exit_code == 0
    assert farandole("--against", "two.json", "--threads", "1").exit_code == 1


@pytest.mark.failure(
    "Command line",
    "`farandole numerics --against` names a file of another version, or another file",
    seen="one line with the file and the remedy",
    outcome="exit code 2",
)
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "none.json"),
        ("", r"none\.json"),
        ("{}", r"none\.json"),
        ("\0", r"none\.json"),
        ('{"version": 1, "bits": "same", "facts": {"a": 1}}', r"none\.json"),
        ('{"version": 2, "facts": [1]}', rf"\b2\b.*\b{VERSION}\b"),
    ],
)
def test_what_can_not_be_compared(farandole: Call, tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "none.json").write_text(content)
    found = farandole("--against", "none.json")
    assert isinstance(found.exception, UsageError)
    assert re.search(says, str(found.exception))


def test_what_can_not_be_written_or_computed(farandole: Call) -> None:
    for arguments, says in (
        (("--json", "no/where"), "--json no/where"),
        (("--threads", "0"), "--threads 0"),
        (("--bits", "any"), "--bits any"),
    ):
        assert says in str(farandole(*arguments).exception)


def test_a_live_run_is_asked(farandole: Call, tmp_path: Path) -> None:
    async def scenario(scene: Stage) -> None:
        scene.ticket.save(tmp_path / "t")
        nobody = await asyncio.to_thread(farandole, "--against", "t")
        assert isinstance(nobody.exception, UsageError)
        assert "run r" in str(nobody.exception)
        scene.server.coordinator.signature = Signature(
            facts=((TORCH, "none"), (EXP, "0"), ("weight", "(2, 3) float32"))
        )
        found = await asyncio.to_thread(scene.api.numerics)
        assert (found.run, found.bits, found.version) == ("r", "any", VERSION)
        assert found.facts == {TORCH: "none", EXP: "0"}
        compared = await asyncio.to_thread(farandole, "--against", "t")
        assert compared.exit_code == 1
        assert "run r" in compared.output
        assert "--bits any" in compared.output

    play(tmp_path, scenario, bits="any")


def test_another_version_that_computes_the_same() -> None:
    found = numeric_differences({TORCH: "1", EXP: "a"}.items(), {TORCH: "2", EXP: "a"}.items())
    assert not found.bits
    said = verdict(found, "run r", "same")
    assert "run r" in said
    assert "--bits same" in said
    assert "--bits any" not in said
    assert re.search(r"torch version\b.*\b1\b.*\b2\b", said)


def test_the_file_is_for_people_too(tmp_path: Path) -> None:
    write(tmp_path / "f", {EXP: "a"}, "same")
    assert json.loads((tmp_path / "f").read_text())["facts"] == {EXP: "a"}
    assert "\n" in (tmp_path / "f").read_text().strip()
