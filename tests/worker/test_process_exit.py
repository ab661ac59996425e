"""How a leaving worker makes way: the cores are the others' while it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")
LEAVER = """
import os
from pathlib import Path
from farandole.worker.process_exit import lower_priority
lower_priority()
print(os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/autogroup").read_text().split()[-1])
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share cores out by sessions")
def test_a_leaving_worker_lowers_itself_within_its_session_and_its_session_among_others() -> None:
    before = AUTOGROUP.read_text()
    done = subprocess.run(
        [sys.executable, "-c", LEAVER], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout.split() == [str(min(19, 19 + os.getpriority(os.PRIO_PROCESS, 0))), "15"]
    assert AUTOGROUP.read_text() == before


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share cores out by sessions")
def test_one_in_the_session_of_others_lowers_itself_alone() -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LEAVER!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout.split() == [str(min(19, 19 + os.getpriority(os.PRIO_PROCESS, 0))), "0"]
