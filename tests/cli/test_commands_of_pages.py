"""Each command of farandole that a page shows is one that the command line accepts, with the options of its pools."""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import check as docs_check
from farandole.cli.commands import app
from farandole.errors import UsageError
from farandole.pool.spec import pools
from tests.support.every import every
from tests.support.pages import BLOCK, PAGES, ROOT, blocks, commands

COMMANDS: Any = typer.main.get_command(app)
SPAN = r"`farandole ([a-z]+ [^`]*)`"


def mentioned(page: str) -> Iterator[list[str]]:
    """The words of each command in the page's sentences, which may lack an argument."""
    for span in re.findall(SPAN, BLOCK.sub("", page)):
        with contextlib.suppress(ValueError):  # an apostrophe
            yield shlex.split(span)


def check(words: list[str], *, is_whole: bool = True, config: str = "") -> None:
    """Parse one. Raises an error that names the word that is not accepted. `config`: what the file of --config has."""
    if config and "--config" in words:
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(config)
            file.flush()
            at = words.index("--config") + 1
            check([*words[:at], file.name, *words[at + 1 :]], is_whole=is_whole)
        return
    command = COMMANDS.get_command(None, words[0])
    if command is None:
        raise UsageError(f"no command {words[0]}")
    try:
        context = command.make_context(words[0], words[1:])
    except Exception as error:
        if is_whole or type(error).__name__ == "NoSuchOption":
            raise
        return
    if words[0] == "run":
        pools([text for text in context.params["pool"] or () if not str(text).endswith(".toml")])


@every(PAGES)
def test_the_commands_of_a_page_are_accepted(page: Path) -> None:
    text = page.read_text()
    config = next((block for block in blocks(text, "toml") if "script = " in block), "")
    for words, is_whole in [(words, True) for words in commands(text)] + [(words, False) for words in mentioned(text)]:
        try:
            check(words, is_whole=is_whole, config=config)
        except Exception as error:
            raise AssertionError(f"farandole {shlex.join(words)}: {error}") from error


def test_there_are_commands() -> None:
    pages = {page.name for page in PAGES if any(commands(page.read_text()))}
    assert pages >= {"README.md", "running.md", "slurm.md", "ray.md", "kubernetes.md", "ssh.md", "ec2.md"}


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("wrokers", "run --wrokers 2 train.py"),
        ("rnu", "rnu train.py"),
        ("script", "run --workers 2"),
        ("partitoin", "run --pool slurm,partitoin=low train.py"),
    ],
)
def test_a_wrong_one_is_found(wrong: str, line: str) -> None:
    [words] = commands(f"```\nfarandole {line}\n```")
    with pytest.raises(Exception, match=wrong):
        check(words)


def test_a_wrong_key_of_the_file_is_found() -> None:
    check(["run", "--config", "run.toml", "--workers", "2"], config='script = "train.py"')
    for config in ('script = "train.py"\nwrokers = 2', 'script = "train.py"\n[[pool]]\nkind = "shs"', "workers = 2"):
        with pytest.raises(Exception, match=r"wrokers|shs|script"):
            check(["run", "--config", "run.toml", "--workers", "2"], config=config)


def test_a_wrong_option_in_a_sentence_is_found_and_a_missing_argument_is_none() -> None:
    whole, wrong = mentioned("`farandole stop --run` ends it, and so does `farandole stop --fodler runs/mine`")
    check(whole, is_whole=False)
    with pytest.raises(Exception, match="fodler"):
        check(wrong, is_whole=False)


# --- docs/check.py ----------------------------------------------------------------------------------------------------

LINES = docs_check.page_commands()


def test_a_command_that_the_check_of_the_pages_does_not_run_has_a_test_that_is_there() -> None:
    left_out = {line: docs_check.of(line, docs_check.TESTED_BY) for line in LINES}
    left_out = {line: tests for line, tests in left_out.items() if tests}
    assert len(left_out) <= 10, "new ones can be run by docs/check.py"
    for line, tests in left_out.items():
        [test] = tests
        text = (ROOT / test).read_text()
        assert "def test_" in text
        [options] = [re.findall(p, line) for p, name in docs_check.TESTED_BY.items() if name == test]
        page = ROOT / "docs" / f"{Path(test).parent.name}.md"
        assert f'"{page.name}"' in text if page.exists() else options[0] in text, line


@every(
    [
        *docs_check.TESTED_BY,
        *docs_check.NEEDS,
        *docs_check.SMALLER,
        *docs_check.BEFORE,
        *docs_check.ENVIRON_OF,
        *docs_check.MEANWHILE,
    ]
)
def test_each_rule_of_the_check_is_of_some_command(pattern: str) -> None:
    assert [line for line in LINES if re.search(pattern, line) or docs_check.of(line, {pattern: None})]


def test_what_the_check_runs_names_no_path_and_no_address_of_another_machine() -> None:
    for line in LINES:
        if not docs_check.of(line, docs_check.TESTED_BY):
            words = shlex.split(docs_check.smaller(line, Path("/here"), {}))
            assert not [word for word in words if re.match(r"~|/(?!here/)|10\.", word)], line


def test_a_command_is_run_if_no_test_does_it_and_this_machine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(docs_check.NEEDS, "^hosts", (False, "no sshd"))
    assert docs_check.reason("hosts check hosts.txt") == "no sshd"
    assert "tests/pool/slurm/test_page.py" in docs_check.reason("run --pool slurm,size=8 train.py")
    assert docs_check.reason("run --pool local train.py") == ""
