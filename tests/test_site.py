"""The site of `make docs`: it builds without a warning, loads nothing from other hosts, and has what the code has."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import pages, reference, stand_ins
from tests.support.every import every
from tests.support.metric_lines import KINDS
from tests.support.pages import PAGES, ROOT, blocks

SOURCE = ROOT / "src" / "farandole"
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:[^\"\s>]+)")


@pytest.mark.processes
def test_it_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    built = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert built.keys() >= {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert not {place: found for place, text in built.items() if (found := LOADED.findall(text))}
    assert 'id="farandole.Run.steps"' in built["reference/api.html"]
    assert 'id="farandole-run"' in built["reference/commands.html"]


def test_what_a_page_loads_from_another_host_is_seen() -> None:
    assert LOADED.findall('<script async src="https://unpkg.com/x.js">') == ["https://unpkg.com/x.js"]
    assert not LOADED.findall('<a href="https://pytorch.org">torch</a><script src="assets/x.js">')


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("README.md", "docs/performance.md#on-a-gpu", "performance.md#on-a-gpu"),
        ("docs/running.md", "../README.md", "index.md"),
        ("docs/running.md", "../examples/port.md", "examples/port.md"),
        ("examples/port.md", "../docs/data.md", "../data.md"),
        ("docs/running.md", "data.md", "data.md"),
        ("docs/running.md", "#checkpoints", "#checkpoints"),
        ("docs/running.md", "gone.md", "gone.md"),
        ("docs/running.md", "https://pytorch.org/README.md", "https://pytorch.org/README.md"),
    ],
)
def test_links_of_the_repository_lead_to_the_same_file_in_the_site(page: str, link: str, moved: str) -> None:
    assert pages.moved(f"see [it]({link}).", page) == f"see [it]({moved})."


# --- API and command line ---------------------------------------------------------------------------------------------


def test_the_api_page_has_every_public_name() -> None:
    assert not reference.undocumented()


def test_methods_that_the_api_page_leaves_out_exist() -> None:
    run = next(
        node
        for node in ast.parse((SOURCE / "run.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Run"
    )
    methods = {node.name for node in run.body if isinstance(node, ast.FunctionDef)}
    assert methods >= {*reference.INTERNAL["Run"]}


def test_the_page_of_commands_has_each_option_with_its_default() -> None:
    page = reference.command_line()
    assert "## farandole run\n" in page
    assert "### farandole data prepare\n" in page
    assert "farandole agent" not in page  # hidden
    [row] = [line for line in page.splitlines() if line.startswith("| `--min <int>`")]
    assert "[default: 1]" in row


# --- events -----------------------------------------------------------------------------------------------------------


def test_each_event_has_a_meaning_and_all_its_fields() -> None:
    lines = reference.event_table().splitlines()
    rows = {line.split("`")[1]: line.split(" | ") for line in lines if line.startswith("| `")}
    assert rows.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert rows[name][1].strip(), f"{kind.__name__} needs a docstring"
        fields = [field for field in kind.__struct_fields__ if field != "time"]
        assert re.findall(r"`(\w+)`", rows[name][-1]) == fields


# --- failures ---------------------------------------------------------------------------------------------------------

MARKED = """
@pytest.mark.failure("Disks", "the disk is full", seen="NOT RECORDED", outcome="training continues")
def test_a() -> None: ...
@pytest.mark.long
@pytest.mark.failure("Disks", "the disk is full")
def test_b() -> None: ...
"""


def rows(folder: Path, source: str) -> list[reference.Failure]:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test_disks.py").write_text(source)
    return reference.failures(tests)


def test_tests_with_the_same_failure_are_one_row(tmp_path: Path) -> None:
    [row] = rows(tmp_path, MARKED)
    assert row == reference.Failure(
        section="Disks", failure="the disk is full", seen="NOT RECORDED", outcome="training continues",
        tests=["tests/test_disks.py::test_a", "tests/test_disks.py::test_b"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        MARKED.replace(', seen="NOT RECORDED", outcome="training continues"', ""),
        MARKED.replace('seen="NOT RECORDED", ', ""),
        MARKED.replace('full")', 'full", seen="x", outcome="y")'),
    ],
    ids=["nothing is seen", "nothing is seen but an outcome", "two say what is seen"],
)
def test_a_failure_that_no_marker_or_two_describe_is_an_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match="the disk is full"):
        rows(tmp_path, source)


def test_the_table_has_the_failures_of_the_tests() -> None:
    found = reference.failures()
    assert {row.section for row in found} == {*reference.SECTIONS}
    page = reference.failure_table()
    assert all(test in page for row in found for test in row.tests)


# --- programs of the pages --------------------------------------------------------------------------------------------


@every(PAGES)
def test_the_programs_of_a_page_compile(page: Path) -> None:
    for number, program in enumerate(blocks(page.read_text(), "python")):
        compile(program, f"{page.name}, Python block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_script_of_the_commands_compiles(tmp_path: Path) -> None:
    compile(stand_ins.training_script(tmp_path), "train.py", "exec")


# --- troubleshooting --------------------------------------------------------------------------------------------------

CAPITALS = re.compile(r"\b[A-Z][A-Z']+(?: [A-Z][A-Z']+)+\b")
COMPOSED = {"IS NAN", "RESULTS NOT REPRODUCIBLE AFTER STEP"}  # the sources have them in parts


def unknown_messages(page: str) -> list[str]:
    """Words in capitals, two or more in a row, that the page quotes and that no source has."""
    sources = " ".join(path.read_text() for path in SOURCE.rglob("*.py"))
    quoted = [words for span in re.findall(r"`([^`\n]+)`", page) for words in CAPITALS.findall(span)]
    return [words for words in quoted if words not in sources and words not in COMPOSED]


def test_events_that_the_pages_quote_are_those_of_the_code() -> None:
    assert not unknown_messages(reference.failure_table())
    assert not unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text())
    assert unknown_messages("`w1 HAS NO DATA AT ALL`, `THE REPLICAS DIFFER`, `IT` and A SENTENCE") == [
        "HAS NO DATA AT ALL"
    ]
