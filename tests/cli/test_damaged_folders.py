"""Whatever has become of a file of a run's folder, each verb that reads it says so in words: nothing is a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farandole.cli.commands import command
from farandole.cli.resume import GivenOptions, settle
from farandole.cli.takeover import find_takeover
from farandole.control.run_folder import JOURNAL, METRICS, RECORD, SETTINGS, TICKET, TICKETS
from farandole.control.ticket import Ticket
from farandole.errors import FarandoleError
from farandole.observe.report import run_content
from farandole.platform import files
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import RunTerms
from farandole.protocol.metrics import as_written
from tests.support.metric_lines import an, step_line

RUN = RunSettings(run="r", command=("train.py",), directory="/", code=(("script train.py", "0" * 64),))
VERBS = (
    "status --run r", "status --json --run r", "report r", "account --run r", "account --json --workers --run r",
    "top --run r", "attach --run r", "scale 2 --run r", "release w1 --run r", "stop --run r", "trace --run r",
    "ticket list --run r", "ticket new --run r", "runs list", "runs prune --keep 5",
    "top --ticket r/ticket",
)  # fmt: skip
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half of it": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "binary": lambda _: b"\x00\xff\xfe" * 200,
    "a list": lambda _: b"[]\n",
    "another object": lambda _: b'{"a": 1}\n',
    "a number beyond all": lambda _: b"1e999\n",
    "nested": lambda _: b"[" * 100_000,
    "no UTF-8 in a text": lambda _: b'{"run": "\xed\xa0\x80"}\n',
}


def contents() -> dict[str, bytes]:
    lines = [an(events.ViewEvent), step_line(3), an(events.OverEvent)]
    return {
        SETTINGS: msgspec.json.encode(RUN),
        METRICS: b"".join(map(as_written, lines)),
        TICKET: msgspec.json.encode(Ticket(run="r", address="http://127.0.0.1:1", secret="0" * 64)),
        RECORD: b'{"pid": 1}\n',
        TICKETS: b"[]\n",
        JOURNAL: b"",
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit(7)\n")
    files.make(tmp_path / "r")
    for name, content in contents().items():
        files.write(tmp_path / "r" / name, content)
    return tmp_path / "r"


def ask_all() -> None:
    for verb in VERBS:
        try:
            command(verb.split(), prog_name="farandole")
        except (FarandoleError, SystemExit):
            pass
        except BaseException as error:
            raise AssertionError(verb) from error
    find_takeover(Path("r"), ("train.py",))
    with contextlib.suppress(FarandoleError):
        settle(GivenOptions(), RunTerms(), Path("r"))


@pytest.mark.failure(
    "Command line",
    (
        "a file of the run's folder is damaged, missing or a folder: `settings.json`, `metrics.jsonl`, the ticket, "
        "the journal"
    ),
    seen="one line with the file, from each command that needs it",
    outcome="`report`, `account` and `dashboard` show the rest; nothing is changed",
)
@pytest.mark.parametrize("name", contents())
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_in_words(folder: Path, name: str, damage: str) -> None:
    files.write(folder / name, DAMAGES[damage](contents()[name]))
    ask_all()


@pytest.mark.failure(
    "Command line",
    (
        "a file of the run's folder is damaged, missing or a folder: `settings.json`, `metrics.jsonl`, the ticket, "
        "the journal"
    ),
)
@pytest.mark.parametrize("name", contents())
def test_a_folder_in_a_files_place_and_none_at_all(folder: Path, name: str) -> None:
    (folder / name).unlink()
    ask_all()
    if not (folder / name).exists():
        files.make(folder / name)
    ask_all()


@pytest.mark.failure(
    "Command line",
    (
        "a file of the run's folder is damaged, missing or a folder: `settings.json`, `metrics.jsonl`, the ticket, "
        "the journal"
    ),
)
@pytest.mark.parametrize("value", [3, "x", [3], {"a": 3}, None], ids=repr)
def test_a_setting_of_another_type_is_left_out(folder: Path, value: Any) -> None:
    for field in RunSettings.__struct_fields__:
        files.write(folder / SETTINGS, msgspec.json.encode({**msgspec.to_builtins(RUN), field: value}))
        assert "told by" in dict(run_content(folder, 9.0, None, live=False).about), field
