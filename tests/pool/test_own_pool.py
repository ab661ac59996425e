"""The code of docs/own_pool.md, installed as a package of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.harness import Elastic, alone

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "own_pool.md"
JOB = Path(__file__).parents[1] / "jobs" / "small.py"
EPOCHS = ("--epochs", "60")


@pytest.mark.long
def test_a_pool_of_another_package_trains_to_the_same_bits_and_leaves_nothing(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    entry = re.search(r"^mine = \"(.*)\"$", blocks["toml"], re.MULTILINE)
    assert entry is not None
    packages = tmp_path / "packages"
    info = packages / "mine_pool-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "mine_pool.py").write_text(blocks["python"])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-pool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[farandole.pools]\nmine = {entry[1]}\n")
    alone(tmp_path / "one", JOB, str(tmp_path / "expected"), *EPOCHS)
    pace = tmp_path / "pace"
    pace.write_text("0.2")
    job = (JOB, str(tmp_path / "out"), "--pace", str(pace), *EPOCHS)
    on = ["env", f"PYTHONPATH={packages}"]
    with Elastic(tmp_path / "run", *job, workers=2, options=["--pool", "mine,size=2"], on=on) as run:
        run.until_members(2)
        pace.unlink()
        run.finish()
        hosts = {event["host"] for event in run.events("ready")}
        assert len(hosts) == 2, run.report()
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _has(path, hosts)]


def _has(path: Path, hosts: set[str]) -> bool:
    try:
        words = path.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return bool(hosts.intersection(words))
