"""A run on a cluster, as the tests of each scheduler use it: a small job that is slow until it is hurried."""

from __future__ import annotations

from pathlib import Path

from tests.support.harness import Elastic

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
EPOCHS = ("--epochs", "30")


class Rig:
    """A run with a pace that `hurry` takes away. `workers`: how many it has, if a test does not say."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.out, self.pace = folder, folder / "out", folder / "pace"
        self._workers = workers
        self.pace.write_text("1.6")

    def run(self, pool: str, *options: str, workers: int = 0, epochs: tuple[str, ...] = EPOCHS) -> Elastic:
        job = (str(self.out), "--pace", str(self.pace), *epochs)
        return Elastic(
            self.folder / "run", JOB, *job, workers=workers or self._workers, deadline_s=200,
            options=["--pool", pool, *options],
        )  # fmt: skip

    def hurry(self) -> None:
        self.pace.unlink()


def states(run: Elastic, state: str) -> list[str]:
    """The hosts that have come into this state."""
    return [event["host"] for event in run.events("host") if event["state"] == state]
