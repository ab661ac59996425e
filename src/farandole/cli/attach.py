"""`farandole attach`, which shows a live run as `farandole run` does, and `farandole run --detach`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer

from farandole.cli.folders import RunOption, live, new_folder
from farandole.control.run_folder import OUTPUT, RECORD, is_locked
from farandole.control.ticket import load
from farandole.errors import CoordinatorUnreachable, FarandoleError
from farandole.platform.output import tell

BEGIN_S, POLL_S = 60.0, 0.05


def attach(run: RunOption = None) -> None:
    """Show a live run until it ends. Ctrl-C ends only the display."""
    from farandole.observe.live import open_display

    watched = live(run)
    with watched as api:
        status = api.status()
    display = open_display(sys.stdout)
    display.from_now(status)
    with display:
        code = asyncio.run(_watch(watched.folder, display))
    if code is None:
        tell(f"the run continues; `farandole stop --run {watched.folder}` ends it")
    else:
        raise typer.Exit(code)


async def _watch(folder: Path, display: object) -> int | None:
    """Returns the run's exit code, or None if Ctrl-C came before its end."""
    from farandole.observe.live import Display, Written, keep_figures, show_lines, show_output, sum_up
    from farandole.observe.report import checkpoints_in, prices_in, settings_of
    from farandole.platform.files import opener
    from farandole.protocol.events import OverEvent
    from farandole.protocol.metrics import Line

    assert isinstance(display, Display)
    ends, ended = list[OverEvent](), asyncio.Event()
    settings = settings_of(folder)
    written = Written(folder, prices_in(settings), checkpoints_in(folder, settings))

    def on_line(line: Line) -> None:
        if isinstance(line, OverEvent):
            ends.append(line)

    ticket = load(str(folder / "ticket"), opener)
    relaying = asyncio.create_task(show_output(folder, display, ended))
    watching = asyncio.create_task(show_lines(ticket, display, on_line, lambda: is_locked(folder)))
    summing = asyncio.create_task(keep_figures(written, display))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, watching.cancel)
    await asyncio.wait({watching})
    ended.set()
    await relaying
    summing.cancel()
    await asyncio.wait({summing})
    killed = not watching.cancelled() and watching.exception() is not None
    if ends or killed:
        await sum_up(written, display, ends[0] if ends else None)
    code = ends[0].code if ends else written.course.past.code  # the run may end before the coordinator was reached
    if killed and code is None:
        raise CoordinatorUnreachable(
            f"the run in {folder} was killed: no `farandole run` holds its folder, and no coordinator answers; workers "
            f"of other hosts continue for a while; `farandole run --folder {folder}` takes them over, or resumes from "
            f"the newest checkpoint"
        ) from watching.exception()
    return code if ends or killed else None


def detach(words: list[str], folder: Path | None, script: str, *, is_word: bool) -> None:
    """Starts `farandole WORDS` again, detached from this terminal. Returns once the run has begun.

    `is_word`: --detach is one of the words; otherwise it is in the file of --config.

    Raises:
        FarandoleError: the run ended before that; the error holds its last line of output.
        CoordinatorUnreachable: the run has not begun within `BEGIN_S`.
    """
    from farandole.platform.files import FOLDER_MODE, append

    place = ["--folder", str(folder := new_folder(script))] if folder is None else []
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    at = words.index("--detach" if is_word else "run")
    words = [*words[:at], *([] if is_word else ["run"]), "--no-detach", *place, *words[at + 1 :]]
    before = (folder / RECORD).stat().st_mtime_ns if (folder / RECORD).exists() else 0
    with append(folder / OUTPUT) as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "farandole", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    until = time.monotonic() + BEGIN_S
    while time.monotonic() < until and process.poll() is None:
        if (folder / RECORD).exists() and (folder / RECORD).stat().st_mtime_ns > before and is_locked(folder):
            tell(f"run folder: {folder}")
            tell(f"it runs in the background; `farandole attach --run {folder}` shows it, `farandole stop` ends it")
            return
        time.sleep(POLL_S)
    last_line = (folder / OUTPUT).read_text(errors="replace").strip().rpartition("\n")[2]
    if process.poll() is None:
        raise CoordinatorUnreachable(f"the run has not begun within {BEGIN_S:g} s; see {folder / OUTPUT}")
    raise FarandoleError(
        f"the run has ended with code {process.returncode}: {last_line.removeprefix('farandole: error: ')}"
    )
