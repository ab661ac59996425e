"""The checks of `farandole doctor`: what is ok, a warning or failed, and that everything else has a remedy."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farandole import __version__
from farandole.numerics import settings
from farandole.pool import ssh_check
from farandole.pool.machine_check import (
    CHECKS,
    TIME_ERROR,
    Machine,
    MachineCheck,
    Requirement,
    checked,
    free_processes,
    host_checks,
    is_claimed,
    judge_clock,
    judge_gpus,
    machine_checks,
    requirements,
    unmet,
)
from farandole.pool.ssh import REMEDIES, HostLine, RemoteCommand
from farandole.pool.ssh_check import HostFacts, HostReport
from farandole.protocol import numeric_facts
from tests.support.pages import ROOT

TORCH, BUILD = str(torch.__version__), settings.build()


def facts(version: str = TORCH, build: str = BUILD, **others: object) -> HostFacts:
    known = {"python": "3.11.7", "farandole": __version__, "cores": 2, "free_bytes": 10**11}
    return HostFacts(**{**known, "build": build, "numerics": {numeric_facts.TORCH: version}, **others})  # pyright: ignore


def machine(given: HostFacts | None = None, listen: str = "127.0.0.1", runs: Path = Path("runs")) -> Machine:
    return Machine(given or facts(), listen, runs)


def row(name: str, given: Machine) -> MachineCheck:
    found = checked(name, CHECKS[name], given)
    assert found.name == name
    assert bool(found.remedy) == (found.outcome != "ok")
    return found


def test_each_check_is_a_row_with_a_remedy_unless_all_is_well(tmp_path: Path) -> None:
    rows = machine_checks(machine(runs=tmp_path / "runs"))
    assert [each.name for each in rows] == [*CHECKS]
    for each in rows:
        assert each.found
        assert bool(each.remedy) == (each.outcome != "ok")
    outcome = {each.name: each.outcome for each in rows}
    for name in ("Python", "packages", "torch", "worker memory", "address", "runs"):
        assert outcome[name] == "ok", rows
    assert not (tmp_path / "runs").exists(), "it only looks"


def test_a_check_that_raises_has_failed() -> None:
    def broken(given: Machine) -> MachineCheck:
        raise AttributeError(f"module has no attribute {given.listen}")

    found = checked("broken", broken, machine())
    assert (found.name, found.outcome) == ("broken", "failed")
    assert "127.0.0.1" in found.found
    assert found.remedy


@pytest.mark.parametrize(
    ("given", "outcome", "names"),
    [
        (facts(), "ok", TORCH),
        (facts(without="No module named 'torch'"), "failed", "No module named 'torch'"),
        (facts(version="1.13.1"), "failed", "1.13.1"),
        (facts(version="2.9.1"), "failed", "2.9.1"),
        (facts(version="99.0.0"), "warning", "99.0.0"),
        (facts(version=TORCH.partition("+")[0] + "+cu128", build="CPU"), "warning", "CPU"),
    ],
)
def test_torch(given: HostFacts, outcome: str, names: str) -> None:
    found = row("torch", machine(given))
    assert found.outcome == outcome
    assert names in found.found


@pytest.mark.parametrize(
    ("version", "build", "claimed"),
    [
        ("2.13.0", "CPU", True),
        ("2.13.0", "CUDA 12.8", True),
        ("2.13.0+cpu", "CPU", True),
        ("2.13.0+cpu", "CUDA 12.8", False),
        ("2.13.0+cu128", "CUDA 12.8", True),
        ("2.13.0+cu128", "CUDA 13.0", False),
        ("2.13.0+cu128", "CPU", False),
        ("2.13.0a0+gitabc", "CPU", True),
    ],
)
def test_the_build_that_a_version_claims(version: str, build: str, claimed: bool) -> None:
    assert is_claimed(version, build) is claimed


@pytest.mark.parametrize(
    ("build", "gpus", "there", "outcome"),
    [
        ("CPU", 0, 0, "ok"),
        ("CUDA 12.8", 0, 0, "ok"),
        ("CUDA 12.8", 2, 2, "ok"),
        ("CUDA 12.8", 1, 2, "ok"),  # CUDA_VISIBLE_DEVICES
        ("CUDA 12.8", 0, 2, "warning"),
        ("CPU", 0, 2, "warning"),
    ],
)
def test_gpus_that_torch_does_not_find(build: str, gpus: int, there: int, outcome: str) -> None:
    found = judge_gpus(facts(build=build, gpus=gpus), there)
    assert found.outcome == outcome
    assert ("CUDA_VISIBLE_DEVICES" in found.remedy) == (outcome == "warning" and build != "CPU")


@pytest.mark.parametrize(("state", "outcome"), [(0, "ok"), (4, "ok"), (TIME_ERROR, "warning"), (None, "ok")])
def test_the_clock(state: int | None, outcome: str) -> None:
    assert judge_clock(state).outcome == outcome


def test_workers_that_can_not_share_memory() -> None:
    found = row("worker memory", machine(facts(no_memory="File too large")))
    assert found.outcome == "warning"
    assert "File too large" in found.found


# --- packages ---------------------------------------------------------------------------------------------------------


def test_the_metadata_of_requirements_is_read() -> None:
    texts = [
        "torch>=2.10", "msgspec>=0.19", "transformers<5.25,>=5.24; extra == \"transformers\"",
        "moto[server]>=5; extra == 'dev'", "efficientnet-lite-pytorch==0.1.0; extra == \"examples\"",
        "torchvision; extra == \"examples\"", "farandole[demo]; extra == \"dev\"",
    ]  # fmt: skip
    assert requirements(texts) == [
        Requirement("torch", "2.10", ""),
        Requirement("msgspec", "0.19", ""),
        Requirement("transformers", "5.24", "transformers"),
        Requirement("moto", "5", "dev"),
        Requirement("efficientnet-lite-pytorch", "0.1.0", "examples"),
        Requirement("torchvision", "", "examples"),
    ]
    old = requirements(['tomli>=2.0; python_version < "3.11"'])
    assert old == ([] if sys.version_info >= (3, 11) else [Requirement("tomli", "2.0", "")])


def test_each_requirement_of_the_project_is_read_with_its_first_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    lines = re.findall(r'^    "(.*?)"(?:,|$)', block, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        for found in requirements([line]):
            assert line.startswith(found.package)
            assert found.least
            assert found.least in line


@pytest.mark.parametrize(
    ("package", "least", "wrong"),
    [("pytest", "1.0", False), ("pytest", "", False), ("pytest", "999.1", True), ("no-such-package", "1", True)],
)
def test_a_package_that_is_missing_or_too_old_is_named(package: str, least: str, wrong: bool) -> None:
    assert (package in unmet(Requirement(package, least, ""))) == wrong


# --- places -----------------------------------------------------------------------------------------------------------


def test_an_address_that_can_not_be_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = row("address", machine(listen=f"127.0.0.1:{port}"))
        assert found.outcome == "failed"
        assert str(port) in found.found
    assert row("address", machine(listen=f"127.0.0.1:{port}")).outcome == "ok"
    assert row("address", machine(listen="192.0.2.7")).outcome == "failed", "no address of this machine"


def test_a_folder_that_can_not_be_used(tmp_path: Path) -> None:
    assert row("runs", machine(runs=tmp_path / "not" / "there")).outcome == "ok"
    found = row("runs", machine(runs=Path("/proc/self/runs")))  # nobody may create a file there
    assert found.outcome == "failed"
    assert "/proc" in found.found


@pytest.mark.parametrize(
    ("inside", "limit", "used", "left"),
    [("", "200", "150", 50), ("", "max", "150", None), ("a.slice/b.service", "1000", "10", 990), (None, "", "", None)],
)
def test_processes_that_a_control_group_may_start(
    tmp_path: Path, inside: str | None, limit: str, used: str, left: int | None
) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(f"0::/{inside or ''}\n")
    root.mkdir()
    if inside is not None:
        (root / inside).mkdir(parents=True, exist_ok=True)
        (root / inside / "pids.max").write_text(f"{limit}\n")
        (root / inside / "pids.current").write_text(f"{used}\n")
    assert free_processes(root, own) == left


# --- hosts ------------------------------------------------------------------------------------------------------------


def test_each_problem_of_a_host_is_a_row() -> None:
    def report(name: str, **found: object) -> HostReport:
        return HostReport(line=HostLine(name=name, address=name), **found)  # pyright: ignore

    refused, remedy = "Permission denied (publickey).", REMEDIES["Permission denied"]
    rows = host_checks(
        [
            report("good", facts=facts(), ports={"good2": "", "": ""}, clock_s=0.2),
            report("closed", error=f"{refused}: {remedy}"),
            report("gone", error="Connection refused"),
            report("late", facts=facts(), clock_s=60.0, within_s=0.1, ports={"": "timed out"}),
            report("old", facts=facts(farandole="0.0.1", without="no torch")),
        ],
        facts(),
    )
    assert [(each.name, each.outcome) for each in rows] == [
        ("host good", "ok"),
        ("host closed", "failed"),
        ("host gone", "failed"),
        ("host late", "failed"),
        ("host late", "failed"),
        ("host old", "failed"),
        ("host old", "failed"),
    ]
    assert (rows[1].found, rows[1].remedy) == (refused, remedy)
    assert (rows[0].remedy, rows[2].found) == ("", "Connection refused")
    assert all(each.remedy for each in rows[1:])
    assert "+60 s" in rows[3].found
    assert "timed out" in rows[4].found


BROKEN: list[tuple[str, Callable[[str], bool]]] = [
    ("raise RuntimeError('the numpy of this torch is another')", lambda found: "the numpy of this torch" in found),
    ("import os; os.abort()", lambda found: "-6" in found),
    ("raise SystemExit(3)", bool),
]


@pytest.mark.processes
@pytest.mark.parametrize(("source", "says"), BROKEN)
def test_a_torch_that_can_not_be_loaded_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: Callable[[str], bool]
) -> None:
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = asyncio.run(ssh_check.local_facts(RemoteCommand()))
    assert says(found.without), found
    assert row("torch", machine(found)).outcome == "failed"


@pytest.mark.long
@pytest.mark.processes
def test_the_own_port_of_a_survey_is_the_one_that_is_asked_for() -> None:
    local = HostLine(name="localhost", address="localhost")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [taken] = asyncio.run(ssh_check.survey([local], RemoteCommand(), ("127.0.0.1", port)))
    [free] = asyncio.run(ssh_check.survey([local], RemoteCommand(), ("127.0.0.1", port)))
    assert taken.ports[""]
    assert free.ports[""] == ""
    assert free.facts is not None
    assert (free.facts.build, free.facts.without, free.facts.no_memory) == (BUILD, "", "")
