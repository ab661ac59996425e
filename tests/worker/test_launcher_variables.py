"""What torchrun, mpirun and the like have left in the environment, and the slot that a pool gives."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from farandole.control.ticket import Ticket
from farandole.errors import UsageError
from farandole.settings import Settings, leave_launcher, refuse_launcher, slot
from tests.support.harness import ENVIRON, FARANDOLE

TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "ROLE_NAME": "default",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMI_SIZE": "2", "MV2_COMM_WORLD_SIZE": "2"}
KEPT = {"PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "MY_RANK": "2", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.failure(
    "External workers, pools and machines",
    (
        "a worker inherits variables of torchrun or mpirun (RANK, WORLD_SIZE, ...), from which Accelerate expects a "
        "fixed group"
    ),
    seen="one line in the worker's log names them",
    outcome=(
        "they are removed before the script starts; the LOCAL_RANK of an external worker becomes its FARANDOLE_SLOT"
    ),
)
def test_a_worker_keeps_nothing_that_names_a_place_in_a_group_of_fixed_size() -> None:
    environ = {**TORCHRUN, **MPI, **KEPT, "FARANDOLE_SLOT": "0"}
    assert sorted(leave_launcher(environ)) == sorted({**TORCHRUN, **MPI})
    assert environ == {**KEPT, "FARANDOLE_SLOT": "0"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LOCAL_RANK": "3"}, 3),  # a launcher that starts external workers
        ({"LOCAL_RANK": "3", "FARANDOLE_SLOT": "1"}, 1),  # `farandole run` within such a launcher
        ({"LOCAL_RANK": "-1"}, 0),  # what some launchers say for none
        ({}, 0),
    ],
)
def test_which_gpu_a_launcher_meant_is_kept(given: dict[str, str], expected: int) -> None:
    leave_launcher(given)
    assert "LOCAL_RANK" not in given
    assert slot(given) == expected


@pytest.mark.parametrize("text", ["-1", "first", "1.5"])
def test_a_slot_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="FARANDOLE_SLOT="):
        Settings.read({"FARANDOLE_SLOT": text})


@pytest.mark.failure(
    "External workers, pools and machines",
    "the script is started with `torchrun --nproc-per-node 4 train.py`",
    seen="an error with WORLD_SIZE and the command to use",
    outcome="nothing is trained, because each process would train the whole run",
)
def test_several_single_processes_of_another_launcher_are_no_run() -> None:
    """Each would train everything, with exit code 0."""
    with pytest.raises(UsageError, match="WORLD_SIZE=4"):
        refuse_launcher(TORCHRUN)
    refuse_launcher({**TORCHRUN, "WORLD_SIZE": "1"})
    refuse_launcher({"WORLD_SIZE": "2"})  # a name of the user's own
    refuse_launcher({})


@pytest.mark.failure(
    "External workers, pools and machines",
    (
        "a worker inherits variables of torchrun or mpirun (RANK, WORLD_SIZE, ...), from which Accelerate expects a "
        "fixed group"
    ),
)
def test_the_script_does_not_see_them(tmp_path: Path) -> None:
    Ticket(address="http://127.0.0.1:9", secret="0" * 64, run="r").save(tmp_path / "ticket")
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, sys\nprint(sorted(n for n in os.environ if n in {[*TORCHRUN]}), os.environ['FARANDOLE_SLOT'])\n"
        "sys.stdout.flush()\nos._exit(0)\n"
    )
    done = subprocess.run(
        [*FARANDOLE, "join", str(tmp_path / "ticket"), str(script)], env={**ENVIRON, **TORCHRUN}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[] 1\n"), done.stderr
    assert "WORLD_SIZE" in done.stderr
