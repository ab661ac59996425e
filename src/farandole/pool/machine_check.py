"""Checks that this machine can run workers and a coordinator: the rows of `farandole doctor`.

A check returns what it has found, and a remedy unless all is well. `failed`: a run can't work. `warning`: a run works,
but slower, or not in every case. A check that raises has failed, so that a damaged installation is a row as well.
What needs torch is in the facts of `ssh_check.py`, which a process of its own has found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

import farandole
from farandole.errors import UsageError
from farandole.platform import files
from farandole.platform.extras import how_to_install
from farandole.pool.ssh_check import DISK_BYTES, HostFacts, HostReport, problems
from farandole.protocol import numeric_facts

SHM = Path("/dev/shm")
SHM_BYTES = 128 << 20  # containers get 64 MB unless they ask for more
OPEN_FILES = 1024  # the coordinator holds one for each connection
PROCESSES = 512  # of all workers and their loaders; threads count as well
NOT_FOR_USERS = {"dev", "bench", "study", "examples", "demo"}  # extras for the work on farandole itself
UNKNOWN = "unknown: farandole is not installed, so it has no metadata"
TIME_ERROR = 5  # adjtimex(2): the kernel's clock is not synchronised
_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[[^]]*\])?[^;]*?(?:[>=]=([\d.]+)[^;]*)?(?:;(.*))?""")
_EXTRA = re.compile(r"""extra == ['"]([\w-]+)['"]""")


class MachineCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `remedy`: "" if all is well."""

    name: str
    outcome: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""


class Machine(NamedTuple):
    """What is checked. `listen`: as for `farandole run`; `runs`: the folder of the runs' folders."""

    facts: HostFacts
    listen: str
    runs: Path


def machine_checks(machine: Machine) -> list[MachineCheck]:
    """Check this machine. Raises nothing."""
    return [checked(name, check, machine) for name, check in CHECKS.items()]


def host_checks(reports: Sequence[HostReport], own: HostFacts) -> list[MachineCheck]:
    """Return a row for each host that is ready, and one for each problem of the others."""
    return [row for report in reports for row in _host_rows(report, own)]


def _host_rows(report: HostReport, own: HostFacts) -> Iterator[MachineCheck]:
    name, found = f"host {report.line.name}", problems(report, own)
    for problem in found:
        yield MachineCheck(name=name, outcome="failed", found=problem.found, remedy=problem.remedy)
    if not found and report.facts is not None:
        facts = report.facts
        torch = facts.numerics.get(numeric_facts.TORCH, "")
        text = f"Python {facts.python}, torch {torch}, farandole {facts.farandole}, {facts.gpus} GPUs"
        others = f" and {len(report.ports) - 1} hosts" if len(report.ports) > 1 else ""
        text += f", clock {report.clock_s:+.2f} s, reaches this machine{others}"
        yield MachineCheck(name=name, outcome="ok", found=text)


def checked(name: str, check: Callable[[Machine], MachineCheck], machine: Machine) -> MachineCheck:
    """Return the row of one check, also if it raises."""
    try:
        row = check(machine)
    except UsageError as error:
        found, _, remedy = str(error).partition("; ")
        row = failed(found, remedy)
    except Exception as error:  # noqa: BLE001  a damaged installation may raise anything
        row = failed(f"{type(error).__name__}: {error}", "repair this first: the check itself could not be done")
    return msgspec.structs.replace(row, name=name)


def ok(found: str) -> MachineCheck:
    return MachineCheck(name="", outcome="ok", found=found)


def warning(found: str, remedy: str) -> MachineCheck:
    return MachineCheck(name="", outcome="warning", found=found, remedy=remedy)


def failed(found: str, remedy: str) -> MachineCheck:
    return MachineCheck(name="", outcome="failed", found=found, remedy=remedy)


# --- software ---------------------------------------------------------------------------------------------------------


def _system(machine: Machine) -> MachineCheck:
    found = f"{platform.system()} {platform.release()} {platform.machine()}, {machine.facts.cores} cores"
    if sys.platform != "linux":
        return warning(found, "farandole is tested on Linux only; use Linux, or a container")
    return ok(found)


def _python(machine: Machine) -> MachineCheck:
    del machine
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.implementation.name != "cpython" or sys.maxsize < 1 << 32:
        return failed(found, "use CPython for 64 bits: torch has no other")
    return ok(found)


def _farandole(machine: Machine) -> MachineCheck:
    del machine
    found = f"{farandole.__version__}, {Path(farandole.__file__).parent}"
    remedy = how_to_install("tls")
    try:
        installed = version("farandole")
    except PackageNotFoundError:
        return warning(f"{found}, not installed", f"{remedy}: processes in other folders do not find it otherwise")
    if installed != farandole.__version__:
        return warning(f"{found}, but version {installed} is installed", f"install it again: {remedy}")
    return ok(found)


class Requirement(NamedTuple):
    """A package that farandole requires: the first version that will do, "" for any, and the extra, "" for none."""

    package: str
    least: str
    extra: str


def requirements(texts: Sequence[str]) -> list[Requirement]:
    """Return the requirements in the metadata of farandole. Those of other Pythons and platforms are left out."""
    found: list[Requirement] = []
    for text in texts:
        match = _REQUIREMENT.fullmatch(text)
        marker = (match[3] or "") if match else ""
        extra = _EXTRA.search(marker)
        older = "python_version <" in marker and sys.version_info >= (3, 11)
        if match and match[1] != "farandole" and not older:
            found.append(Requirement(match[1], match[2] or "", extra[1] if extra else ""))
    return found


def unmet(requirement: Requirement) -> str:
    """Return what is wrong with the installed package, "" if nothing is."""
    try:
        installed = version(requirement.package)
    except PackageNotFoundError:
        return f"{requirement.package} is not installed"
    if _numbers(installed) < _numbers(requirement.least):
        return f"{requirement.package} {installed} is older than {requirement.least}"
    return ""


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def _required() -> list[Requirement]:
    try:
        return requirements(requires("farandole") or [])
    except PackageNotFoundError:
        return []


def _packages(machine: Machine) -> MachineCheck:
    del machine
    needed = [each for each in _required() if not each.extra and each.package != "torch"]
    if not needed:
        return ok(UNKNOWN)
    wrong = [text for text in map(unmet, needed) if text]
    if wrong:
        return failed("; ".join(wrong), f"install farandole again: {how_to_install('tls')}")
    return ok(", ".join(f"{each.package} {version(each.package)}" for each in needed))


def _extras(machine: Machine) -> MachineCheck:
    del machine
    extras: dict[str, list[str]] = {}
    required = _required()
    if not required:
        return ok(UNKNOWN)
    for each in required:
        if each.extra and each.extra not in NOT_FOR_USERS:
            extras.setdefault(each.extra, []).append(unmet(each))
    there = [name for name, wrong in extras.items() if not any(wrong)]
    missing = [name for name in extras if name not in there]
    found = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    old = [text for name in missing for text in extras[name] if "older" in text]
    if old:
        return warning("; ".join(old), f"if you use it: {how_to_install(missing[0])}")
    return ok(found)


def _torch(machine: Machine) -> MachineCheck:
    facts = machine.facts
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = ""
    if facts.without:
        again = " --force-reinstall" if installed else ""
        return failed(f"can't be loaded: {facts.without}", f"{sys.executable} -m pip install{again} torch")
    loaded = facts.numerics.get(numeric_facts.TORCH, "")
    found = f"{loaded}, built for {facts.build}"
    least = next((each for each in _required() if each.package == "torch"), None)
    if least is not None and _numbers(loaded) < _numbers(least.least):
        return failed(found, f"farandole needs torch {least.least} or newer: pip install --upgrade torch")
    if installed and _numbers(installed) != _numbers(loaded):
        return warning(f"{found}, but {installed} is installed", "remove one of both, such as a folder in PYTHONPATH")
    if not is_claimed(loaded, facts.build):
        return warning(f"{found}, which its version does not say", "install torch again")
    return ok(found)


def is_claimed(torch: str, build: str) -> bool:
    """Return False if the end of torch's version, as +cpu or +cu128, names another build."""
    local = torch.partition("+")[2]
    if local == "cpu":
        return build == "CPU"
    if re.fullmatch(r"cu\d+", local):
        return build.replace(".", "") == f"CUDA {local[2:]}"
    return True


def _gpus(machine: Machine) -> MachineCheck:
    return judge_gpus(machine.facts, len(_nvidia_devices()))


def judge_gpus(facts: HostFacts, there: int) -> MachineCheck:
    """Compare the GPUs that torch finds with the number of NVIDIA's devices that the system has."""
    if facts.without:
        return ok("unknown without torch")
    if not there and not facts.gpus:
        return ok("none")
    found = f"torch finds {facts.gpus}, the system has {there} of NVIDIA"
    if there and not facts.gpus:
        remedy = (
            "install torch built for CUDA" if facts.build == "CPU" else "check the driver, and CUDA_VISIBLE_DEVICES"
        )
        return warning(f"{found}; torch is built for {facts.build}", f"{remedy}; workers use the CPU otherwise")
    return ok(found)


def _nvidia_devices() -> list[Path]:
    return [path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]


# --- system -----------------------------------------------------------------------------------------------------------


def _shared_memory(machine: Machine) -> MachineCheck:
    del machine
    from farandole.data import shared_memory

    shared_memory.check()
    if sys.platform != "linux":
        return ok(f"no {SHM} on this system")
    space = os.statvfs(SHM)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{SHM}: {size / 1e6:.0f} MB, {free / 1e6:.0f} MB free"
    if free < SHM_BYTES:
        remedy = f"make it larger for loader processes: docker run --shm-size 1g, or mount -o remount,size=1g {SHM}"
        return warning(found, remedy)
    return ok(found)


def _worker_memory(machine: Machine) -> MachineCheck:
    if machine.facts.without:
        return ok("unknown without torch")
    if machine.facts.no_memory:
        return warning(
            f"workers of this host can't share memory: {machine.facts.no_memory}",
            "use Linux, and no limit of file sizes (ulimit -f unlimited); they use the network otherwise",
        )
    return ok("workers of this host can share memory (memfd)")


def _open_files(machine: Machine) -> MachineCheck:
    del machine
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, at most {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        return warning(
            found, f"raise it: LimitNOFILE={OPEN_FILES} of the service, or docker run --ulimit nofile={OPEN_FILES}"
        )
    return ok(found)


def _processes(machine: Machine) -> MachineCheck:
    del machine
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    free = free_processes()
    found = f"{_limit(soft)} for this user" + ("" if free is None else f", {free} left in this container or service")
    if soft != resource.RLIM_INFINITY and soft < PROCESSES and os.geteuid():
        return warning(found, f"raise it: ulimit -u {PROCESSES}")
    if free is not None and free < PROCESSES:
        return warning(found, f"raise it: docker run --pids-limit {2 * PROCESSES}, or TasksMax= of the service")
    return ok(found)


def free_processes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return how many processes the control group may still start, None if that is unlimited or unknown."""
    with contextlib.suppress(OSError, ValueError):
        paths = [line.partition("::")[2].strip("/") for line in own.read_text().splitlines() if line.startswith("0::")]
        for folder in (*(root / path for path in paths), root, root / "pids"):
            if (folder / "pids.max").exists():
                return int((folder / "pids.max").read_text()) - int((folder / "pids.current").read_text())
    return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _clock(machine: Machine) -> MachineCheck:
    del machine
    return judge_clock(_clock_state())


def judge_clock(state: int | None) -> MachineCheck:
    """`state`: the result of adjtimex(2), None if it is unknown."""
    if state is None:
        return ok("unknown: this system does not say if its clock is synchronised")
    if state == TIME_ERROR:
        return warning(
            "the kernel does not know that it is synchronised",
            "set it by NTP (chrony with rtcsync, or systemd-timesyncd): runs with several machines depend on it",
        )
    return ok("synchronised")


def _clock_state() -> int | None:
    """Return the result of adjtimex(2), which reads the state of the kernel's clock; None if it can't be read."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all 0: change nothing
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state


# --- places -----------------------------------------------------------------------------------------------------------


def _address(machine: Machine) -> MachineCheck:
    from farandole.control import security
    from farandole.coordinator import listener

    host, port = listener.parse(machine.listen)
    if not listener.is_loopback(host):
        security.check_available(machine.listen)
    with listener.bind(host, port) as server:
        at = listener.advertised(host).strip("[]")
        number = server.getsockname()[1]
        try:
            socket.create_connection((at, number), timeout=5.0).close()
        except OSError as error:
            return failed(f"this machine does not reach its own {at}:{number} ({error})", "open it in the firewall")
    scope = "this machine alone" if listener.is_loopback(host) else "other machines, if the network lets them"
    return ok(f"{at}, for {scope}; port {port or 'chosen by the system'}")


def _runs(machine: Machine) -> MachineCheck:
    place = machine.runs.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            files.take(file.fileno(), place, "use another disk")
    except files.NoFileLocks as error:
        return failed(str(error), "put the runs on another disk: --folder for `farandole run`")
    except OSError as error:
        return failed(f"{place}: {error.strerror}", "make it writable, or give --folder to `farandole run`")
    free = shutil.disk_usage(place).free
    found = f"{machine.runs}: {free / 1e9:.1f} GB free"
    if free < DISK_BYTES:
        return warning(found, "make room for checkpoints and logs: `farandole runs prune`")
    return ok(found)


CHECKS: dict[str, Callable[[Machine], MachineCheck]] = {
    "system": _system,
    "Python": _python,
    "farandole": _farandole,
    "packages": _packages,
    "extras": _extras,
    "torch": _torch,
    "GPUs": _gpus,
    "shared memory": _shared_memory,
    "worker memory": _worker_memory,
    "open files": _open_files,
    "processes": _processes,
    "clock": _clock,
    "address": _address,
    "runs": _runs,
}
