"""What TensorBoard's own server shows of a run that was resumed, by each of the two readers that it has."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")

from farandole.observe.export_common import Cursor
from farandole.observe.tensorboard import TensorBoard
from farandole.protocol import events
from farandole.protocol.metrics import LogLine, as_written
from tests.support.metric_lines import an, step_line

pytestmark = [pytest.mark.world, pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Ten steps, and from the sixth on again, by another process."""
    metrics = tmp_path / "metrics.jsonl"
    first = [step_line(number, loss=1.0, time=100.0 + number) for number in range(10)]
    second = [step_line(number, loss=2.0, time=200.0 + number) for number in range(6, 12)]
    note = LogLine(step=11, fields={"note": "<script>alert(1)</script>"})
    for lines in (first, [an(events.ResumedEvent, step=6), *second, note]):
        with metrics.open("ab") as file:
            file.writelines(map(as_written, lines))
        export = TensorBoard(tmp_path / "board", metrics)
        for at, line in Cursor(metrics, export.begin()).read():
            export.take(line, at)
        export.close()
    return tmp_path / "board"


@pytest.fixture(params=["true", "false"], ids=["Rust", "Python"])
def server(request: pytest.FixtureRequest, board: Path, tmp_path: Path) -> Iterator[str]:
    """Its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(board), "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--load_fast={request.param}"], stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def ask(server: str, path: str, tag: str) -> list[Any]:
    """Once it has read the files."""
    deadline = time.monotonic() + 90
    while True:
        try:
            url = f"{server}/data/plugin/{path}?{urllib.parse.urlencode({'run': '.', 'tag': tag})}"
            if found := json.load(urllib.request.urlopen(url, timeout=10)):
                return found
        except (OSError, ValueError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_each_step_is_shown_once_and_text_is_text(server: str) -> None:
    expected = [[number, 1.0] for number in range(6)] + [[number, 2.0] for number in range(6, 12)]
    shown: list[Any] = []
    while len(shown) < len(expected):  # it reads file by file
        shown = [each[1:] for each in ask(server, "scalars/scalars", "step/loss")]
    assert shown == expected
    [note] = ask(server, "text/text", "note")
    assert note["step"] == 11
    assert "&lt;script&gt;" in note["text"]
    assert "<script" not in note["text"]
