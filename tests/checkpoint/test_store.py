"""Where checkpoints are kept: what a dead writer, a bad disk or a full one leaves, and that none of it is believed."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import msgspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from farandole.checkpoint import content
from farandole.checkpoint.restore import compare, find
from farandole.checkpoint.store import Sink, Store, newest
from farandole.errors import FarandoleError, UsageError
from farandole.plan.shards import Position
from tests.support.checkpoints import FACTS, manifest, save, steps
from tests.support.disks import small_disk


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "checkpoints"))


def test_what_is_saved_is_found_and_is_plain_torch(store: Store) -> None:
    save(store, 5)
    stem = save(store, 12)
    found = find([store.url])
    assert found.position == Position(epoch=1, offset=4, step=12)
    assert found.path == f"{store.path}/{stem}.pt"
    assert found.damaged == []
    assert torch.equal(found.state["objects"]["model"]["weight"], torch.full((300, 50), 12.0))
    assert found.state["origin"] == "o"
    loaded = torch.load(found.path, weights_only=True)
    assert loaded["model"].keys() == {"weight", "steps"}
    assert newest(store.url) == found.manifest


def test_nothing_there_is_a_beginning(store: Store) -> None:
    assert find([store.url]).manifest is None
    assert find([]).manifest is None
    assert newest(store.url) is None


# --- damage ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


DAMAGE = {
    "a bit of the state flips": (".pt", flip, "SHA-256"),
    "the state is torn": (".pt", tear, " bytes"),
    "the state is gone": (".pt", Path.unlink, ".pt "),
    "the manifest is torn": (".json", tear, ".json "),
    "the manifest is empty": (".json", lambda path: path.write_bytes(b""), ".json "),
    "the manifest is another file": (".json", lambda path: path.write_bytes(b"\xff\x00{}"), ".json "),
    "the manifest is gone": (".json", Path.unlink, ".pt "),
}


@pytest.mark.parametrize(("suffix", "damage", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_the_one_before_a_damaged_one_is_used_and_it_is_said(store: Store, suffix: str, damage: Any, says: str) -> None:
    save(store, 3)
    save(store, 6)
    broken = save(store, 9)
    damage(Path(store.path, broken + suffix))
    found = find([store.url])
    assert found.position.step == 6
    assert torch.equal(found.state["objects"]["model"]["weight"], torch.full((300, 50), 6.0))
    (told,) = found.damaged
    assert broken in told
    assert says in told.removeprefix(broken)


def test_if_none_verifies_it_is_an_error_not_a_new_beginning(store: Store) -> None:
    for step in (3, 6):
        flip(Path(store.path, save(store, step) + ".pt"))
    with pytest.raises(FarandoleError, match=rf"{re.escape(store.url)}\b.*\b2\b.*SHA-256"):
        find([store.url])


def test_one_that_was_never_finished_is_no_checkpoint(store: Store) -> None:
    Path(store.path, save(store, 3) + ".json").unlink()
    found = find([store.url])
    assert found.manifest is None


# --- writing ---------------------------------------------------------------------------------------------------


def test_what_counts_is_on_the_disk_and_what_is_superseded_goes_after_that(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses power has of a file what was synced, and of a folder the names that it had when it was."""
    save(store, 3, keep=1)
    contents: dict[int, int] = {}
    names: set[str] = set()
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def on_disk(name: str) -> bool:
        found = Path(store.path, name).stat()
        return contents.get(found.st_ino) == found.st_size > 0

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        if os.path.samestat(found, os.stat(store.path)):
            names.clear()
            names.update(os.listdir(store.path))
        else:
            contents[found.st_ino] = found.st_size

    def named(source: str, target: str) -> None:
        stem, suffix = os.path.splitext(os.path.basename(target))
        assert suffix == ".json", "the manifest, which makes it count"
        assert on_disk(stem + ".pt")
        assert on_disk(os.path.basename(source))
        replace(source, target)

    def removed(path: str) -> None:
        lasts = any(name.endswith(".json") and "-00000006-" in name for name in names)
        assert lasts or not os.path.exists(path), "the new one is there for good before anything goes"
        unlink(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    for name in ("remove", "unlink"):
        monkeypatch.setattr(os, name, removed)
    stem = save(store, 6, keep=1)
    assert {path.name for path in Path(store.path).iterdir()} == {f"{stem}.pt", f"{stem}.json"}
    assert {f"{stem}.pt", f"{stem}.json"} <= names
    assert on_disk(f"{stem}.pt")
    assert on_disk(f"{stem}.json")


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644)])
def test_who_may_read_the_folder_may_read_a_checkpoint_and_nobody_else(store: Store, folder: int, file: int) -> None:
    Path(store.path).mkdir(mode=folder)
    save(store, 3)
    assert {path.stat().st_mode & 0o777 for path in Path(store.path).iterdir()} == {file}


def test_nothing_that_is_there_is_written_over_nor_what_a_link_leads_to(store: Store, tmp_path: Path) -> None:
    save(store, 3)
    (tmp_path / "precious").write_text("precious")
    stem = store.name(manifest(6))
    Path(store.path, stem + ".pt").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        store.write(stem, lambda _: b"{}", 9)
    assert (tmp_path / "precious").read_text() == "precious"


class Remembering(MemoryFileSystem):
    """A place of which each process remembers what it has listed, as that of S3 does."""

    protocol = "remembering"
    cachable = False  # each one here is another process
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, list[dict[str, Any]]] = {}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        found = self.listed.setdefault(path, list(super().ls(path, detail=True, **kwargs)))
        return found if detail else sorted(entry["name"] for entry in found)

    def invalidate_cache(self, path: str | None = None) -> None:
        del path
        self.listed.clear()


def test_what_others_have_written_since_the_last_listing_is_seen() -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    writer, reader = Store("remembering://run"), Store("remembering://run")
    assert writer.files is not reader.files
    save(writer, 3)
    assert steps(reader) == [3]
    stem = save(writer, 6)
    assert steps(reader) == [6, 3]
    writer.files.rm_file(f"{writer.path}/{stem}.json")
    assert [entry.step for entry in reader.unfinished()] == [6]
    save(writer, 9)
    reader.prune(1)
    assert steps(writer) == [9]


@pytest.mark.world
@pytest.mark.processes
def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = Store(str(disk / "checkpoints"))
        save(store, 3)
        before = {path.name: path.read_bytes() for path in Path(store.path).iterdir()}
        others = disk / "others"
        with suppress(OSError), others.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            save(store, 6)
        assert {path.name: path.read_bytes() for path in Path(store.path).iterdir()} == before, "no litter"
        assert find([store.url]).position.step == 3
        others.unlink()
        save(store, 9)
        assert find([store.url]).position.step == 9


def test_a_writer_that_dies_leaves_what_was_there(store: Store) -> None:
    save(store, 3)

    def die(sink: Sink) -> bytes:
        sink.write(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(store.name(manifest(6)), die, 9)
    assert steps(store) == [3]
    assert store.unfinished() == []


def test_the_newest_are_kept_and_what_was_never_finished_before_them_goes(store: Store) -> None:
    stale = save(store, 1)
    Path(store.path, stale + ".json").unlink()
    for step in (3, 6, 9):
        save(store, step)
    between = save(store, 4, whole=False)
    under_way = Path(store.path, "step-00000012-0123abcd.pt")
    under_way.touch()
    save(store, 10, keep=2)
    assert steps(store) == [10, 9, 4]
    names = {path.name for path in Path(store.path).iterdir()}
    assert under_way.name in names, "another writer is at it"
    assert between + ".pt" in names, "what a failed script left is not ours to remove"
    assert len(names) == 2 * 3 + 1


def test_what_a_failed_script_left_is_never_taken_for_a_step(store: Store) -> None:
    save(store, 3)
    left = save(store, 7, whole=False)
    assert find([store.url]).position.step == 3
    with pytest.raises(UsageError, match=rf"{left}\.pt\b.* step-"):
        find([f"{store.path}/{left}.pt"])


def test_one_file_by_name(store: Store, tmp_path: Path) -> None:
    older = save(store, 3)
    save(store, 7)
    assert find([str(tmp_path / "none"), f"{store.path}/{older}.pt"]).position.step == 3
    with pytest.raises(UsageError, match=r"\bgone\.json\b"):
        find([f"{store.path}/gone.pt"])


def test_writers_of_one_step_do_not_meet(store: Store) -> None:
    """Four at once, of the same step: each leaves a checkpoint that verifies, with the state of one of them."""
    start = threading.Barrier(4)
    failures: list[BaseException] = []

    def write(value: float) -> None:
        try:
            start.wait()
            for step in range(5):
                save(store, step, value=value, keep=40)
        except Exception as error:  # noqa: BLE001  for the main thread
            failures.append(error)

    threads = [threading.Thread(target=write, args=(float(value),)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert Counter(steps(store)) == Counter(dict.fromkeys(range(5), 4))
    seen: Counter[float] = Counter()
    for entry in store.entries():
        with store.open_verified(entry.stem, store.manifest(entry.stem)) as file:
            weight = content.load(file, entry.stem)[1]["objects"]["model"]["weight"]
        assert torch.equal(weight, weight[0, 0].expand_as(weight))
        seen[float(weight[0, 0])] += 1
    assert seen == Counter({float(value): 5 for value in range(4)})


@pytest.mark.parametrize(
    ("url", "says"),
    [("nowhere://x/y", "nowhere"), ("s3x://b", "s3x")],
)
def test_a_place_that_is_none(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Store(url)


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file"))):
        Store(str(tmp_path / "file")).check()
    Store(str(tmp_path / "new")).check()
    assert list((tmp_path / "new").iterdir()) == []


# --- whether it may be used --------------------------------------------------------------------------------------


@pytest.mark.failure("Checkpoints", "a run resumes with another model, optimizer, data type or length of data")
def test_a_checkpoint_of_another_job_is_refused_and_other_differences_are_told() -> None:
    made = manifest(3)
    assert compare(made, FACTS, 3, "p") == []
    other = (("torch version", "2"), *FACTS[1:], ("epochs", "4"))
    told = compare(msgspec.structs.replace(made, offset=0), other, 5, "p")
    for line, values in zip(told, ("torch version.* 1 .* 2 ", "epochs.* none .* 4 ", "seed.* 3 .* 5 "), strict=True):
        assert re.match(values, line)
    refused = [
        ((*FACTS[:2], ("parameter model.weight", "[3] float32")), r"parameter model\.weight\b.*\[3\] float32"),
        (FACTS[:2], r"parameter model\.weight\b.* none\b"),
        ((*FACTS, ("buffer model.mean", "[1] float32")), r"buffer model\.mean\b.* none\b.*\[1\] float32"),
        ((*FACTS, ("object schedule", "StepLR")), "object schedule"),
        ((("samples in the data", "10"), *FACTS[2:]), r"samples in the data\b.*\b9\b.*\b10\b"),
    ]
    for facts, says in refused:
        with pytest.raises(UsageError, match=f"p: {says}"):
            compare(made, facts, 3, "p")


def test_a_manifest_is_for_people_too(store: Store) -> None:
    stem = save(store, 3)
    text = Path(store.path, stem + ".json").read_bytes()
    assert b'\n  "step": 3' in text
    assert msgspec.json.decode(text)["size"] == Path(store.path, stem + ".pt").stat().st_size
