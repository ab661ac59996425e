"""farandole's log: who may set it up, what a line looks like, and that making or writing one changes nothing."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from farandole.platform import output

LOG = logging.getLogger("farandole.worker.groups")


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("not to be said")


@pytest.mark.parametrize(
    ("verbosity", "lines"),
    [
        (0, ["farandole: lost"]),
        (1, ["12:30:00.250 w2 INFO farandole.worker.groups: view 3", "WARNING farandole.worker.groups: lost"]),
        (2, ["DEBUG farandole.worker.groups: round 7", "INFO farandole.worker.groups: view 3", "WARNING"]),
        (9, ["DEBUG farandole.worker.groups: round 7", "INFO farandole.worker.groups: view 3", "WARNING"]),
    ],
)
def test_how_much_is_shown(
    verbosity: int, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Formatter, "formatTime", lambda *_: "12:30:00")
    monkeypatch.setattr("time.time_ns", lambda: 1_000_250_000_000)
    monkeypatch.setattr("time.time", lambda: 1000.25)
    output.show(verbosity)
    output.name("w2")
    LOG.debug("round %d", 7)
    LOG.info("view %d", 3)
    LOG.warning("lost")
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(lines)
    assert all(line in found and found.startswith("farandole: ") for line, found in zip(lines, shown, strict=True))
    assert all(" w2 " in found for found in shown) == (verbosity > 0)


def test_the_last_call_counts_and_keeps_the_worker(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(2)
    output.name("w7")
    output.show(1)
    LOG.debug("not this")
    LOG.info("this")
    (line,) = capsys.readouterr().err.splitlines()
    assert " w7 INFO " in line


def test_what_others_have_put_into_a_line_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(0)
    LOG.warning("host %s", "\x1b[2J\x1b]0;owned\x07\u202eh1")
    assert capsys.readouterr().err == "farandole: host \ufffdh1\n"


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(28, f"no space left for {text}")


@pytest.mark.parametrize("stream", [None, Broken(), io.StringIO()], ids=["none", "full", "closed"])
def test_what_can_not_be_written_changes_nothing(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None and not isinstance(stream, Broken):
        stream.close()
    output.show(1)
    monkeypatch.setattr(sys, "stderr", stream)
    LOG.warning("lost")


def test_what_can_not_be_made_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.show(0)
    LOG.warning("%d workers", "three")
    LOG.warning("%s", Unprintable())
    LOG.warning("seen")
    assert capsys.readouterr().err == "farandole: seen\n"


PROGRAM = """
import logging, sys
import farandole
from farandole.platform import output
{setup}
output.show_by_default(0)
logging.getLogger("farandole.data.loader").warning("BAD")
logging.getLogger("the.scripts.own").warning("own")
ours, roots = (logging.getLogger(name).handlers for name in ("farandole", None))
print([type(handler).__name__ for handler in ours], len(roots))
"""


@pytest.mark.parametrize(
    ("setup", "said", "state"),
    [
        ("", ["farandole: BAD", "own"], "['NullHandler', 'LineFormatter'] 0"),
        ("logging.basicConfig(format='mine %(message)s')", ["mine BAD", "mine own"], "['NullHandler'] 1"),
        (
            "logging.getLogger('farandole').addHandler(logging.StreamHandler(sys.stderr))",
            ["BAD", "own"],
            "['NullHandler', 'StreamHandler'] 0",
        ),
        ("logging.getLogger('farandole').setLevel(40); logging.basicConfig()", ["WARNING:the.scripts.own:own"], None),
    ],
    ids=["nothing", "root", "farandole", "silenced"],
)
def test_a_script_that_has_set_up_logging_keeps_it(setup: str, said: list[str], state: str | None) -> None:
    """And where it has not, what goes wrong is seen all the same, and the root logger is left as it is."""
    command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == said
    assert state is None or done.stdout.strip() == state


def test_after_import_alone_nothing_is_shown() -> None:
    program = "import logging, farandole; logging.getLogger('farandole.run').warning('BAD')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
