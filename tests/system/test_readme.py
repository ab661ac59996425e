"""The script of the README, with fewer epochs: by itself and with two workers it ends with the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import ENVIRON, FARANDOLE
from tests.support.pages import readme_script

pytestmark = [pytest.mark.processes]


def test_the_script_runs_and_gives_the_same_weights_with_two_workers(tmp_path: Path) -> None:
    script = readme_script()
    assert len(script.splitlines()) <= 25
    assert script.count("epochs=20") == 1
    (tmp_path / "train.py").write_text(script.replace("epochs=20", "epochs=3"))  # enough, and 40 s less
    run = [*FARANDOLE, "run", "--workers", "2", "--folder", "run", "train.py"]
    outputs = [
        subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=200, check=True)
        for command in ([sys.executable, "train.py"], run)
    ]
    fingerprints = {re.findall(r"fingerprint of the weights: (\S+)", done.stdout + done.stderr)[0] for done in outputs}
    assert len(fingerprints) == 1
