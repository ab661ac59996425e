"""Each command of farandole that a page shows is one that the command line accepts, with the options of its pools."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from farandole.cli import app
from farandole.pool.spec import pools
from tests.support.every import every

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
COMMANDS: Any = typer.main.get_command(app)


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command in the page's blocks, without `farandole` itself."""
    for block in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.search(r"(?:^|\s)farandole ([a-z].*)", line):
                words = shlex.split(command[1], comments=True)
                yield [word for word in words if word not in ("&", "\\")]


def check(words: list[str]) -> None:
    """Parse one. Raises click.UsageError or UsageError: it is not accepted."""
    command = COMMANDS.get_command(None, words[0])
    if command is None:
        raise click.UsageError(f"no command {words[0]}")
    context = command.make_context(words[0], words[1:])
    files = [text for text in context.params.get("pool") or () if text.endswith(".toml")]
    pools([text for text in context.params.get("pool") or () if text not in files])


@every(PAGES)
def test_the_commands_of_a_page_are_accepted(page: Path) -> None:
    for words in commands(page.read_text()):
        try:
            check(words)
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
        ("partitoin", "run --pool slurm,partitoin=low train.py"),
    ],
)
def test_a_wrong_one_is_found(wrong: str, line: str) -> None:
    [words] = commands(f"```\nfarandole {line}\n```")
    with pytest.raises(Exception, match=wrong):
        check(words)
