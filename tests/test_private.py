"""What is in a run's folder is its user's alone: modes from the first byte, no link followed, nothing of others used.

The attacks are real ones: links, pipes and files that are planted at every name that a run uses.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec
import pytest
from harness import open_to_others
from users import ALICE, MALLORY, being, everybodys, needs_root

from farandole import private, sources
from farandole.checkpoint.reach import leave_mark
from farandole.checkpoint.store import Store
from farandole.cli.folders import check_folder, close, hold, live, make_folder, place_of
from farandole.cli.resume import Asked, settle
from farandole.control import tls
from farandole.control.alone import _open_lines  # pyright: ignore[reportPrivateUsage]
from farandole.control.endpoint import endpoint
from farandole.control.files import write_atomically
from farandole.control.journal import Journal
from farandole.control.paths import FILES, FOLDERS
from farandole.control.ticket import Ticket, exposed, new_secret
from farandole.data.ledger import Ledger
from farandole.errors import CoordinatorUnreachable, FarandoleError, NotPrivate, UsageError
from farandole.membership.messages import Checkpoints
from farandole.membership.records import RunSettings
from farandole.pool.local import LocalPool

__all__ = ["everybodys"]  # a fixture


@contextlib.contextmanager
def umask(mode: int) -> Generator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def ticket() -> Ticket:
    return Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")


def write_ledger(folder: Path) -> None:
    ledger = Ledger(folder / "ledger" / "w1.jsonl")
    ledger.entered(origin="o")
    ledger.close()


def write_log(folder: Path) -> None:
    pool = LocalPool(["true"], logs=folder / "logs", threads=1, environ={})
    with pool._log("w1") as log:  # pyright: ignore[reportPrivateUsage]
        log.write(b"said\n")


def write_journal(folder: Path) -> None:
    Journal(folder).close()


def write_code(folder: Path) -> None:
    script = folder.parent / "train.py"
    script.write_text("import part.inner\n")
    sources.keep(str(script), folder / "code")
    (folder.parent / "part").mkdir(exist_ok=True)
    (folder.parent / "part" / "inner.py").write_text("")
    executed = sources.Sources(str(script), folder / "code")
    executed.source("module part.inner", Path("part", "inner.py"), str(folder.parent / "part" / "inner.py"))


def write_checkpoint(folder: Path) -> None:
    private.make(folder / "checkpoints")
    store = Store(str(folder / "checkpoints"))
    leave_mark(store.url)
    store.write("step-00000001-0000000a", lambda sink: b"%d" % sink.write(b"state"), keep=3)


def write_alone(folder: Path) -> None:
    _open_lines(folder).close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "settings.json": lambda folder: write_atomically(folder / "settings.json", b"{}"),
    "ticket": lambda folder: ticket().save(folder / "ticket"),
    "tls.pem": lambda folder: tls.certificate(folder),
    "coordinator.json": lambda folder: write_atomically(folder / "coordinator.json", b"{}"),
    "lock": lambda folder: os.close(hold(folder)),
    "metrics.jsonl": write_journal,
    "journal.sqlite": write_journal,
    "journal.sqlite-wal": write_journal,
    "journal.sqlite-shm": write_journal,
    "journal.sqlite-journal": write_journal,
    "coordinator.log": lambda folder: private.append(folder / "coordinator.log").close(),
    "logs/w1.log": write_log,
    "ledger/w1.jsonl": write_ledger,
    "code/train.py": write_code,
    "code/part/inner.py": write_code,
    "checkpoints/.run": write_checkpoint,
    "checkpoints/step-00000001-0000000a.pt": write_checkpoint,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private.make(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(params=[0o000, 0o022, 0o077])
def any_umask(request: pytest.FixtureRequest) -> Generator[None]:
    with umask(request.param):
        yield


@pytest.mark.usefixtures("any_umask")
def test_every_file_and_folder_is_private_whatever_the_umask(folder: Path) -> None:
    for write in {*WRITERS.values(), write_alone}:
        write(folder)
    journal = Journal(folder)  # while it is open there are two more files
    try:
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert set(FOLDERS) <= found
        assert set(FILES) - {"journal.sqlite-journal"} <= found
        assert open_to_others(folder) == []
    finally:
        journal.close()


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_at_any_name_leaves_its_target_as_it_was(name: str, folder: Path, tmp_path: Path) -> None:
    """Who made it, and whether it is named in an error or replaced, is another question."""
    target = tmp_path / "precious"
    target.write_text("torn line, without an end")
    WRITERS[name](folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    with contextlib.suppress(NotPrivate, UsageError, FileExistsError):
        WRITERS[name](folder)
    assert target.read_text() == "torn line, without an end"
    assert target.stat().st_mode & 0o077, "it was not touched"


@pytest.mark.parametrize("name", ["metrics.jsonl", "journal.sqlite", "journal.sqlite-wal", "lock", "coordinator.log"])
@pytest.mark.parametrize("plant", ["link", "hard link", "pipe", "folder"])
def test_what_is_no_file_of_ours_is_refused_by_name(name: str, plant: str, folder: Path, tmp_path: Path) -> None:
    path, target = folder / name, tmp_path / "precious"
    target.write_text("mine")
    {"link": lambda: path.symlink_to(target), "hard link": lambda: os.link(target, path),
     "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[plant]()  # fmt: skip
    for use in (WRITERS[name], check_folder):
        with pytest.raises(NotPrivate) as refused:
            use(folder)
        assert str(path) in str(refused.value)
        assert "remove it" in str(refused.value)
    assert target.read_text() == "mine"


def test_a_world_of_one_follows_no_link_either(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("torn line")
    (folder / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(NotPrivate, match=r"metrics\.jsonl is a symbolic link"):
        write_alone(folder)


@pytest.mark.timeout(20)
def test_what_is_refused_has_not_been_touched_and_nobody_waits_for_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o644)
    os.link(tmp_path / "precious", folder / "linked")
    with pytest.raises(NotPrivate, match="one of 2 names"):
        private.write(folder / "linked", b"")
    assert (tmp_path / "precious").read_text() == "mine"
    assert stat.S_IMODE((tmp_path / "precious").stat().st_mode) == 0o644
    os.mkfifo(folder / "pipe")
    with pytest.raises(NotPrivate, match="is no regular file"):
        private.read(folder / "pipe")


def test_a_file_that_is_opened_is_closed_to_others(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("line\n")
    (folder / "metrics.jsonl").chmod(0o664)
    private.append(folder / "metrics.jsonl").close()
    assert open_to_others(folder) == []


def test_a_new_folder_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with umask(0o022):
        made = make_folder(None, "train.py")
    assert made.parent == tmp_path / "runs"
    assert open_to_others(made) == []


def test_what_others_could_read_they_can_no_more(folder: Path) -> None:
    """A folder from before, or whose modes somebody has changed."""
    write_journal(folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777 if path.is_dir() else 0o664)
    with pytest.raises(NotPrivate, match=r"others can write to .*run \(mode 0777\): chmod 700 .*run, or name"):
        check_folder(folder)
    folder.chmod(0o755)
    check_folder(folder)
    assert make_folder(folder, "train.py") == folder
    assert "it has mode 0700 now" in close(folder)
    assert close(folder) == ""
    assert open_to_others(folder) == []


def test_the_remedy_does_not_close_tmp(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(NotPrivate, match="name a folder of your own") as refused:
        check_folder(shared)
    assert "chmod" not in str(refused.value)


def test_a_folder_is_made_in_one_step_and_those_above_as_usual(tmp_path: Path) -> None:
    with umask(0o022):
        private.make(tmp_path / "runs" / "r")
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "runs" / "r").stat().st_mode) == 0o700


def test_a_link_of_ones_own_to_a_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    """A disk of its own for the checkpoints."""
    private.make(tmp_path / "disk")
    (folder / "checkpoints").symlink_to(tmp_path / "disk")
    check_folder(folder)
    write_checkpoint(folder)
    assert open_to_others(tmp_path / "disk") == []
    (tmp_path / "disk").chmod(0o770)
    with pytest.raises(NotPrivate, match=r"others can write to .*checkpoints"):
        check_folder(folder)


def test_a_place_for_checkpoints_that_the_user_has_made_keeps_its_modes(tmp_path: Path) -> None:
    with umask(0o022):
        (tmp_path / "checkpoints").mkdir(mode=0o775)
        leave_mark(str(tmp_path / "checkpoints"))
    assert stat.S_IMODE((tmp_path / "checkpoints").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "checkpoints" / ".run").stat().st_mode) == 0o644


def test_a_ticket_that_others_can_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    ticket().save(path)
    assert exposed(str(path)) == ""
    path.chmod(0o644)
    assert exposed(str(path)) == f"others can read the ticket {path}, and join (mode 0644); chmod 600 {path}"
    path.chmod(0o660)
    assert exposed(str(path)).startswith(f"others can change the ticket {path}, and where its workers go (mode 0660)")
    assert exposed("-") == ""


# --- of other users ----------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("name", [*FILES, "checkpoints/step-00000009-0000000a.pt", "code/train.py", "logs/w1.log"])
def test_a_file_that_another_has_put_there_is_refused(name: str, everybodys: Path) -> None:
    """While the folder was open to all; then its user did as the error said."""
    with being(ALICE), umask(0):
        folder = everybodys / "run"
        folder.mkdir()
        (folder / name).parent.mkdir(exist_ok=True)
        check = (folder / name).parent
    with being(MALLORY), umask(0):
        (folder / name).write_text("planted")
    with being(ALICE):
        with pytest.raises(NotPrivate, match=rf"chmod 700 {folder}, or"):
            check_folder(folder)
        for opened in {folder, check}:
            opened.chmod(0o700)
        with pytest.raises(NotPrivate, match=rf"{name} belongs to uid {MALLORY}, and you are uid {ALICE}; "):
            check_folder(folder)


@needs_root
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_or_a_link_to_one_that_another_has_put_there_is_refused(name: str, everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(ALICE), umask(0):
        folder.mkdir()
        (everybodys / "precious").mkdir(mode=0o700)
    for plant in ("folder", "link"):
        with being(MALLORY):
            path = folder / name
            path.mkdir() if plant == "folder" else path.symlink_to(everybodys / "precious")
        with being(ALICE):
            folder.chmod(0o700)
            for use in (check_folder, lambda folder: private.make(folder / name)):
                with pytest.raises(NotPrivate, match=f"{name} belongs to uid {MALLORY}, and you are uid {ALICE}"):
                    use(folder)
            folder.chmod(0o777)
        with being(MALLORY):
            path.rename(everybodys / plant)


@needs_root
def test_a_planted_ticket_and_certificate_are_not_taken_over(everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(ALICE), umask(0):
        folder.mkdir()
    with being(MALLORY), umask(0):
        ticket().save(folder / "ticket")
        (folder / "ticket").chmod(0o666)
        tls.certificate(folder)
        (folder / "tls.pem").chmod(0o666)
    with being(ALICE):
        folder.chmod(0o700)
        with pytest.raises(NotPrivate, match=f"ticket belongs to uid {MALLORY}"):
            endpoint(folder, "127.0.0.1", again=True)
        with pytest.raises(NotPrivate, match=f"tls.pem belongs to uid {MALLORY}"):
            endpoint(folder, "10.0.0.5")


@needs_root
def test_root_follows_no_link_of_anothers(everybodys: Path) -> None:
    """In a folder that another owns, who could lead it anywhere."""
    (everybodys / "precious").mkdir(mode=0o700)
    with being(ALICE):
        (everybodys / "run").mkdir(mode=0o700)
        (everybodys / "run" / "logs").symlink_to(everybodys / "precious")
    with pytest.raises(NotPrivate, match=f"logs belongs to uid {ALICE}, and you are root"):
        check_folder(everybodys / "run")
    with pytest.raises(NotPrivate, match="logs belongs to"):
        private.make(everybodys / "run" / "logs")


@needs_root
def test_whoever_reads_a_folder_as_a_command_is_refused_anothers(everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(MALLORY), umask(0o022):
        folder.mkdir()
        (folder / "coordinator.json").write_text("{}")
        ticket().save(folder / "ticket")
    with being(ALICE):
        for read in (place_of, live, check_folder, private.make):
            with pytest.raises(NotPrivate, match=f"run belongs to uid {MALLORY}, and you are uid {ALICE}"):
                read(folder)
    check_folder(folder)  # root may use anybody's
    with pytest.raises(CoordinatorUnreachable), live(folder) as api:
        api.status()


@needs_root
def test_another_user_can_neither_look_into_a_run_nor_plant_anything_nor_hold_its_lock(everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(ALICE), umask(0):
        make_folder(folder, "train.py")
        for write in {*WRITERS.values()} - {WRITERS["code/train.py"], WRITERS["lock"]}:
            write(folder)
        names = [path for path in folder.rglob("*") if path.is_file()]
        assert len(names) >= len(FILES) - 3, names
    with being(MALLORY):
        for path in names:
            for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
                with pytest.raises(PermissionError):
                    os.open(path, flags)
        with pytest.raises(PermissionError):
            os.listdir(folder)
        with pytest.raises(PermissionError):
            (folder / "planted").touch()


@needs_root
def test_what_the_system_refuses_is_said_with_a_remedy(everybodys: Path) -> None:
    """As a container's user on a volume of root's, or root on a file server that takes it for nobody."""
    folder = everybodys / "run"
    with being(ALICE):
        private.make(folder)
        for mode, use in ((0o500, make_folder), (0o000, make_folder), (0o000, lambda folder, _: check_folder(folder))):
            folder.chmod(mode)
            with pytest.raises(
                UsageError, match=f"--folder .*Permission denied to uid {ALICE}; name another folder, or"
            ):
                use(folder, "train.py")
        folder.chmod(0o700)


@needs_root
def test_the_newest_run_is_the_newest_of_ones_own(everybodys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(everybodys)
    Path("runs").mkdir()
    Path("runs").chmod(0o777)
    for age, (user, name, mode) in enumerate(
        [(MALLORY, "closed", 0o700), (MALLORY, "open", 0o755), (ALICE, "own", 0o700), (ALICE, "older", 0o700)]
    ):
        with being(user):
            run = Path("runs", name)
            run.mkdir(mode=mode)
            (run / "coordinator.json").write_text("{}")
            os.utime(run / "coordinator.json", (1e9 - age, 1e9 - age))
            run.chmod(mode)
    with being(ALICE):
        assert place_of(None) == Path("runs/own")
    assert place_of(None) == Path("runs/closed"), "root's are all"


@needs_root
def test_the_place_that_anothers_settings_name_is_not_asked_for_checkpoints(everybodys: Path) -> None:
    folder = everybodys / "run"
    elsewhere = RunSettings(run="r", checkpoints=Checkpoints(url="http://127.0.0.1:1/\x1b]0;pwned\x07x"))
    with being(MALLORY), umask(0o022):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        (folder / "settings.json").write_bytes(msgspec.json.encode(elsewhere))
    with being(ALICE), pytest.raises(UsageError, match=rf"belongs to uid {MALLORY}, and its settings name") as refused:
        settle(Asked(resume=str(folder)), None)
    assert "\x1b" not in str(refused.value)
    with pytest.raises(UsageError, match="its settings name"):  # root acts in its own name, too
        settle(Asked(resume=str(folder)), None)
    with being(MALLORY), pytest.raises(FarandoleError, match=r"can't be read|no checkpoint at"):  # asked, and not there
        settle(Asked(resume=str(folder)), None)
