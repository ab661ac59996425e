"""The help of every command: each default is shown, and a shell can complete names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from farandole.cli.commands import app, command

COMPLETE = "import sys; from farandole.cli import main; sys.argv[0] = 'farandole'; main()"


def commands(found: Any = command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, found
    for name, inner in getattr(found, "commands", {}).items():
        yield from commands(inner, (*words, name))


def shown(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The help as one line, without the frames."""
    with pytest.raises(SystemExit):
        get_command(app)([*words, "--help"], prog_name="farandole")
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize("words", [words for words, _ in commands()], ids=" ".join)
def test_every_default_is_shown(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    [found] = [each for path, each in commands() if path == words]
    text = shown(words, capsys)
    assert "[" not in (found.help or "")
    for option in found.params:
        if getattr(option, "hidden", False):
            continue
        help_text = getattr(option, "help", None) or ""
        assert "[" not in help_text, f"{option.name}: rich takes it for markup"
        if isinstance(option.show_default, str):
            assert f"[default: ({option.show_default})]" in text
        elif isinstance(option.default, (int, float, str)) and not isinstance(option.default, bool) and option.default:
            assert f"[default: {option.default}]" in text or option.show_default is False


def test_a_shell_completes_commands_and_options() -> None:
    for words, expected in (("farandole sta", "status"), ("farandole run --check", "--checkpoint-every")):
        environ = {
            **os.environ, "_FARANDOLE_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", COMPLETE], env=environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert expected in done.stdout.split(), done.stderr


def test_each_command_has_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        get_command(app)(["--help"], prog_name="farandole")
    groups: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if title := re.match("╭─ (.*?) ─", line):
            groups[title[1]] = []
        elif line.startswith("│"):
            groups[[*groups][-1]].append(line.strip("│ "))
    del groups["Options"]
    shown_names = [line.split()[0] for lines in groups.values() for line in lines]
    assert sorted(shown_names) == sorted(name for name, each in command.commands.items() if not each.hidden)
    assert "Commands" not in groups, "the group of what has none"
