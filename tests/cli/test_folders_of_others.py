"""Another user of the same machine at a run's folder: looks, plants, waits for its owner to use what is there."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from farandole.cli.folders import check_folder, live, make_folder, place_of
from farandole.cli.resume import GivenOptions, settle
from farandole.control import security
from farandole.control.run_folder import FILES, FOLDERS
from farandole.coordinator.listener import endpoint
from farandole.errors import CoordinatorUnreachable, FarandoleError, NotPrivate, UsageError
from farandole.platform import files
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Checkpoints, RunTerms
from tests.support.run_files import WRITERS, ticket, umask
from tests.support.users import ALICE, MALLORY, being, everybodys, needs_root

__all__ = ["everybodys"]  # a fixture


@pytest.mark.failure(
    "Files, disks and output", "`--folder` names a folder that other users can write or own, or such a file is in it"
)
@pytest.mark.world
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
        with pytest.raises(NotPrivate, match=rf"chmod 700 {folder}\b"):
            check_folder(folder)
        for opened in {folder, check}:
            opened.chmod(0o700)
        with pytest.raises(NotPrivate, match=rf"{name}\b.*\buid {MALLORY}\b.*\buid {ALICE}\b"):
            check_folder(folder)


@pytest.mark.world
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
            for use in (check_folder, lambda folder: files.make(folder / name)):
                with pytest.raises(NotPrivate, match=rf"{name}\b.*\buid {MALLORY}\b.*\buid {ALICE}\b"):
                    use(folder)
            folder.chmod(0o777)
        with being(MALLORY):
            path.rename(everybodys / plant)


@pytest.mark.world
@needs_root
def test_a_planted_ticket_and_certificate_are_not_taken_over(everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(ALICE), umask(0):
        folder.mkdir()
    with being(MALLORY), umask(0):
        ticket().save(folder / "ticket")
        (folder / "ticket").chmod(0o666)
        security.certificate(folder)
        (folder / "tls.pem").chmod(0o666)
    with being(ALICE):
        folder.chmod(0o700)
        with pytest.raises(NotPrivate, match=rf"/ticket\b.*\buid {MALLORY}\b"):
            endpoint(folder, "127.0.0.1", is_restart=True)
        with pytest.raises(NotPrivate, match=rf"/tls\.pem\b.*\buid {MALLORY}\b"):
            endpoint(folder, "10.0.0.5")


@pytest.mark.world
@needs_root
def test_root_follows_no_link_of_anothers(everybodys: Path) -> None:
    """In a folder that another owns, who could lead it anywhere."""
    (everybodys / "precious").mkdir(mode=0o700)
    with being(ALICE):
        (everybodys / "run").mkdir(mode=0o700)
        (everybodys / "run" / "logs").symlink_to(everybodys / "precious")
    with pytest.raises(NotPrivate, match=rf"/logs\b.*\buid {ALICE}\b.*\broot\b"):
        check_folder(everybodys / "run")
    with pytest.raises(NotPrivate, match=rf"/logs\b.*\buid {ALICE}\b"):
        files.make(everybodys / "run" / "logs")


@pytest.mark.failure(
    "Files, disks and output", "`--folder` names a folder that other users can write or own, or such a file is in it"
)
@pytest.mark.world
@needs_root
def test_whoever_reads_a_folder_as_a_command_is_refused_anothers(everybodys: Path) -> None:
    folder = everybodys / "run"
    with being(MALLORY), umask(0o022):
        folder.mkdir()
        (folder / "coordinator.json").write_text("{}")
        ticket().save(folder / "ticket")
    with being(ALICE):
        for read in (place_of, live, check_folder, files.make):
            with pytest.raises(NotPrivate, match=rf"/run\b.*\buid {MALLORY}\b.*\buid {ALICE}\b"):
                read(folder)
    check_folder(folder)  # root may use anybody's
    with pytest.raises(CoordinatorUnreachable), live(folder) as api:
        api.status()


@pytest.mark.world
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


@pytest.mark.failure(
    "Files, disks and output",
    "the system denies this user the folder (a volume of root in a container, a file server that maps root to nobody)",
    seen="one line at once, with the user and the remedy",
    outcome="exit code 2; nothing is started",
)
@pytest.mark.world
@needs_root
def test_what_the_system_refuses_is_said_with_a_remedy(everybodys: Path) -> None:
    """As a container's user on a volume of root's, or root on a file server that takes it for nobody."""
    folder = everybodys / "run"
    with being(ALICE):
        files.make(folder)
        for mode, use in ((0o500, make_folder), (0o000, make_folder), (0o000, lambda folder, _: check_folder(folder))):
            folder.chmod(mode)
            with pytest.raises(UsageError, match=rf"--folder .*\buid {ALICE}\b"):
                use(folder, "train.py")
        folder.chmod(0o700)


@pytest.mark.world
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


@pytest.mark.failure(
    "Command line",
    "`farandole replay` names a folder of another user, or `--resume` one whose settings name another place",
)
@pytest.mark.world
@needs_root
def test_the_place_that_anothers_settings_name_is_not_asked_for_checkpoints(everybodys: Path) -> None:
    folder = everybodys / "run"
    elsewhere = RunSettings(run="r", checkpoints=Checkpoints(url="http://127.0.0.1:1/\x1b]0;pwned\x07x"))
    with being(MALLORY), umask(0o022):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("")
        (folder / "settings.json").write_bytes(msgspec.json.encode(elsewhere))
    with (
        being(ALICE),
        pytest.raises(UsageError, match=rf"--resume .*\buid {MALLORY}\b.*http://127\.0\.0\.1:1/") as refused,
    ):
        settle(GivenOptions(resume=str(folder)), RunTerms(), None)
    assert "\x1b" not in str(refused.value)
    with pytest.raises(UsageError, match=r"--resume .*http://127\.0\.0\.1:1/"):  # root acts in its own name, too
        settle(GivenOptions(resume=str(folder)), RunTerms(), None)
    with being(MALLORY), pytest.raises(FarandoleError, match=r"can't be read|no checkpoint at"):  # asked, and not there
        settle(GivenOptions(resume=str(folder)), RunTerms(), None)
