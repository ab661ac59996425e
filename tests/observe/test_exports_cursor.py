"""The lines of metrics.jsonl from a place on: each once, whole, whatever the file holds and whatever becomes of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole.errors import NotPrivate
from farandole.observe.export_common import READ_BYTES, Cursor, Mark, before, identity, load
from farandole.protocol import events
from farandole.protocol.metrics import Line, LogLine, as_written
from tests.support.metric_lines import an, step_line

LINES: list[Line] = [an(events.ViewEvent), step_line(0), LogLine(step=0, fields={"accuracy": 0.5}), step_line(1)]


def write(path: Path, *lines: Line) -> None:
    with path.open("ab") as file:
        file.writelines(map(as_written, lines))


def test_each_line_comes_once_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cursor = Cursor(path)
    assert cursor.read() == []
    write(path, *LINES[:2])
    first = cursor.read()
    write(path, *LINES[2:])
    second = cursor.read()
    assert [line for _, line in first + second] == LINES
    assert cursor.read() == []
    content = path.read_bytes()
    for at, line in first + second:
        assert content[at:].startswith(as_written(line))
        assert Cursor(path, at).read()[0] == (at, line), "who begins there gets it"


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = as_written(LINES[1])
    path.write_bytes(whole[:20])
    cursor = Cursor(path)
    assert cursor.read() == []
    path.write_bytes(whole)
    assert cursor.read() == [(0, LINES[1])]
    path.write_bytes(whole + b'{"step": 7, "ep')
    assert cursor.read() == []
    path.write_bytes(whole)  # as the next coordinator leaves it
    write(path, LINES[3])
    assert cursor.read() == [(len(whole), LINES[3])]
    assert not cursor.damaged


@pytest.mark.parametrize(
    "damage",
    [b"\n", b"rubbish\n", b"\xff\x00\n", b'{"step": 3}\n', b"x\r" + as_written(LINES[1]), b"\x00" * 5000 + b"\n"],
)
def test_what_is_no_line_is_passed_over_and_counted(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(as_written(LINES[0]) + damage + as_written(LINES[3]))
    cursor = Cursor(path)
    assert [line for _, line in cursor.read()] == [LINES[0], LINES[3]]
    assert cursor.damaged == 1


def test_bytes_without_a_lines_end_hold_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * (2 * READ_BYTES) + b"\n" + as_written(LINES[3]))
    cursor = Cursor(path)
    found = [line for _ in range(4) for _, line in cursor.read()]
    assert found == [LINES[3]]
    assert cursor.damaged


def test_more_than_is_read_at_a_time_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    many = [step_line(number) for number in range(3000)]
    write(path, *many)
    assert path.stat().st_size > READ_BYTES
    cursor = Cursor(path)
    pieces: list[list[Line]] = []
    while piece := cursor.read():
        pieces.append([line for _, line in piece])
    assert len(pieces) > 1
    assert [line for piece in pieces for line in piece] == many


def test_a_file_that_is_shorter_than_what_was_read_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *LINES)
    cursor = Cursor(path)
    cursor.read()
    path.write_bytes(as_written(LINES[0]))
    assert cursor.read() == []
    assert cursor.damaged == 1
    write(path, LINES[3])
    assert [line for _, line in cursor.read()] == [LINES[3]]


def test_what_was_before_is_there_for_who_begins_late(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *LINES)
    assert before(path, path.stat().st_size) == LINES
    assert before(path, len(as_written(LINES[0]))) == LINES[:1]
    assert before(path, 0) == []


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "others", *LINES)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "others")
    with pytest.raises(NotPrivate):
        Cursor(tmp_path / "metrics.jsonl").read()


def test_a_mark_is_of_one_file_and_whole(tmp_path: Path) -> None:
    metrics, place = tmp_path / "metrics.jsonl", tmp_path / "farandole.json"
    assert load(place, metrics) == Mark(run=tmp_path.name)
    write(metrics, *LINES)
    mark = Mark(at=40, step=3, file=identity(metrics), run=tmp_path.name, id="x")
    mark.save(place)
    assert load(place, metrics) == mark
    nothing = Mark(file=identity(metrics), run=tmp_path.name)
    for content in (b"", b"{", b'{"at": -1}', b'{"at": 1, "more": 2}', b"\xff" * 100, b"[" * 100_000):
        place.write_bytes(content)
        assert load(place, metrics) == nothing, content[:20]
    Mark(at=10_000, step=3, file=identity(metrics)).save(place)
    assert load(place, metrics) == nothing, "beyond the file's end"
    mark.save(place)
    os.rename(metrics, tmp_path / "old")
    write(metrics, *LINES)
    assert load(place, metrics).at == 0, "another file"
