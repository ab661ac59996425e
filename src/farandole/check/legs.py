"""The processes of `farandole check`: single processes, and one run.

The run is ended as soon as its records are complete, or differ from those of the single process.

A single process is `farandole check` once more, with a hidden option, forked from one that has loaded torch. It leaves
the script's traceback in a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
from farandole.platform.process import SUPPORTED, Command, Forked, ForkServer, Lifeline, die_with_parent, up_to
from farandole.pool.local import LOADED, SERVER, load_ahead
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Roster

FAILURE, OUTPUT = "failure", "output"  # files: why a single process has failed, and what it has printed
WATCH_S = 0.1  # interval at which the records are read


class ScriptRaised(FarandoleError):
    """The script has failed in a single process. The text is its traceback."""


class Legs:
    """The processes of one check of `command`, in a temporary `folder`. Call `close` in the end."""

    def __init__(self, folder: Path, command: Sequence[str], *, workers: int, threads: int, seed: int) -> None:
        self.folder, self._command = folder, tuple(command)
        self._workers, self._threads, self._seed = workers, threads, seed
        files.make(folder / RUN / CHECKPOINTS)
        (folder / "history").write_text(f"0 {workers}\n{JOIN} {workers + 1}\n")
        os.environ |= records.environment(self._terms("workers")) | cpu.environment_of("same")
        load_ahead(threads, os.environ)  # for the workers of the run
        self._environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._server = ForkServer.start(SERVER, LOADED, self._environ) if SUPPORTED else None
        self._lifelines: list[Lifeline] = []
        self._ready = False

    def close(self) -> None:
        """End what still runs."""
        for lifeline in self._lifelines:
            lifeline.cut()
        if self._server is not None:
            self._server.close()

    def alone(self, *legs: Leg) -> None:
        """Run single processes at the same time, to their end.

        Raises:
            ScriptRaised, UsageError, FarandoleError: one has failed, with the script's error or with ours.
        """
        child.exit_on_sigterm()
        started: dict[Leg, subprocess.Popen[bytes] | Forked] = {leg: self._start(leg) for leg in legs}
        for leg, process in started.items():
            if code := process.wait():
                raise self._failure(leg, code)

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

    def _start(self, leg: Leg) -> subprocess.Popen[bytes] | Forked:
        environ = {
            **self._environ, **records.environment(self._terms(leg)),
            "FARANDOLE_TICKET": "", "FARANDOLE_FOLDER": "", "FARANDOLE_HISTORY": str(self.folder / "history"),
            "FARANDOLE_SEED": str(self._seed), "FARANDOLE_THREADS": str(self._threads), "FARANDOLE_BITS": "same",
        }  # fmt: skip
        words = ["-m", "farandole", "check", "--die-with", str(os.getpid()), *self._command]
        with (self.folder / f"{leg}.{OUTPUT}").open("wb") as out, open(os.devnull, "rb") as null:
            if self._server is not None:
                self._ready = self._ready or self._server.receive() == {"unfit": ""}
                if self._ready:
                    return self._fork(self._server, words, environ, (null.fileno(), out.fileno(), out.fileno()))
            return subprocess.Popen([sys.executable, *words], env=environ, stdin=null, stdout=out, stderr=out)

    def _fork(
        self, server: ForkServer, words: Sequence[str], environ: Mapping[str, str], streams: tuple[int, int, int]
    ) -> Forked:
        lifeline = Lifeline()
        self._lifelines.append(lifeline)
        server.ask(Command(words=words, environ=environ, folder=str(Path.cwd())), streams, lifeline)
        answer = server.receive() or {}
        lifeline.handed_over()
        if "pid" not in answer:
            raise FarandoleError(f"a process can't be forked: {answer.get('error', 'the fork server has ended')}")
        return Forked(answer["pid"])

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
    except SystemExit:  # of the script, or of the loop after its steps: the output says why
        raise
    except BaseException as error:  # noqa: BLE001  any exception of the script is reported to the parent
        failure = Failure(kind="script", text=launcher.traceback_of(error, sys.argv[0]))
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
