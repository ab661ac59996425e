"""How quick the dashboard is with many workers and steps, in a real Chromium: from metrics.jsonl to the page.

    python benchmarks/dashboard.py [--workers 1000] [--steps 1000000] [--seconds 30]

It writes the lines of such a run, opens the dashboard on it, and lets the run go on: ten steps a second, a worker lost
and one that joins every second. Printed: until all lines are read; the first picture from the arrival of its data until
it is on the screen; each tick on the page; a tick's making, and its size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
from playwright.async_api import async_playwright

from farandole.control.run_folder import METRICS
from farandole.control.status import CoordinatorStatus, Status, ViewStatus, WorkerStatus
from farandole.observe import story
from farandole.observe.dashboard import DashboardServer, RunWatch

BEGAN = 1_700_000_000.0
LOSSES_S = 1.0


class Lines:
    """Of a run of `workers`, of which one is lost and replaced every now and then."""

    def __init__(self, path: Path, workers: int) -> None:
        self.file = path.open("a")
        self.time = BEGAN
        self.step = 0
        self.view = 1
        self.born = 0
        self.members = [self.start() for _ in range(workers)]
        self.agree("first view")

    def say(self, **line: object) -> None:
        self.file.write(json.dumps(line) + "\n")

    def start(self) -> str:
        self.born += 1
        name = f"w{self.born}"
        self.say(event="starting", time=self.time, worker=name, host=f"host-{self.born % 250}", pid=self.born)
        return name

    def agree(self, cause: str) -> None:
        self.say(event="view", time=self.time, view=self.view, members=self.members, round=self.step, step=self.step,
                 cause=cause)  # fmt: skip
        self.view += 1

    def strike(self) -> None:
        """One is lost, another one comes."""
        victim = self.members.pop(self.born % len(self.members))
        self.say(event="lost", time=self.time, worker=victim, host="", reason="killed by signal 9")
        self.agree(f"{victim}: killed by signal 9")
        self.members.append(self.start())
        self.agree(f"{self.members[-1]} joins")

    def take(self, steps: int) -> None:
        for _ in range(steps):
            self.time += 0.1
            loss = 2.0 / (1 + self.step / 5000) + 0.05 * (self.step * 7919 % 101) / 101
            self.say(
                step=self.step, epoch=self.step // 1000, samples=4096, loss=loss, seconds=0.1, samples_per_s=40960.0,
                view=self.view, workers=len(self.members), time=self.time, total=2_000_000, factor=1.0,
                learning_rate=0.1,
            )  # fmt: skip
            self.step += 1
        self.file.flush()


class Coordinator:
    """Says what one with these workers would."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def status(self) -> Status:
        members = self.lines.members
        speeds = [0.9 + (self.lines.step + number) % 10 / 100 for number in range(len(members))]
        workers = tuple(
            WorkerStatus(id=name, host=f"host-{n % 250}", pid=1, pool="p", rank=n, state="member", speed=speeds[n],
                         shards=1, of=len(members))
            for n, name in enumerate(members)
        )  # fmt: skip
        status = Status(
            run="r", coordinator=CoordinatorStatus(pid=1, address=""), step=self.lines.step, epoch=0, minimum=1,
            view=ViewStatus(number=self.lines.view, size=len(members)), wanted=len(members), maximum=None, reason="",
            state="training", code=None, workers=workers, samples_per_s=40960.0, loss=0.1, total=2_000_000,
        )  # fmt: skip
        return msgspec.json.decode(msgspec.json.encode(status), type=Status)  # as over a connection


async def measure(folder: Path, lines: Lines, seconds: float) -> None:
    coordinator = Coordinator(lines)
    watch = RunWatch(folder, lambda: coordinator, lambda: True)  # type: ignore[arg-type, return-value]
    made: list[tuple[int, float, int]] = []  # by which page, in how many ms, bytes
    tick_of = story.UpdateStream.tick

    def timed(self: story.UpdateStream, *arguments: object, **more: object) -> story.Tick:
        began = time.perf_counter()
        tick = tick_of(self, *arguments, **more)  # type: ignore[arg-type]
        size = len(msgspec.json.encode(tick))
        made.append((id(self), 1000 * (time.perf_counter() - began), size))
        return tick

    story.UpdateStream.tick = timed  # type: ignore[method-assign, assignment]
    server = DashboardServer(watch, lambda: None)
    await server.start()
    began = time.perf_counter()
    following = asyncio.create_task(watch.follow())
    while watch.behind:
        await asyncio.sleep(0.05)
    print(f"reading {lines.step:,} steps       {time.perf_counter() - began:8.1f} s, once")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome") or ""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": 1400, "height": 1000})
        await page.goto(server.link())
        await page.locator("body[data-drawn]").wait_for()
        await page.reload()  # its scripts are there now
        await page.locator("body[data-drawn]").wait_for()
        first = await page.evaluate("took.first")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lines.take(10)
            lines.strike()
            await asyncio.sleep(LOSSES_S)
        ticks = await page.evaluate("took.ticks")
        await browser.close()
    following.cancel()
    await server.close()
    [(_, first_made, first_size), *later] = [each for each in made if each[0] == made[-1][0]]
    print(f"first picture on the screen  {first:8.0f} ms after its data, {first_size / 1e6:.2f} MB of it")
    print(f"its making                   {first_made:8.1f} ms")
    print(f"a tick on the page           {statistics.median(ticks):8.1f} ms, {max(ticks):.1f} at most, of {len(ticks)}")
    took, bytes_ = [each[1] for each in later], [each[2] for each in later]
    print(f"a tick's making              {statistics.median(took):8.1f} ms, {max(took):.1f} at most")
    print(f"a tick's size                {statistics.median(bytes_) / 1e3:8.1f} kB, {max(bytes_) / 1e3:.1f} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = Lines(Path(folder) / METRICS, args.workers)
        for _ in range(100):
            lines.take(args.steps // 100)
            lines.strike()
        lines.take(1)
        asyncio.run(measure(Path(folder), lines, args.seconds))


if __name__ == "__main__":
    main()
