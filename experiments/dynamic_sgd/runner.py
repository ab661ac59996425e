"""Does what is missing: each case a process of its own, two side by side, its result put on the shelf when it is done.

A case that is killed has no result and is done again by the next call; its neighbours go on. Whatever a process writes
on its way lies in a folder that goes with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.dynamic_sgd import shelf
from experiments.dynamic_sgd.cases import POLICIES, Case, Scale, by_samples, steps
from experiments.dynamic_sgd.measures import condense
from experiments.dynamic_sgd.tasks import ROOT, TASKS

SCRIPT = Path(__file__).resolve().parent / "train.py"


@dataclass(frozen=True, kw_only=True)
class Runner:
    """`paths`: where each task's data is. `jobs`: processes side by side, each on one thread. `minutes`: begin nothing
    after that; 0 for no end."""

    scale: Scale
    paths: dict[str, Path]
    jobs: int
    minutes: float = 0

    def run(self, wanted: Sequence[Case], console: Console) -> None:
        """Do those of `wanted` that have no result.

        Raises:
            SystemExit: some failed; their last lines are shown.
        """
        missing = [case for case in wanted if shelf.get(case, self.scale) is None]
        console.print(f"{len(wanted)} trainings, {len(missing)} to do; {self._estimate(wanted, missing)}")
        for name in dict.fromkeys(case.task for case in missing):  # decode once, not in two processes at a time
            for part, samples in (("train", self.scale.samples), ("test", self.scale.tested)):
                TASKS[name].load(self.paths[name], part, samples)
        failed = self._all(missing, console)
        if failed:
            raise SystemExit(f"{len(failed)} of {len(missing)} trainings failed: {', '.join(failed)}; run it again")

    def _estimate(self, wanted: Sequence[Case], missing: Sequence[Case]) -> str:
        seconds = {
            task: [result.seconds for case in wanted if case.task == task and (result := shelf.get(case, self.scale))]
            for task in {case.task for case in missing}
        }
        if not all(seconds.values()):
            return "how long that takes is known when one of each is done"
        left = sum(sum(seconds[case.task]) / len(seconds[case.task]) for case in missing) / self.jobs
        return f"about {left / 60:.0f} minutes, by those that are there"

    def _all(self, missing: Sequence[Case], console: Console) -> list[str]:
        failed: list[str] = []
        begun = time.monotonic()

        def do(case: Case) -> str | None:
            if self.minutes and time.monotonic() - begun > 60 * self.minutes:
                return None
            return self._one(case)

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Progress(*columns, TimeRemainingColumn(), console=console) as progress,
            ThreadPoolExecutor(self.jobs) as pool,
        ):
            bar = progress.add_task("trainings", total=len(missing))
            futures = {pool.submit(do, case): case for case in missing}
            try:
                for future in as_completed(futures):
                    case, error = futures[future], future.result()
                    progress.advance(bar)
                    if error:
                        failed.append(case.name)
                        console.print(f"{case.name}: {error}", markup=False)
                    elif result := shelf.get(case, self.scale):
                        console.print(f"{case.name}: test accuracy {result.accuracy:.2%}, {result.seconds:.0f} s")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # or an interrupt would go on with the next one
                raise
        return failed

    def _one(self, case: Case) -> str | None:
        """Train, and put the result on the shelf; what went wrong, or None."""
        scale = self.scale
        with tempfile.TemporaryDirectory(prefix="dynamic-sgd-") as name:
            folder = Path(name)
            changes = by_samples(case.history, scale.total, case.seed)
            history = steps(
                changes, POLICIES[case.policy](scale.base, scale.micro), length=scale.samples, epochs=scale.epochs
            )
            (folder / "history").write_text(history.text())
            told = {"HISTORY": folder / "history", "FOLDER": folder / "run", "SEED": case.seed, "THREADS": 1}
            command = [sys.executable, str(SCRIPT), case.task, str(self.paths[case.task]), "--policy", case.policy]
            done = subprocess.run(
                [*command, "--rate", str(case.rate), "--scale", scale.name],
                env=environment({f"FARANDOLE_{key}": str(value) for key, value in told.items()}),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                return f"exit code {done.returncode}\n{done.stderr[-2000:]}"
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
            shelf.put(case, scale, condense(map(json.loads, lines), scale.bin))
            return None


def environment(told: dict[str, str]) -> dict[str, str]:
    """For a process of the study: one thread, and this repository's root among the places of modules."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FARANDOLE_")}
    modules = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": modules, "OMP_NUM_THREADS": "1", **told}
