"""`jobs/small.py`, in whose bits every draw of a random number shows, as a run that a test steers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.jobs import small
from tests.support.harness import Elastic

SCRIPT = Path(__file__).parents[1] / "jobs" / "small.py"
OFTEN = ["--ledger", "--checkpoint-every", "5steps"]
EVERY_SAMPLE_ONCE = Counter((epoch, sample) for epoch in range(small.EPOCHS) for sample in range(small.SAMPLES))


class Job:
    """The job and its run's folder. Its steps are slow until `quick`."""

    def __init__(self, folder: Path) -> None:
        self.script = SCRIPT
        self.folder = folder / "run"
        self.pace, self.out = folder / "pace", folder / "out"
        self.pace.write_text("0.3")
        self.arguments = [str(self.out), "--pace", str(self.pace)]

    def run(self, workers: int, *options: str, folder: Path | None = None) -> Elastic:
        return Elastic(folder or self.folder, self.script, *self.arguments, workers=workers, options=[*options])

    def quick(self) -> None:
        self.pace.unlink()

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("*.pt"))


def until_checkpoints(run: Elastic, number: int) -> None:
    run.until(lambda: len(run.events("checkpoint")) >= number, f"{number} checkpoints")
