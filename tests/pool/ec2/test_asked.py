"""What can't be as it was asked for: each a clear line that names it, before anything is made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.aws import ENVIRON, TEMPLATE, Moto
from tests.support.harness import FARANDOLE

pytestmark = [pytest.mark.processes, pytest.mark.world]


def refusal(pool: str, cwd: Path, *options: str, without: tuple[str, ...] = ()) -> str:
    (cwd / "s.py").write_text("")
    environ = {name: value for name, value in ENVIRON.items() if name not in without}
    environ["HOME"] = str(cwd)
    command = [*FARANDOLE, "run", "--workers", "1", "--pool", pool, *options, "s.py"]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (cwd / "runs").exists()
    return done.stderr


def test_what_is_not_there_or_can_not_be_meant(moto: Moto, tmp_path: Path) -> None:
    moto.make_template("bare", UserData=None, InstanceInitiatedShutdownBehavior=None, IamInstanceProfile=None)
    pool = f"ec2,template={TEMPLATE}"
    for asked, *words in [
        ("ec2", "template="),
        ("ec2,template=nobodys", "nobodys", "docs/ec2.md"),
        ("ec2,template=bare", "bare", "farandole pool user-data", "terminate", "IamInstanceProfile"),
        (f"{pool},types=q9.huge", "q9.huge", "describe-instance-type-offerings"),
        (f"{pool},types=g4dn.xlarge,zones=us-east-1e", "us-east-1e", "g4dn.xlarge", "us-east-1a"),
        (f"{pool},zones=mars-1a", "zones=mars-1a"),
        (f"{pool},market=futures", "'futures'", "spot+on-demand"),
        (f"{pool},slots=0", "slots=0"),
        (f"{pool},prices=nowhere.csv", "nowhere.csv"),
    ]:
        said = refusal(asked, tmp_path)
        for word in words:
            assert word in said, said
    assert "c5.large spot" in refusal(pool, tmp_path, "--max-cost", "5")
    assert "--max-hours 0" in refusal(pool, tmp_path, "--max-hours", "0")
    assert "AWS_ACCESS_KEY_ID" in refusal(pool, tmp_path, without=("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    assert "region" in refusal(pool, tmp_path, without=("AWS_DEFAULT_REGION",))
    assert moto.instances() == []
