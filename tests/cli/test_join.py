"""`farandole join` without a script: should it begin anew, in the folder of the run's code, it is the same command."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer

from farandole.cli.worker import from_anywhere, join

ELSEWHERE = {"die_with", "verbose"}  # tied to the first process; kept in the environment


def options() -> list[str]:
    """All that the command has, but those."""
    kinds = get_type_hints(join, include_extras=True)
    names = [name for name in inspect.signature(join).parameters if name not in ELSEWHERE]
    return [name for name in names if any(isinstance(each, typer.models.OptionInfo) for each in get_args(kinds[name]))]


def test_it_begins_anew_with_all_of_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "bin/farandole", "join", "ticket"])
    monkeypatch.chdir(tmp_path)
    given = {name: f"the {name}" for name in options()}
    assert from_anywhere("run/ticket", **given) == str(tmp_path / "run" / "ticket")
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    assert sys.orig_argv[1:] == ["-m", "farandole", "join", *words, str(tmp_path / "run" / "ticket")]
    assert from_anywhere("-", **dict.fromkeys(given, "")) == "-"
    assert sys.orig_argv[1:] == ["-m", "farandole", "join", "-"]
    assert os.path.isabs(sys.orig_argv[0])
