"""A run with a codec: the bits do not depend on who comes and goes, a replay gives them, and a resumed run keeps it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.launched import ENVIRON, FARANDOLE, JOB, Launched
from chaos.trial import digits
from chaos.verdict import Reference, complaints

pytestmark = pytest.mark.processes


def farandole(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FARANDOLE, *arguments], capture_output=True, text=True, timeout=200, check=False, env=ENVIRON
    )


def fingerprint(place: Path, codec: str) -> str:
    """Of the job in a single process."""
    job, environ = [sys.executable, str(JOB), str(digits(place))], {**ENVIRON, "FARANDOLE_CODEC": codec}
    done = subprocess.run(job, env=environ, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    return done.stdout.rsplit("fingerprint ", 1)[-1].strip()


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "other", "hosts"),
    [
        pytest.param("fp16", "none", (), marks=pytest.mark.long),
        ("bf16+zstd", "fp16+zstd", ("a", "b")),
        ("int4", "int8", ("a", "b")),
    ],
)
def test_the_bits_of_one_process_through_a_loss_a_join_and_a_replay(
    codec: str, other: str, hosts: Sequence[str], place: Path, reference: Reference
) -> None:
    """With two hosts the sums go over the network."""
    expected = replace(reference, fingerprint=fingerprint(place, codec))
    assert expected.fingerprint != reference.fingerprint
    folder = place / f"codec-{codec[:4]}"
    ours, theirs = ({"FARANDOLE_HOST": host} for host in hosts or ("", ""))
    environ = {"environ": ours, "external_workers": theirs} if hosts else {}
    with Launched(folder, digits(place), ["--workers", "2", "--codec", codec], pace_s=0.1, **environ) as run:  # type: ignore[arg-type]
        watch = run.watch
        assert run.until(lambda: len(watch.holders) == 2)
        assert run.join()
        assert run.until(lambda: len(watch.holders) == 3)
        assert f'"codec":"{codec}"' in farandole("status", "--run", str(folder), "--json").stdout.replace(" ", "")
        assert run.kill(watch.pids[watch.members[0]])
        assert run.until(lambda: watch.seen["lost"] == 1 and len(watch.holders) == 3)
        code = run.finish()
        assert complaints(code, watch.lines, folder / "ledger", watch.processes(), expected) == []
        assert run.troubles() == []
    assert farandole("replay", str(folder)).returncode == 0
    again = farandole("run", "--folder", str(folder), "--codec", other, str(JOB), str(digits(place)))
    assert again.returncode == 2
    assert f"--codec {other}" in again.stderr
    assert codec in again.stderr
