"""Printing never fails: what can't be written is lost, counted and told, and the program goes on to its own end."""

from __future__ import annotations

import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.platform.output import RawStream

TALK = (
    "import sys; from farandole.platform.output import guard; guard()\n"
    "for number in range(300): print(number, '.' * 1000)\n"
    "print('oops \\ud800', file=sys.stderr); sys.stdout.buffer.write(b'raw'); open('done', 'w').write('all')\n"
    "sys.exit(7)"
)


@pytest.mark.failure(
    "Files, disks and output",
    "a script prints to a full disk, or closes its standard output",
    seen="once there is room again, a line with the number of lost bytes",
    outcome="it continues to train; exit code 0",
)
def test_what_is_lost_is_counted_and_told_when_there_is_room_again(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    kept = os.dup(descriptor)
    try:
        stream = io.TextIOWrapper(RawStream(descriptor), encoding="utf-8", write_through=True)
        print("first", file=stream)
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), descriptor)
        print("lost", file=stream)
        print("lost", file=stream)
        os.dup2(kept, descriptor)
        print("last", file=stream)
        print("very last", file=stream)
    finally:
        os.close(kept)
    first, told, *rest = (tmp_path / "log").read_text().splitlines()
    assert (first, rest) == ("first", ["last", "very last"])
    assert re.match(rf"farandole: .*\b10 bytes\b.*{os.strerror(errno.ENOSPC)}", told)


def test_a_line_of_which_only_the_beginning_could_be_written_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [3]
    write = os.write

    def scarce(descriptor: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", scarce)
    with (tmp_path / "log").open("wb") as file:
        sink = RawStream(file.fileno())
        assert sink.write(b"hello\n") == 6, "it counts as done"
        room[0] = 1000
        sink.write(b"there\n")
    assert (tmp_path / "log").read_bytes() == (
        b"hel\nfarandole: 3 bytes of output are lost here (No space left on device)\nthere\n"
    )


@pytest.mark.failure(
    "Files, disks and output", "the output of `farandole run` can't be written: `>&-`, a closed pipe, a full disk"
)
@pytest.mark.processes
@pytest.mark.parametrize("unbuffered", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("where", [">&- 2>&-", "> /dev/full 2>&1", "| true", "<&- >&- 2>&-"])
def test_a_program_runs_to_its_end_whatever_becomes_of_its_output(
    tmp_path: Path, where: str, unbuffered: tuple[str, ...]
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    words = " ".join((sys.executable, *unbuffered, "talk.py"))
    command = f"({words} ; echo $? > code) {where}" if where == "| true" else f"{words} {where}; echo $? > code"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "done").read_text() == "all", "and no file has got what was printed"
    assert (tmp_path / "code").read_text() == "7\n"
