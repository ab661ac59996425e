"""The hosts file of an SSH pool: what it may say, and edits of it that are mistakes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from farandole.errors import UsageError
from farandole.pool.base import Host
from farandole.pool.ssh import HostLine, HostsFile, changes, parse


def test_what_it_says() -> None:
    text = """
    # a rack
    node1 slots=8
    ann@node2.lab:2222 slots=4 interface=10.0.0.2 python=/opt/bin/python  # by the window
    [fd00::5]:22 zone=east
    localhost slots=2
    localhost:2222
    """
    lines = parse(text)
    assert list(lines) == ["node1", "ann@node2.lab:2222", "[fd00::5]:22", "localhost", "localhost:2222"]
    assert lines["ann@node2.lab:2222"] == HostLine(
        name="ann@node2.lab:2222", address="ann@node2.lab", port=2222, slots=4, interface="10.0.0.2",
        python="/opt/bin/python",
    )  # fmt: skip
    assert lines["node1"].host == Host(name="node1", slots=8)
    assert lines["[fd00::5]:22"].address == "fd00::5"
    assert [line.zone for line in lines.values()] == ["", "", "east", "", ""]
    assert [name for name, line in lines.items() if line.local] == ["localhost"]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("node1 slots=many", r"slots=many\b.*\b1\b.*\b1000\b"),
        ("node1 slots=0", r"\bslots=0\b"),
        ("node1 slots=-1", r"\bslots=-1\b"),
        ("node1 slots=1 slots=2", r"\bslots\b"),
        ("node1 color=red", r"'color=red'.*\bslots=NUMBER"),
        ("node1 zone=", r"'zone='.*\bzone=NAME"),
        (f"node1 zone={'z' * 257}", r"zone='z+'.*\b256\b"),
        ("node1 8", r"'8'.*\bslots=NUMBER"),
        ("node1:99999", r"\b99999\b.*\b65535\b"),
        ("-oProxyCommand=evil", r"-oProxyCommand=evil\b"),
        ("ann@-oProxyCommand=evil", r"\bann@-oProxyCommand=evil\b"),
        ("a@b@c", r"\ba@b@c\b"),
        ("node1:", "node1:"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, values: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(f"good\n{line}\n", "hosts.txt")
    assert re.search(rf"hosts\.txt\b.*\bline 2\b.*{values}", str(error.value))


def test_a_host_that_is_there_twice() -> None:
    with pytest.raises(UsageError, match=r"\bline 3\b.*\bnode1\b"):
        parse("node1\nnode2\nnode1 slots=3\n")


def looked(watched: HostsFile, times: int = 3) -> list[str]:
    return [said for _ in range(times) if (said := watched.poll()) is not None]


def test_an_edit_counts_when_it_has_settled(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1\n")
    watched = HostsFile(file)
    assert looked(watched) == []
    file.write_text("node1\nnode2\n")
    assert watched.poll() is None, "whoever writes may not be at the end"
    assert watched.poll() == ""
    assert list(watched.lines) == ["node1", "node2"]
    os.utime(file, (1, 1))
    assert looked(watched) == [], "it says the same"


@pytest.mark.failure(
    "Processes, signals and crash loops",
    "the hosts file becomes a pipe, or its disk does not answer",
    seen="`not a regular file`, or after 10 s a line that the file was not read",
    outcome="the present hosts stay; the run continues and ends normally",
)
@pytest.mark.parametrize("mistake", ["empty", "folder", "pipe", "gone", "bad line", "unreadable bytes"])
def test_a_mistake_is_said_once_and_changes_nothing(mistake: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1\n")
    watched = HostsFile(file)
    if mistake in ("folder", "pipe", "gone"):
        file.unlink()
    match mistake:
        case "empty":
            file.write_text("# nobody\n")
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "bad line":
            file.write_text("node1\nnode2 slots=x\n")
        case "unreadable bytes":
            file.write_bytes(b"\xff\xfe\x00")
        case _:
            pass
    [said] = looked(watched)
    assert str(file) in said
    assert list(watched.lines) == ["node1"]
    if file.is_dir():
        file.rmdir()
    if file.is_fifo():
        file.unlink()
    file.write_text("node1\nnode3\n")
    assert looked(watched) == [""]
    assert list(watched.lines) == ["node1", "node3"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "hosts"))):
        HostsFile(tmp_path / "hosts")


def test_a_file_without_a_host_begins_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\n# none\n")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "hosts"))):
        HostsFile(tmp_path / "hosts")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "missing"))):
        HostsFile(tmp_path / "missing")


def test_what_has_become_of_a_line_is_told_in_words() -> None:
    before = parse("a slots=2\nb zone=east\nc python=/x\nd")
    now = parse("d\nb zone=west\na slots=3\nc interface=10.0.0.2 python=/x\ne slots=4")
    assert dict(changes(before, before)) == {}
    told = dict(changes(before, now))
    assert list(told) == ["b", "a", "c"]
    assert re.findall(r"\d+", told["a"]) == ["3", "2"]
    assert "interface=10.0.0.2" in told["c"]
    assert "zone=west" in told["b"]
