"""Another local user at the workers' own ports, while a third worker joins; and a joiner that can't prove who it is.

In a network namespace, whose loopback nobody else is on. The user opens two thousand connections, races for each place
of each new listener, and says what ends a process where it has got one; the joiner has another key than the group's the
first time. The run goes on: nobody dies, nothing is left of it, the address is named, the joiner comes in with a later
group, and the bits are those of a world of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import chaos
from chaos.trial import digits
from chaos.verdict import Reference
from tests.support.harness import ENVIRON, Elastic
from tests.support.network import AVAILABLE, WHY_NOT, Machines

pytestmark = [pytest.mark.processes, pytest.mark.world, pytest.mark.skipif(not AVAILABLE, reason=WHY_NOT)]

HERE = Path(__file__).parents[1]
JOB = Path(chaos.__file__).with_name("job.py")
PACE_S = 0.1  # of a micro-batch
NOBODY = "65534"
SPARE = 16  # descriptors: what a joiner, and what it brings with it, may cost a worker


def descriptors(run: Elastic) -> dict[str, int]:
    ready = {event["worker"]: event["pid"] for event in run.events("ready")}
    return {worker: len(os.listdir(f"/proc/{ready[worker]}/fd")) for worker in ("w1", "w2")}


@pytest.mark.failure(
    "External workers, pools and machines",
    "a port scanner or a health check connects to the ports of the workers",
    seen="nothing: the kernel drops the connection",
    outcome="the run continues",
)
def test_strangers_at_the_listeners_cost_nothing_and_get_nothing(
    tmp_path: Path, place: Path, reference: Reference
) -> None:
    pace = tmp_path / "pace"
    pace.write_text(f"{PACE_S}")
    job = [str(digits(place)), "--pace", str(pace)]
    with Machines() as machines, ExitStack() as stack:
        on = [*machines.on(0), "env", "FARANDOLE_SHARED_MEMORY=0"]  # else those of one host have no listeners
        run = stack.enter_context(Elastic(tmp_path / "run", JOB, *job, workers=2, options=["--max", "3"], on=on))
        run.until_members(2)
        join = [
            *on,
            sys.executable,
            str(HERE / "support" / "impostor.py"),
            "join",
            str(run.folder / "ticket"),
            str(JOB),
            *job,
        ]
        joined = subprocess.Popen(join, env={**ENVIRON, "FARANDOLE_WORKER": "far"})
        stack.callback(joined.wait)
        stack.callback(joined.kill)
        run.until(lambda: "far" in [event["worker"] for event in run.events("starting")], "a joiner")
        before = descriptors(run)
        attackers = {
            mode: stack.enter_context(attacker([*on, sys.executable, "-m", "attack.gloo", mode, NOBODY]))
            for mode in ("crowd", "race", "spoil")
        }
        run.until_members(3)
        run.until_step(run.step + 2)
        after = descriptors(run)
        done = {mode: json.loads(process.communicate()[0]) for mode, process in attackers.items()}
        pace.unlink()
        run.finish()
        assert joined.wait(200) == 0
    assert f"fingerprint {reference.fingerprint}" in run.output.read_text(), "the weights of a world of one"
    assert all(after[worker] < before[worker] + SPARE for worker in before), (before, after)
    assert done["crowd"]["held"] >= 2000
    assert done["race"]["tried"] > 0
    assert done["spoil"]["tried"] > 0
    assert (done["race"]["taken"], done["spoil"]["taken"]) == (0, 0)
    strange = run.events("stranger in group")
    assert [event["again_s"] for event in strange] == [1.0], "the first time"
    assert "far" in (strange[0]["worker"], strange[0]["peer"])
    assert strange[0]["address"].startswith("127.0.0.1 ")
    assert not run.events("lost")
    assert not run.events("state lost")
    assert run.events("proposed")[-1]["view"] > strange[0]["view"]


@contextmanager
def attacker(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, cwd=HERE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRON
    )
    with process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()
