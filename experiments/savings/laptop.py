"""A real training under a trace played fast, and what the simulation says of it: both accounts side by side.

The trace's intervals take `SECONDS` seconds each, and a machine is a process of this machine (`trace_pool.py`). First
`farandole bench scaling` measures the speeds. Then the training runs with `farandole run`, and the simulation plays the
same job on the same part of the trace, with the speeds and the mean start that were measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec

from experiments.savings.trace_pool import counts_of
from farandole.cli.deadline import OnDemandTarget
from farandole.market.play import Machines, Moment, PlannedJob, Played, Price, Strategy, play
from farandole.market.pools import PoolsOfRun
from farandole.market.speeds import speeds_of
from farandole.market.strategies import FarandoleSpot
from farandole.market.traces import MarketTrace, SpotMarket
from farandole.protocol.events import HostEvent, PricedEvent, StartingEvent, ViewEvent
from farandole.protocol.metrics import Line, StepLine, parse_lines

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "experiments/savings/train.py"
SPOT_MACHINES, RESERVE_MACHINES = 4, 2
SECONDS = 10
START_S = 1.0  # until a machine's process is started; the process then takes some seconds
ASSUMED_START_S = 10  # before an on-demand machine has started
PRICE = Price(on_demand=3.06, spot=0.97)
STEPS = 360  # of the training
TRACE, FIRST, DEADLINE_S = "skypilot/us-east-2b_v100_1.json", 480, 170
WORKERS = range(1, SPOT_MACHINES + RESERVE_MACHINES + 1)


class MachineTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a training came to. All values are in seconds of machines, but `time_s` and `dollars`.

    `time_s`: from the first request for a machine to the end of the last step.
    """

    time_s: float
    spot_s: float
    on_demand_s: float
    start_s: float
    compute_s: float
    dollars: float


class LaptopResult(msgspec.Struct, frozen=True, kw_only=True):
    """One way of training: what the run came to, and what the simulation says."""

    strategy: str
    run: MachineTime
    simulated: MachineTime
    start_s: float
    accuracy: float
    steps_repeated: int


@dataclass(frozen=True, kw_only=True)
class LaptopRun:
    """A run: its figures, the mean start of its machines, its accuracy, and the samples and steps of all step lines."""

    figures: MachineTime
    start_s: float
    accuracy: float
    samples: int
    steps: int


def environ_with_pool(folder: Path) -> dict[str, str]:
    """Return the environment of a `farandole run` that knows the pool `played`, from a package in `folder`."""
    info = folder / "savings_pool-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: savings-pool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[farandole.pools]\nplayed = experiments.savings.trace_pool:KIND\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def measure(folder: Path, environ: dict[str, str]) -> Path:
    """Measure the speeds of all numbers of workers, and return the file."""
    path = folder / "scaling.json"
    command = ["bench", "scaling", "--workers", ",".join(map(str, WORKERS)), "--mode", "strong", "--steps", "12"]
    _farandole([*command, "--json", str(path), TRAIN], environ)
    return path


def train(
    folder: Path, environ: dict[str, str], trace: Path, first: int, deadline_s: int | None, speeds: Path
) -> LaptopRun:
    """Train under the trace from interval `first` on, and return what it came to. None: no deadline, spot only."""
    options = (
        f"machines={SPOT_MACHINES},start={START_S},price={PRICE.spot},trace={trace},first={first},seconds={SECONDS}"
    )
    command = ["run", "--folder", str(folder), "--pool", f"played,name=spot,size={SPOT_MACHINES},{options}"]
    if deadline_s is not None:
        reserve = f"machines={RESERVE_MACHINES},start={START_S},price={PRICE.on_demand}"
        command += ["--pool", f"played,name=reserve,size={RESERVE_MACHINES},{reserve}"]
        command += ["--deadline", f"{deadline_s}s", "--speeds", str(speeds), "--start", f"{ASSUMED_START_S}s"]
    printed = _farandole([*command, TRAIN], environ)
    lines, _ = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    accuracy = next(float(line.split()[-1]) for line in printed.splitlines() if " accuracy " in line)
    figures, start_s = account(lines)
    steps = [line.samples for line in lines if isinstance(line, StepLine)]
    return LaptopRun(figures=figures, start_s=start_s, accuracy=accuracy, samples=sum(steps), steps=len(steps))


def account(lines: Sequence[Line]) -> tuple[MachineTime, float]:
    """Return what the machines of a run came to, and the mean of their starts in seconds.

    A machine is paid from its request (`PricedEvent`) until it is gone, or the last step has ended. It starts until it
    is in a view.
    """
    end = max(line.time for line in lines if isinstance(line, StepLine))
    host_of = {line.worker: line.host for line in lines if isinstance(line, StartingEvent)}
    requested, views = dict[str, float](), dict[str, float]()
    spans = list[tuple[str, float, float, float]]()  # pool, request, view, end

    def close(host: str, pool: str, when: float) -> None:
        if host in requested:
            since, until = requested.pop(host), min(when, end)
            spans.append((pool, since, min(views.pop(host, until), until), until))

    pools = dict[str, str]()
    for line in lines:
        if isinstance(line, PricedEvent) and line.since < end:
            requested[line.host], pools[line.host] = line.since, line.pool
        elif isinstance(line, ViewEvent):
            for worker in line.members:
                if (host := host_of.get(worker)) in requested:
                    views.setdefault(host, line.time)
        elif isinstance(line, HostEvent) and line.state == "gone":
            close(line.host, line.pool, line.time)
    for host in [*requested]:
        close(host, pools[host], end)
    paid = {pool: sum(until - since for of, since, _, until in spans if of == pool) for pool in ("spot", "reserve")}
    start_s = sum(view - since for _, since, view, _ in spans)
    figures = MachineTime(
        time_s=end - min(since for _, since, _, _ in spans), spot_s=paid["spot"], on_demand_s=paid["reserve"],
        start_s=start_s, compute_s=sum(paid.values()) - start_s,
        dollars=(paid["spot"] * PRICE.spot + paid["reserve"] * PRICE.on_demand) / 3600,
    )  # fmt: skip
    return figures, mean(view - since for _, since, view, until in spans if view < until)


class RunRule(Strategy):
    """As many spot machines as there are, and on-demand machines by the rule of `farandole run --deadline` itself."""

    any_number = True

    def __init__(self, job: PlannedJob) -> None:
        super().__init__(job)
        assert job.deadline_s is not None
        self._target = OnDemandTarget(
            pool="reserve", most=RESERVE_MACHINES, start_s=ASSUMED_START_S, begins=0.0, deadline=job.deadline_s,
            speeds=job.speeds,
        )  # fmt: skip
        self._pools = PoolsOfRun(job.most)
        self._done, self._running, self._workers = 0, 0, 0

    def decide(self, now: Moment) -> Machines:
        running = sum(start_s == 0 for start_s in now.starts_s)
        if running != self._running:
            members = tuple(f"reserve-w{number}" for number in range(running))
            self._target.take(ViewEvent(view=1, members=members, round=0, step=0, cause="", time=now.time_s))
            self._running = running
        done = int(STEPS * (1 - now.left_s / self.job.work_s))
        for step in range(self._done, done):
            took_s = self.job.work_s / STEPS / self.job.speed(self._workers)
            self._target.take(
                StepLine(
                    step=step, epoch=0, samples=1, loss=None, seconds=took_s, samples_per_s=None, view=1,
                    workers=self._workers, time=now.time_s, total=STEPS, factor=None,
                )
            )  # fmt: skip
        self._done = done
        fleet = self._pools.decide(now, on_demand=self._target.decide(now.time_s).count)
        self._workers = sum(fleet.spot) + fleet.on_demand
        return fleet


def simulated(run: LaptopRun, trace: Path, first: int, deadline_s: int | None, speeds: Path) -> MachineTime:
    """Return what the simulation says of the same job: decisions each second, as in a run."""
    counts = counts_of({"trace": str(trace), "first": str(first), "machines": str(SPOT_MACHINES)})
    each_second = tuple(count for count in counts for _ in range(SECONDS))
    part = MarketTrace(name=trace.stem, gap_s=1, counts=each_second[:deadline_s])
    relative = speeds_of(speeds, len(WORKERS) if deadline_s else SPOT_MACHINES).relative
    job = PlannedJob(
        work_s=round(run.samples / rate_of_one(speeds)),
        start_s=round(run.start_s),
        deadline_s=deadline_s,
        speeds=relative,
    )
    result = play(job, SpotMarket(zones=(part,)), PRICE, RunRule if deadline_s else FarandoleSpot)
    return of_played(result)


def rate_of_one(path: Path) -> float:
    """Return the samples a second of one worker, from a file of `farandole bench scaling --json`."""
    rows = msgspec.json.decode(path.read_bytes())
    return next(row["samples_per_s"] for row in rows if row["run"]["workers"] == 1)


def of_played(result: Played) -> MachineTime:
    assert result.done_s is not None, "the part of the trace is too short"
    return MachineTime(
        time_s=result.done_s, spot_s=result.paid_s["spot"], on_demand_s=result.paid_s["on demand"],
        start_s=result.seconds["start"], compute_s=result.seconds["compute"], dollars=result.dollars,
    )  # fmt: skip


def run(folder: Path, trace: Path) -> Iterator[LaptopResult]:
    """Measure, train twice, and yield a result each. `folder`: for what the runs leave behind."""
    environ = environ_with_pool(folder / "packages")
    speeds = measure(folder, environ)
    for name, deadline_s in (("farandole, spot", None), ("farandole run --deadline", DEADLINE_S)):
        found = train(folder / f"run-{deadline_s or 0}", environ, trace, FIRST, deadline_s, speeds)
        yield LaptopResult(
            strategy=name, run=found.figures, simulated=simulated(found, trace, FIRST, deadline_s, speeds),
            start_s=found.start_s, accuracy=found.accuracy, steps_repeated=found.steps - STEPS,
        )  # fmt: skip


def _farandole(words: Sequence[str], environ: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "farandole", *words], env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"farandole {' '.join(words)}: {done.stdout[-3000:]}")
    return done.stdout
