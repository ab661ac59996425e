"""The state' second copy: never older than the journal, and whoever is killed while writing leaves the one before."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from farandole.coordinator.journal import HEAD, SLOT, Journal, Safekeeping, allocate_state_memory
from farandole.coordinator.process import open_journal
from farandole.errors import FarandoleError
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.settings import PoolTerms
from tests.support.disks import fill, small_disk
from tests.support.journal_lines import BOOKS, LOST, OTHER, VIEW
from tests.support.mentioned import mentions


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = allocate_state_memory()
    yield descriptor
    os.close(descriptor)


def test_whoever_comes_next_finds_the_newest(memory: int) -> None:
    assert Safekeeping(memory).state == b""
    for state in (b"one", b"two" * 1000, b"three"):
        Safekeeping(memory).put(state)
        assert Safekeeping(memory).state == state


@pytest.mark.parametrize("torn", [1, HEAD.size, HEAD.size + 3])
def test_killed_while_it_was_written(memory: int, torn: int) -> None:
    keeping = Safekeeping(memory)
    keeping.put(b"first")
    keeping.put(b"second")
    [slot] = [slot for slot in (0, 1) if b"second" in os.pread(memory, 1000, SLOT * slot)]
    os.pwrite(memory, b"\xff" * (HEAD.size + len(b"second") - torn), SLOT * slot + torn)
    assert Safekeeping(memory).state == b"first"


@pytest.mark.world
@pytest.mark.processes
def test_without_memory_for_the_newest_the_journal_is_believed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        descriptor = os.open(disk / "state", os.O_RDWR | os.O_CREAT)
        Safekeeping(descriptor).put(b"older")
        full = fill(disk)
        Safekeeping(descriptor).put(b"newer" * 10_000)
        assert Safekeeping(descriptor).state == b""
        full.unlink()
        Safekeeping(descriptor).put(b"newest")
        assert Safekeeping(descriptor).state == b"newest"
        os.close(descriptor)


def test_it_is_believed_before_the_journal_and_outlives_it(tmp_path: Path, memory: int) -> None:
    with closing(Journal(tmp_path, Safekeeping(memory))) as journal:
        journal.commit([VIEW], BOOKS)
    for path in tmp_path.iterdir():
        path.unlink()
    with closing(Journal(tmp_path, Safekeeping(memory))) as journal:
        assert journal.state() == BOOKS
    with closing(Journal(tmp_path)) as journal:
        assert journal.state() is None


@pytest.mark.world
@pytest.mark.processes
def test_a_full_disk_holds_no_books_up(tmp_path: Path, memory: int) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        with closing(Journal(disk, Safekeeping(memory))) as journal:
            journal.commit([VIEW], BOOKS)
            fill(disk)
            with pytest.raises(sqlite3.OperationalError, match="full"):
                journal.commit([msgspec.structs.replace(LOST, reason="why " * 10_000)], OTHER)
        journal, damage = open_journal(disk, RunSettings(run="r"), Safekeeping(memory), is_restart=True)
        with closing(journal):
            assert (journal.state(), damage) == (OTHER, "")


@pytest.mark.failure("Files, disks and output", "the journal is overwritten with random data")
def test_rubbish_is_set_aside_where_the_books_are_elsewhere(tmp_path: Path, memory: int) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"rubbish " * 1000)
    with pytest.raises(FarandoleError, match=re.escape(str(path))):
        open_journal(tmp_path, RunSettings(run="r"), Safekeeping(memory), is_restart=True)
    Safekeeping(memory).put(b"{}")
    for number, again in enumerate((True, False), start=1):
        path.write_bytes(b"rubbish " * 1000)
        journal, damage = open_journal(
            tmp_path, RunSettings(run="r"), Safekeeping(memory) if again else None, is_restart=again
        )
        journal.close()
        assert mentions(damage, path, f"journal.sqlite.damaged-{number}")
        for part in tmp_path.glob("journal.sqlite*"):
            if "damaged" not in part.name:
                part.unlink()


@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.parametrize(
    ("kinds", "synchronous"), [((), 1), (("local",), 1), (("ssh",), 2), (("local", "ec2"), 2)], ids=str
)
def test_where_a_pool_s_workers_outlive_this_machine_each_commit_is_on_the_disk(
    tmp_path: Path, kinds: tuple[str, ...], synchronous: int, damaged: bool
) -> None:
    """2 is SQLite's FULL, 1 its NORMAL; also of a journal that takes the place of a damaged one."""
    if damaged:
        (tmp_path / "journal.sqlite").write_bytes(b"rubbish " * 1000)
    pools = tuple(PoolTerms(name=f"p{number}", kind=kind) for number, kind in enumerate(kinds))
    journal, damage = open_journal(tmp_path, RunSettings(run="r", pools=pools), None, is_restart=False)
    with closing(journal):
        assert bool(damage) is damaged
        assert journal._database.execute("PRAGMA synchronous").fetchone() == (synchronous,)
