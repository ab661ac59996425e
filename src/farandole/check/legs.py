"""The processes of `farandole check`: single processes, and one run.

The run is ended as soon as its records are complete, or differ from those of the single process.

A single process is `farandole check` once more, with a hidden option. It leaves the script's traceback in a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from farandole.bench import child
from farandole.bench.measuring import Quiet, settings_of
from farandole.bench.terms import BenchTerms
from farandole.check import records
from farandole.check.findings import findings_of_bits, is_complete
from farandole.check.records import JOIN, RUN, CheckTerms, Leg, Record
from farandole.cli.supervisor import Supervisor
from farandole.control.run_folder import CHECKPOINTS
from farandole.errors import FarandoleError, UsageError
from farandole.platform import cpu, files
from farandole.platform.process import die_with_parent, up_to
from farandole.pool.local import load_ahead
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Roster

FAILURE, OUTPUT = "failure", "output"  # files: why a single process has failed, and what it has printed
WATCH_S = 0.1  # interval at which the records are read
END_S = 5.0


class ScriptRaised(FarandoleError):
    """The script has failed in a single process. The text is its traceback."""


class Legs:
    """The processes of one check of `command`, in a temporary `folder`."""

    def __init__(self, folder: Path, command: Sequence[str], *, workers: int, threads: int, seed: int) -> None:
        self.folder, self._command = folder, tuple(command)
        self._workers, self._threads, self._seed = workers, threads, seed
        files.make(folder / RUN / CHECKPOINTS)
        (folder / "history").write_text(f"0 {workers}\n{JOIN} {workers + 1}\n")

    def load_ahead(self) -> None:
        """Have torch loaded for the workers of the run meanwhile."""
        os.environ |= records.environment(self._terms("workers"))
        load_ahead(self._threads, {**os.environ, **cpu.environment_of("same")})

    def alone(self, *legs: Leg) -> None:
        """Run single processes at the same time, to their end.

        Raises:
            ScriptRaised, UsageError, FarandoleError: one has failed, with the script's error or with ours.
        """
        child.exit_on_sigterm()
        started = dict[Leg, subprocess.Popen[bytes]]()
        try:
            for leg in legs:
                started[leg] = self._start(leg)
            for leg, process in started.items():
                if process.wait() != 0:
                    raise self._failure(leg, process.returncode)
        finally:
            for process in started.values():
                if process.poll() is None:
                    child.end(process, END_S)

    def run(self) -> int:
        """Run the leg `workers`. Returns 0, or the exit code of a run that was interrupted or has failed."""
        terms = BenchTerms(workers=self._workers + 1, steps=1, rounds=1)
        settings = settings_of(self.folder / "workers", self._command, terms, self._threads)
        settings = msgspec.structs.replace(settings, minimum=self._workers, seed=self._seed)
        return _CheckedRun(settings, self.folder, self._workers).supervise()

    def records(self, leg: Leg) -> list[Record]:
        return records.read(self.folder, leg)

    def _terms(self, leg: Leg) -> CheckTerms:
        return CheckTerms(leg=leg, workers=self._workers, folder=str(self.folder))

    def _start(self, leg: Leg) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ, **cpu.environment_of("same"), **records.environment(self._terms(leg)),
            "FARANDOLE_TICKET": "", "FARANDOLE_FOLDER": "", "FARANDOLE_HISTORY": str(self.folder / "history"),
            "FARANDOLE_SEED": str(self._seed), "FARANDOLE_THREADS": str(self._threads), "FARANDOLE_BITS": "same",
        }  # fmt: skip
        words = [sys.executable, "-m", "farandole", "check", "--die-with", str(os.getpid()), *self._command]
        with (self.folder / f"{leg}.{OUTPUT}").open("wb") as output:
            return subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _failure(self, leg: Leg, code: int) -> FarandoleError:
        try:
            return msgspec.json.decode((self.folder / f"{leg}.{FAILURE}").read_bytes(), type=Failure).error()
        except FileNotFoundError:
            output = (self.folder / f"{leg}.{OUTPUT}").read_text(errors="replace")
            return ScriptRaised(f"{output}the process ended with exit code {code}")


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a single process has failed. `kind`: script for an exception of the script, usage and other for ours."""

    kind: str
    text: str

    def error(self) -> FarandoleError:
        kinds = {"script": ScriptRaised, "usage": UsageError}
        return kinds.get(self.kind, FarandoleError)(self.text)


def run_alone(script: str, arguments: list[str], parent: int) -> NoReturn:
    """Run the script in this process, which process `parent` has started, by the terms in its environment."""
    die_with_parent(parent)
    from farandole import script as launcher
    from farandole.check import loop

    text = os.environ[records.VARIABLE]
    terms = records.terms_of(text)
    loop.begin(text)
    failure: Failure | None = None
    try:
        launcher.run_alone(script, arguments)
    except FarandoleError as error:
        failure = Failure(kind="usage" if isinstance(error, UsageError) else "other", text=str(error))
    except BaseException as error:  # noqa: BLE001  any exception of the script is reported to the parent
        failure = Failure(kind="script", text=launcher.traceback_of(error, script))
    if failure is not None:
        files.write(Path(terms.folder, f"{terms.leg}.{FAILURE}"), msgspec.json.encode(failure))
    sys.exit(failure is not None)


class _CheckedRun(Supervisor):
    """The run. All of its processes are killed as soon as enough is known."""

    def __init__(self, settings: RunSettings, folder: Path, workers: int) -> None:
        super().__init__(settings, settings.command[0], settings.command[1:], Quiet(sys.stdout))
        self._records_folder, self._workers = folder, workers
        self._alone = records.read(folder, "alone")

    async def _enough(self) -> None:
        while not self._forced.is_set() and not self._is_enough():
            await up_to(WATCH_S, self._forced)

    def _is_enough(self) -> bool:
        found = records.read(self._records_folder, "workers")
        unlike = any(each.outcome == "differs" for each in findings_of_bits(self._alone, found, ()))
        return unlike or is_complete(found, self._workers)

    def _ended(self, roster: Roster | None) -> int:
        """A run that has ended by itself is no failure if the records say why."""
        return self._code or (0 if self._is_enough() else super()._ended(roster))

    def _on_signal(self, signum: int) -> None:
        self._code = self._code or 128 + signum
        self._forced.set()
