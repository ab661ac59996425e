"""A place of checkpoints has one owner, also where two claim it at once, and a run touches its own checkpoints only."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from farandole.checkpoint import owner
from farandole.checkpoint.owner import MARK, Owner, adopt, claim, mark_inside, new_identity, owner_of, this_run
from farandole.checkpoint.reach import see, unreached
from farandole.checkpoint.restore import find
from farandole.checkpoint.store import RunIdentity, Store, newest
from farandole.errors import CheckpointsGone, UsageError
from farandole.protocol.messages import Newest
from tests.support.checkpoints import save, steps
from tests.support.faulty_stores import faulty

AT_ONCE = 8


def dead(_: Owner, __: Path) -> bool:
    return False


def alive(_: Owner, __: Path) -> bool:
    return True


def run_in(folder: Path, *, inside: bool = False, identity: str = "") -> Owner:
    return this_run(identity or new_identity(), folder, inside=inside)


def of(run: Owner) -> RunIdentity:
    return RunIdentity(run.id, run.run)


def elsewhere(run: Owner) -> Owner:
    return msgspec.structs.replace(run, machine="another", host="other")


@pytest.fixture(params=["folder", "s3", "without conditional writes"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(owner, "SETTLE_S", 0.3)
    if request.param == "folder":
        return str(tmp_path / "place")
    return f"{faulty(conditional=request.param == 's3').protocol}://place"


# --- who has it ------------------------------------------------------------------------------------------------------


def test_who_takes_it_has_it_and_takes_it_again(place: str, tmp_path: Path) -> None:
    mine = run_in(tmp_path / "a")
    claim(place, mine, alive=alive)
    assert owner_of(Store(place)) == mine
    again = run_in(tmp_path / "a", identity=mine.id)
    claim(place, again, alive=alive)
    moved = elsewhere(run_in(tmp_path / "b", identity=mine.id))
    claim(place, moved, alive=dead)
    assert owner_of(Store(place)) == moved, "its machine was lost, or its folder has another name now"
    assert unreached(place, mine.id) == "" or "://" in place  # a process of its own does not know this store


def test_another_run_is_refused_as_long_as_it_is_alive_whatever_it_asks(place: str, tmp_path: Path) -> None:
    mine, others = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    claim(place, mine, alive=alive)
    for takes in (False, True):
        with pytest.raises(
            UsageError, match=rf"{re.escape(place)}.*\brun a\b.*{tmp_path}/a\b.*farandole stop --run {tmp_path}/a"
        ):
            claim(place, others, alive=alive, takes=takes)
        with pytest.raises(UsageError):
            owner.look(place, alive=alive, takes=takes)
    copied = run_in(tmp_path / "copied", identity=mine.id)
    with pytest.raises(UsageError, match=f"farandole stop --run {tmp_path}/a"):
        claim(place, copied, alive=alive)
    assert owner_of(Store(place)) == mine


@pytest.mark.failure(
    "Checkpoints",
    "the run that owns a place for checkpoints is over, or its machine is lost",
    seen="a new run must name another place, or `--resume` and `--checkpoints` of this one",
    outcome=(
        "its own `farandole run --folder` or `--take-over` continues there; `--resume` is your promise that a run on "
        "another machine is over"
    ),
)
def test_what_a_run_has_left_is_gone_on_from_only_if_that_is_asked_for(place: str, tmp_path: Path) -> None:
    first, second = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    claim(place, first, alive=alive)
    save(Store(place), 3, run=first.id)
    with pytest.raises(UsageError, match="--resume"):
        claim(place, second, alive=dead)
    assert owner_of(Store(place)) == first
    claim(place, second, alive=dead, takes=True)
    assert owner_of(Store(place)) == second
    with pytest.raises(UsageError, match="run b"):
        claim(place, first, alive=alive)
    claim(place, first, alive=dead)  # the second has left nothing
    save(Store(place), 6, run=second.id)
    claim(place, second, alive=dead, takes=True)
    with pytest.raises(UsageError, match="run b"):
        claim(place, first, alive=dead)


def test_a_run_that_could_not_start_leaves_the_place_free(place: str, tmp_path: Path) -> None:
    claim(place, run_in(tmp_path / "a"), alive=alive)
    second = run_in(tmp_path / "b")
    claim(place, second, alive=dead)
    assert owner_of(Store(place)) == second


@pytest.mark.failure("Checkpoints", "the run that owns a place for checkpoints is over, or its machine is lost")
def test_of_a_run_on_another_machine_nobody_knows_whether_it_is_over(place: str, tmp_path: Path) -> None:
    store, first, second = Store(place), elsewhere(run_in(tmp_path / "a")), run_in(tmp_path / "b")
    claim(place, first, alive=dead)
    with pytest.raises(UsageError, match=rf"\brun a\b.*{re.escape(MARK)}"):
        claim(place, second, alive=dead)
    store.files.rm_file(f"{store.path}/{MARK}")
    claim(place, second, alive=dead)
    assert owner_of(store) == second


def test_checkpoints_without_an_owner_are_somebodys(place: str, tmp_path: Path) -> None:
    """Copied, or of a version before there were owners."""
    save(Store(place), 3)
    with pytest.raises(UsageError, match=f"--resume {re.escape(place)}"):
        claim(place, run_in(tmp_path / "b"), alive=dead)
    claim(place, run_in(tmp_path / "b"), alive=dead, takes=True)


def test_the_mark_of_an_earlier_version_is_its_runs(tmp_path: Path) -> None:
    place, mine = tmp_path / "place", new_identity()
    place.mkdir()
    (place / MARK).write_text(mine)
    save(Store(str(place)), 3)
    with pytest.raises(UsageError):
        claim(str(place), run_in(tmp_path / "b"), alive=dead)
    claim(str(place), run_in(tmp_path / "a", identity=mine), alive=dead)


@pytest.mark.parametrize("spoilt", [b"", b"\xff\x00", b"{}", b"[1"])
def test_a_mark_that_can_not_be_read_is_nobodys(spoilt: bytes, tmp_path: Path) -> None:
    (tmp_path / MARK).write_bytes(spoilt)
    mine = run_in(tmp_path / "a")
    claim(str(tmp_path), mine, alive=dead)
    assert owner_of(Store(str(tmp_path))) == mine


# --- two at once -----------------------------------------------------------------------------------------------------


def at_once(play: Callable[[int], None]) -> Counter[str]:
    """What became of so many that play at the same moment."""
    start, outcomes, lock = threading.Barrier(AT_ONCE), Counter[str](), threading.Lock()

    def one(number: int) -> None:
        start.wait()
        try:
            play(number)
            outcome = "has it"
        except UsageError:
            outcome = "refused"
        with lock:
            outcomes[outcome] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.failure(
    "Checkpoints", "two runs get the same place for checkpoints (`--checkpoints`), possibly at the same moment"
)
@pytest.mark.parametrize("before", ["nothing", "a run that could not start"])
def test_of_many_at_once_one_has_it(place: str, before: str, tmp_path: Path) -> None:
    first = run_in(tmp_path / "first")
    if before != "nothing":
        claim(place, first, alive=alive)

    def play(number: int) -> None:
        claim(place, run_in(tmp_path / str(number)), alive=lambda run, _: run.id != first.id)

    assert at_once(play) == {"has it": 1, "refused": AT_ONCE - 1}


def test_of_many_at_once_one_has_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    outcomes = at_once(lambda number: claim(str(tmp_path / "p"), run_in(tmp_path / str(number)), alive=alive))
    assert outcomes == {"has it": 1, "refused": AT_ONCE - 1}
    assert [path.name for path in (tmp_path / "p").iterdir()] == [MARK]


# --- in a run's own folder -------------------------------------------------------------------------------------------


def test_what_lies_in_a_folder_is_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    place = folder / "checkpoints"
    place.mkdir(parents=True)
    mine = adopt(str(place), folder)
    mark_inside(str(place), this_run(mine, folder, inside=True))
    assert adopt(str(place), folder) == mine
    save(Store(str(place)), 3, run=mine)
    (place / MARK).unlink()
    assert adopt(str(place), folder) == mine, "its checkpoints say it, too"
    mark_inside(str(place), this_run(mine, folder, inside=True))
    moved = folder.rename(tmp_path / "b")
    assert adopt(str(moved / "checkpoints"), moved) == mine
    claim(str(moved / "checkpoints"), this_run(mine, moved, inside=True), alive=alive)
    shutil.copytree(moved, tmp_path / "c")
    claim(str(tmp_path / "c" / "checkpoints"), this_run(mine, tmp_path / "c", inside=True), alive=alive)


def test_a_folder_in_which_another_run_keeps_its_checkpoints_is_not_adopted(tmp_path: Path) -> None:
    place = tmp_path / "a" / "checkpoints"
    claim(str(place), run_in(tmp_path / "b"), alive=alive)
    with pytest.raises(UsageError, match="run b"):
        adopt(str(place), tmp_path / "a")
    with pytest.raises(UsageError, match="run b"):
        claim(str(place), run_in(tmp_path / "a", inside=True), alive=alive)


def test_another_run_is_refused_the_checkpoints_in_a_live_runs_folder(tmp_path: Path) -> None:
    place = tmp_path / "a" / "checkpoints"
    claim(str(place), run_in(tmp_path / "a", inside=True), alive=alive)
    with pytest.raises(UsageError, match=f"farandole stop --run {tmp_path}/a"):
        claim(str(place), run_in(tmp_path / "b"), alive=lambda _, folder: folder == tmp_path / "a", takes=True)


# --- two in one place, however they came there -----------------------------------------------------------------------


@pytest.mark.failure(
    "Checkpoints", "two runs get the same place for checkpoints (`--checkpoints`), possibly at the same moment"
)
def test_two_runs_in_one_place_see_and_remove_their_own_only(place: str, tmp_path: Path) -> None:
    a, b = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    store_a, store_b = Store(place, of(a)), Store(place, of(b))
    for step in (3, 6, 9):
        save(store_a, step, keep=2, run=a.id, value=1.0)
    unfinished = save(store_a, 1, run=a.id)
    store_a.files.rm_file(f"{store_a.path}/{unfinished}.json")
    save(store_b, 12, keep=1, run=b.id, value=2.0)
    save(store_b, 15, keep=1, run=b.id, value=2.0)
    assert steps(store_a) == [9, 6]
    assert steps(store_b) == [15]
    assert steps(Store(place)) == [15, 9, 6]
    assert [entry.step for entry in store_a.unfinished()] == [1]
    assert store_b.unfinished() == []
    found = find([place], of(a))
    assert (found.position.step, float(found.state["objects"]["model"]["weight"][0, 0])) == (9, 1.0)
    manifest = newest(place, of(a))
    assert manifest is not None
    assert (manifest.step, manifest.run_id) == (9, a.id)
    with pytest.raises(CheckpointsGone):
        see([place], Newest(step=15, path="p"), of(a))
    nobody = run_in(tmp_path / "c")
    assert find([place], of(nobody)).manifest is None
    assert find([place, place], of(nobody)).position.step == 15, "the second is what the user has named"


def test_those_of_an_earlier_version_are_their_folders(place: str) -> None:
    """They have no identity, but their manifest has the name of the run's folder: "r"."""
    save(Store(place), 3)
    save(Store(place), 6)
    own, others = Store(place, RunIdentity(new_identity(), "r")), Store(place, RunIdentity(new_identity(), "s"))
    assert (steps(own), steps(others)) == ([6, 3], [])
    others.prune(1)
    assert steps(own) == [6, 3]
    own.prune(1)
    assert steps(own) == [6]


def test_a_checkpoint_that_says_of_another_run_than_its_name_is_damaged(tmp_path: Path) -> None:
    a, b = new_identity(), new_identity()
    stem = save(Store(str(tmp_path)), 3, run=a)
    renamed = stem.replace(a[:8], b[:8])
    for suffix in (".pt", ".json"):
        (tmp_path / (stem + suffix)).rename(tmp_path / (renamed + suffix))
    assert newest(str(tmp_path)) is None
