"""`make attack` in its short form, and that it can fail: a stranger is one, what harms a run is complained of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attack.base import NotMade
from attack.stranger import IS_OTHER, NOBODY, Stranger
from attack.table import ATTACKS

ROOT = Path(__file__).parents[2]


def who() -> bytes:
    return f"{os.getuid()} {os.getgid()} {os.getgroups()} {os.getcwd()}".encode()


def look_at(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except PermissionError:
        return b"refused"


def fail() -> bytes:
    raise OSError("no such luck")


@pytest.mark.skipif(not IS_OTHER, reason="only root may be another user")
def test_a_stranger_is_another_user_and_reads_no_private_file(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    private.chmod(0o600)
    with Stranger(who) as stranger:
        assert stranger.got(20) == f"{NOBODY} {NOBODY} [] /".encode()
    with Stranger(look_at, str(private)) as stranger:
        assert stranger.got(20) == b"refused"


def test_a_stranger_that_failed_shows_nothing() -> None:
    with Stranger(fail) as stranger, pytest.raises(NotMade, match="no such luck"):
        stranger.got(20)


def test_every_attack_has_a_name_of_its_own() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


@pytest.mark.world
@pytest.mark.processes
def test_the_run_stands_the_attacks_that_show_most() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attack", "--short"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " 0 failed" in done.stdout
