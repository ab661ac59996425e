"""What others print, as plain text; what a name may hold; and that whatever we print has gone through it."""

from __future__ import annotations

import ast
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import farandole
from farandole.cli.options import check_name
from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.errors import UsageError
from farandole.observe.live import LiveDisplay, PlainDisplay, Recent, list_picture, picture
from farandole.observe.past import Past
from farandole.observe.tables import checks_table, past_table, status_table
from farandole.observe.text import describe
from farandole.platform.output import LONGEST_NAME, escaped, is_name, one_line, plain, say, tell
from farandole.pool.machine_check import MachineCheck
from farandole.protocol import events
from farandole.protocol.metrics import LogLine
from farandole.protocol.values import Name
from farandole.settings import Settings
from tests.support.every import every
from tests.support.metric_lines import an, step_line

STEERS = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\u200b[bold]:smile:\u2066\ud800"
UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Cs")

TEXTS = [
    ("loss 0.5\tstep 3", "loss 0.5\tstep 3", "as it is"),
    ("a\nb", "a\nb", "lines stay lines"),
    ("grün 🎉 é", "grün 🎉 é", "letters of all kinds"),
    ("\x1b[1;31mred\x1b[0m", "red", "colours"),
    ("\x1b[2J\x1b[3;4Hover", "over", "the cursor, the screen"),
    ("\x1b[?1049hscreen", "screen", "private modes"),
    ("\x1b]0;owned\x07title", "title", "a title, ended by BEL"),
    ("\x1b]52;c;Zm9v\x1b\\clipboard", "clipboard", "the clipboard, ended by ST"),
    ("\x1b]8;;http://x\nnext", "\nnext", "never ended: to the end of its line"),
    ("\x1bP+q\x1b\\dcs", "dcs", "a device control string"),
    ("\x1bcreset", "reset", "a reset of the terminal"),
    ("\x9b2Jcsi", "csi", "CSI in one character"),
    ("a\x08b\x07c\rd", "a\ufffdb\ufffdc\ufffdd", "single controls are shown to be there"),
    ("\x1b", "\ufffd", "a lone escape"),
    ("a\u202eb\u2066c\u200fd", "a\ufffdb\ufffdc\ufffdd", "marks of direction"),
    ("a\u200bb\ufeffc\u2028d", "a\ufffdb\ufffdc\ufffdd", "of no width, and line ends that are none of ours"),
    ("a\u00a0b", "a\u00a0b", "a space that does not break is one"),
]


@pytest.mark.failure(
    "Files, disks and output",
    "a script prints control sequences (colours, titles, content of others' files)",
    seen="plain text on the terminal and in piped output",
    outcome="a terminal never executes them; the log files have all of it",
)
@pytest.mark.parametrize(("text", "expected", "remark"), TEXTS)
def test_plain(text: str, expected: str, remark: str) -> None:
    assert plain(text) == expected, remark


def test_what_is_not_to_be_seen_is_what_unicode_says() -> None:
    for letter in map(chr, range(0x110000)):
        category = unicodedata.category(letter)
        if category != "Cn":  # this Unicode does not know it: a later one may
            assert is_name(letter) == (category not in UNSEEN), hex(ord(letter))
            assert (one_line(letter) == letter) == is_name(letter), hex(ord(letter))


def test_json_says_the_same_where_it_is_escaped() -> None:
    text = msgspec.json.format(msgspec.json.encode({"x": STEERS[:-1] + "\U000e0001\x7f"}), indent=2).decode()
    assert json.loads(escaped(text)) == json.loads(text)
    assert steers(text)
    assert not steers(escaped(text))


def steers(text: str) -> set[str]:
    return {letter for letter in text if unicodedata.category(letter) in UNSEEN} - {"\n"}


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = [
    ("w1", True), ("host-3.example.org", True), ("grün", True), ("训练 1", True), ("", True),
    ("x" * LONGEST_NAME, True),
    ("x" * (LONGEST_NAME + 1), False), ("w\x1b[2J", False), ("w\n", False), ("w\x9b2J", False), ("w\u202e1", False),
    ("w\u200b1", False), ("w\u2066", False), ("w\u2028", False), ("\ufeffw", False), ("w\u00ad1", False),
]  # fmt: skip


@pytest.mark.failure(
    "External workers, pools and machines",
    "the name of a worker, a pool, a host or a run has invisible characters, or more than 256 characters",
    seen="an error names the variable or the option",
    outcome="nothing is started",
)
@pytest.mark.parametrize(("name", "good"), NAMES)
def test_names(name: str, good: bool) -> None:
    assert is_name(name) == good
    if good:
        assert msgspec.convert(name, Name) == name
        return
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, Name)
    for variable in ("FARANDOLE_WORKER", "FARANDOLE_POOL", "FARANDOLE_HOST", "FARANDOLE_ZONE"):
        with pytest.raises(UsageError, match=rf"{variable}='.*\b{LONGEST_NAME}\b"):
            Settings.read({variable: name})


@pytest.mark.failure(
    "External workers, pools and machines",
    "the name of a worker, a pool, a host or a run has invisible characters, or more than 256 characters",
)
def test_a_run_has_a_name_that_everybody_sees(tmp_path: Path) -> None:
    check_name(tmp_path / "run 3", "train.py")
    check_name(None, "train.py")
    with pytest.raises(UsageError, match=rf"--folder .*\b{LONGEST_NAME}\b"):
        check_name(tmp_path / "run\u202e3", "train.py")
    with pytest.raises(UsageError, match="--folder"):
        check_name(None, "tr\u200bain.py")


# --- what we print ---------------------------------------------------------------------------------------------------


def shown_by(make: Any) -> str:
    stream = io.StringIO()
    with make(stream) as display:
        display.line(an(events.ViewEvent, members=(STEERS,), cause=STEERS))
        display.line(an(events.SharesEvent, shares={STEERS: 100}, reason=STEERS))
        display.line(an(events.FailedEvent, worker=STEERS, traceback=f"Traceback\n{STEERS}"))
        display.line(LogLine(step=3, fields={STEERS: STEERS}))
        display.line(step_line(3, total=7))
        display.output(STEERS, STEERS)
        display.show(STEERS)
    return stream.getvalue()


def test_the_display_is_not_steered() -> None:
    text = shown_by(PlainDisplay)
    assert not steers(text)
    assert text.count("[bold]:smile:") >= 7, "no markup"
    live = shown_by(lambda stream: LiveDisplay(Console(file=stream, force_terminal=True, width=400, color_system=None)))
    assert not {"\x07", "\x9b", "\u202e", "\u200b", "\u2066"} & set(live)
    assert "owned" not in live.replace("\ufffd]0;owned", ""), "no title is set"
    assert "[bold]:smile:" in live


def test_the_tables_are_not_steered() -> None:
    worker = WorkerStatus(id=STEERS, host=STEERS, pid=1, pool=STEERS, rank=0, state="member", speed=0.1, shards=1, of=2)
    status = Status(
        run=STEERS, coordinator=CoordinatorStatus(pid=9, address=STEERS), view=ViewStatus(number=3, size=2), step=5,
        epoch=2, wanted=3, minimum=1, maximum=None, state="ending", reason=STEERS, code=None,
        workers=(worker, msgspec.structs.replace(worker, id="w2", speed=1.0)), samples_per_s=None, loss=0.5, total=None,
    )  # fmt: skip
    past = Past(run=STEERS, reason=STEERS, fingerprint=STEERS, checkpoint=STEERS)
    recent = Recent()
    recent.line(an(events.LostEvent, worker=STEERS, reason=STEERS))
    pictures = (picture(status, recent, STEERS), list_picture(dict.fromkeys((STEERS, "a", "b", "c"), status)))
    checks = checks_table([MachineCheck(name=STEERS, outcome="failed", found=STEERS, remedy=STEERS)] * 2)
    for table in (status_table(status), past_table(past), checks, *pictures):
        stream = io.StringIO()
        Console(file=stream, width=400).print(table)
        assert not steers(stream.getvalue())
        assert stream.getvalue().count("[bold]") >= 4


def test_lines_of_ours_do_not_steer(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"farandole: error: {STEERS}\n  of two lines")
    tell(STEERS)
    told = capsys.readouterr()
    assert not steers(told.err + told.out)
    assert told.err.count("\n") == 2
    assert not steers(describe(an(events.LostEvent, worker=STEERS, reason=STEERS)))


PACKAGE = Path(farandole.__file__).parent
PRINTS = {  # what prints by itself, how often, and why it may; all else is `say` and `tell`, or goes to a logger
    "platform/output.py": 2,  # these two
    "observe/live.py": 1,  # what has been filtered
    "cli/data.py": 1,  # tables of numbers
    "cli/doctor.py": 1,  # a table, which filters
    "bench/table.py": 1,
    "bench/verb.py": 2,  # the same
    "cli/inspect.py": 4,  # tables and pictures, which filter
    "cli/reproduce.py": 1,  # the same
    "cli/folders.py": 1,  # the same
    "cli/hosts.py": 3,  # the same
    "integrations/ray.py": 1,  # the output of `farandole run`, in a program of the user's
    "pool/ray_driver.py": 1,  # an agent's output, to the log that Ray keeps of it
    "checkpoint/save.py": 2,  # a process's answer to the one that started it, and warnings before it
    "checkpoint/reach.py": 1,  # the same
    "script.py": 4,  # the script's own words, as Python itself would print them
    "worker/fork_server.py": 1,  # the same
}
LOUD = {"print", "print_exc", "print_exception", "print_stack", "basicConfig"}
ROOTS = {f"logging.{name}" for name in ("debug", "info", "warning", "error", "exception", "critical", "log")}


@every(sorted(PACKAGE.rglob("*.py")))
def test_people_are_told_through_the_filter_or_a_logger_alone(path: Path) -> None:
    """`print`, that of a console, and what else writes to standard streams: the few there are are known."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [(ast.unparse(call.func), ast.unparse(call)) for call in calls]
    found = [call for name, call in named if name.split(".")[-1] in LOUD]
    found += [call for name, call in named if name in ("sys.stderr.write", "sys.stdout.write") or name in ROOTS]
    found = [call for call in found if not call.endswith("(Text(text), soft_wrap=True)")]
    assert len(found) == PRINTS.get(str(path.relative_to(PACKAGE)), 0), found


@every(sorted(PACKAGE.rglob("*.py")))
def test_loggers_are_named_after_their_modules(path: Path) -> None:
    """So that one name sets them all up, and none is the root."""
    tree = ast.parse(path.read_text())
    names = [
        ast.unparse(node.args[0]) if node.args else "the root"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "getLogger"
    ]
    if path == PACKAGE / "platform" / "output.py":
        assert names == ["'farandole'", "the root"], "who sets it up looks at the root, and leaves it"
        return
    own = ".".join(("farandole", *path.relative_to(PACKAGE).with_suffix("").parts))
    is_program = "__name__ == '__main__'" in ast.unparse(tree)  # its own name is another then
    assert set(names) <= {repr(own) if is_program else "__name__"}
