"""What Slurm's commands print, and what it means: pure."""

from __future__ import annotations

import math

import pytest

from farandole.errors import UsageError
from farandole.pool.cluster import ENDING, GONE, PENDING, RUNNING
from farandole.pool.slurm import (
    SlurmKind,
    environment,
    failure_reason,
    in_doubt,
    listed_jobs,
    listed_steps,
    parse,
    seconds_left,
)
from farandole.protocol.settings import PoolTerms

MINE = "farandole-0123456789abcdef-"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name", "sinfo"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", "account="),
        ("sbatch: error: Invalid generic resource (gres) specification", "gres="),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "gres"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "scontrol ping"),
    ],
)
def test_an_error_is_one_line_in_slurm_s_words_with_the_remedy(output: str, words: str) -> None:
    reason = failure_reason(output, 1)
    assert "\n" not in reason
    assert words in reason.partition("; ")[2]
    assert reason.partition("; ")[0] in output


def test_an_error_without_a_known_remedy_is_slurm_s_last_line_and_none_is_the_code() -> None:
    assert failure_reason("sbatch: warning: a\nsbatch: error: it is a Monday\n\n", 1) == "it is a Monday"
    assert "7" in failure_reason("", 7)


@pytest.mark.parametrize(
    ("output", "doubt"),
    [
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: invalid partition specified: nope", False),
    ],
)
def test_a_command_without_an_answer_may_have_been_carried_out(output: str, doubt: bool) -> None:
    assert in_doubt(output) == doubt


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:30", 30), ("12:00", 720), ("1:00:00", 3600), ("2-03:04:05", 183_845), ("UNLIMITED", math.inf),
     ("NOT_SET", math.inf), ("INVALID", 0)],
)  # fmt: skip
def test_the_time_that_is_left_to_a_job(text: str, seconds: float) -> None:
    assert seconds_left(text) == seconds


def test_the_list_holds_this_pool_s_jobs_and_no_other_lines() -> None:
    output = f"""\
12|{MINE}a-1|RUNNING|9:30|n1|None
13|{MINE}a-2|PENDING|10:00||Resources
14|{MINE}a-3|COMPLETING|9:00|n2|None
15|{MINE}a-4|COMPLETED|9:00|n3|None
16|{MINE}a-5|NODE_FAIL|9:00|n3|None
17|farandole-fedcba9876543210-a-1|RUNNING|9:00|n4|None
18|somebody's | job|RUNNING|9:00|n4|None
slurm_load_jobs error: nothing
"""
    found = {unit.name: (unit.id, unit.state, unit.node) for unit in listed_jobs(output, MINE)}
    assert found == {
        "a-1": ("12", RUNNING, "n1"),
        "a-2": ("13", PENDING, ""),
        "a-3": ("14", ENDING, "n2"),
        "a-4": ("15", GONE, "n3"),
        "a-5": ("16", GONE, "n3"),
    }
    units = {unit.name: unit for unit in listed_jobs(output, MINE)}
    assert units["a-1"].left_s == 570
    assert units["a-3"].left_s == math.inf, "a job that ends is killed sooner than at its time limit"
    assert units["a-2"].reason == "Resources"


def test_the_steps_of_an_allocation() -> None:
    [unit] = listed_steps(f"7.batch|batch|n1\n7.0|{MINE}a-1|n1\n7.1|bash|n2\n", MINE, 60.0)
    assert (unit.name, unit.id, unit.node, unit.left_s) == ("a-1", "7.0", "n1", 60.0)


@pytest.mark.parametrize(
    ("gres", "slots"),
    [("", 1), ("gpu", 1), ("gpu:8", 8), ("gpu:a100:4", 4), ("gpu:a100:4,gpu:v100:2", 6), ("license:3", 1),
     ("gpu:h100", 1)],
)  # fmt: skip
def test_a_job_has_a_worker_for_each_gpu(gres: str, slots: int) -> None:
    terms = parse({"gres": gres} if gres else {}, "--pool slurm")
    assert terms.slots == slots
    assert terms.job_cpus(2) == 2 * slots


def test_a_job_has_one_node_is_never_requeued_and_asks_for_what_the_options_say() -> None:
    options = parse({"partition": "spot", "time": "60", "gres": "gpu:2", "size": "4"}, "--pool slurm").job_options(3)
    assert {"--nodes=1", "--ntasks=1", "--no-requeue", "--cpus-per-task=6"} < set(options)
    assert {"--partition=spot", "--time=60", "--gres=gpu:2"} < set(options)
    assert not [option for option in options if "size" in option]


def test_a_job_inherits_nothing_of_this_process_s_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF", "FARANDOLE_FOLDER", "OTHER"):
        monkeypatch.setenv(name, "7")
    assert {"SLURM_CONF", "OTHER"} <= set(environment("sbatch"))
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "FARANDOLE_FOLDER"} & set(environment("sbatch"))
    assert {"SLURM_JOB_ID", "SLURM_NTASKS"} <= set(environment("srun"))


def test_without_a_partition_an_allocation_is_used_and_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PoolTerms(name="slurm", kind="slurm")
    named = PoolTerms(name="slurm", kind="slurm", options={"partition": "low"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not SlurmKind().is_sized(plain)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert SlurmKind().is_sized(plain)
    assert not SlurmKind().is_sized(named)


def test_options_that_are_no_numbers_are_errors() -> None:
    for name in ("slots", "cpus"):
        with pytest.raises(UsageError, match=name):
            parse({name: "many"}, "--pool slurm")
