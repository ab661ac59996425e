"""How long the others stand still when a worker joins, leaves, is killed or freezes.

    python benchmarks/pauses.py                  # five events of each kind; about 15 minutes
    python benchmarks/pauses.py --quick          # one event of each kind
    python benchmarks/pauses.py --contestants farandole --events 4 --row 10 --endings "leave,kill -9"
    python benchmarks/pauses.py --loaded         # with a busy loop on every core
    python benchmarks/pauses.py --markdown       # tables for the README

A scenario is one launch: two workers train about 10 MB of state (parameters and momentum), six micro-batches a step,
some 50 ms on two cores; a third joins; then one of the three (each in turn) leaves gracefully, is killed with
`kill -9`, or is frozen with SIGSTOP. The contestants take turns, scenario by scenario. A frozen process is woken once
the others go on without it, to see that it harms nobody, and killed if it does not end by itself.

The pause of an event is, over its survivors, the longest gap between two step ends from the beginning of the event
until two steps after the first with the new number of workers, minus the median step. An event begins:

- join: when the joiner, its start-up done, has asked in (farandole: when the view with it is proposed);
- leave: when it is asked for (farandole: when the view without it is proposed);
- kill and freeze: when the signal is sent.

The median step is that of the calm seconds before, or after if that is larger: torchft, with its constant batch a
worker, has more to compute on the same cores after a join, farandole after a loss. A killed or frozen worker's
micro-batches have to be computed again: "less recomputing" is without what that costs, the micro-batches that each
survivor inherits times a micro-batch's time (the median step, times the cores in use, over the micro-batches). An
interval is that of the median, by order statistics: it holds the true one in 95 of 100 runs. Steps lost are those whose
work was thrown away, over all survivors: after them the step's number had not grown. The last column tells in how many
events a survivor died too, or stood still for a minute; the pause is then that of the others, if any went on.

"nothing" is the yardstick: the same measure over four steps of the calm seconds, in which nothing happened at all.

While a joiner starts up, importing torch on the cores that train, everybody is slower: told apart, as the median step
from the request to the moment when it asks in, over the median step before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan

import psutil
from launch import FLEETS, Fleet, Job, alive
from records import Record, middle
from tables import number, show, spread

JOB = Job(model="small", workers=2, batch=120, micro=40, samples=24_000, epochs=100_000)
CALM_SECONDS = 2.0
LIMIT_SECONDS = 60.0  # who does not go on within it, does not go on
ENDINGS = ("leave", "kill -9", "SIGSTOP")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened. pause_s, recomputing_s, start_up_s in seconds; lost: steps.

    down: survivors that died or stood still. slowing, start_up_s: for joins, what the joiner's start-up did to the
    others' median step (a ratio), and how long it took.
    """

    kind: str
    pause_s: float
    recomputing_s: float = 0.0
    lost: int = 0
    down: int = 0
    slowing: float = nan
    start_up_s: float = nan


def main() -> None:
    options = parse()
    events: dict[str, list[Event]] = {name: [] for name in options.contestants.split(",")}
    for turn in range(options.events):
        for ending in options.endings.split(","):
            for name, found in events.items():
                if FLEETS[name].elastic or ending == "kill -9":
                    new = scenario(name, ending, turn, options)
                    print(f"{name}, turn {turn + 1} of {options.events}: {describe(new)}", file=sys.stderr)
                    found += new
    show_pauses(events, options)
    show_joiners(events, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", default=",".join(FLEETS))
    parser.add_argument("--endings", default=",".join(ENDINGS), help="after the join, with commas")
    parser.add_argument("--events", type=int, default=5, help="events of each ending; joins come before each")
    parser.add_argument("--workers", type=int, default=2, help="before the join")
    parser.add_argument("--row", type=int, default=1, help="events in one launch, if who is lost is replaced")
    parser.add_argument("--loaded", action="store_true", help="a busy loop on every core, from beginning to end")
    parser.add_argument("--quick", action="store_true", help="one event of each ending")
    parser.add_argument("--markdown", action="store_true")
    if parser.parse_args().quick:
        parser.set_defaults(events=1)
    return parser.parse_args()


def scenario(name: str, ending: str, turn: int, options: argparse.Namespace) -> list[Event]:
    """One launch: the join, where the contestant knows joins, and the ending; `options.row` times in all."""
    kind = FLEETS[name]
    job = replace(JOB, workers=options.workers if kind.elastic else options.workers + 1)
    events: list[Event] = []
    with kind(job, limit_s=200 + 30 * options.row) as fleet, loaded(fleet, on=options.loaded):
        fleet.start()
        wait_steps(fleet, job.workers, 0.0)
        since = time.time()
        for again in range(options.row):
            if kind.elastic:
                events.append(join(fleet, since, options.workers + 1))
            if not events or not events[-1].down:
                events.append(nothing(fleet))
                since = time.time()
                events.append(end(fleet, ending, turn + again))
            if events[-1].down or not fleet.replaces:
                break
            since = since if ending == "kill -9" else time.time()
    return events


@contextlib.contextmanager
def loaded(fleet: Fleet, *, on: bool) -> Iterator[None]:
    """If `on`, a process for each core that computes all the time; the fleet ends them, if this can't."""
    cores = range((os.cpu_count() or 1) if on else 0)
    busy = [fleet.spawn(f"busy{core}", [sys.executable, "-c", "while True: pass"]) for core in cores]
    try:
        yield
    finally:
        for process in busy:
            process.kill()


def nothing(fleet: Fleet) -> Event:
    """The yardstick for the rest: what the same measure says of four steps in which nothing happened."""
    now = time.time()
    workers = [record for record in fleet.records() if alive(record.pid)]
    return Event(
        kind="nothing",
        pause_s=max(max(record.gaps(now - CALM_SECONDS, now)[-4:]) for record in workers) - usual(workers, now),
    )


def wait_steps(fleet: Fleet, size: int, since: float) -> None:
    """Wait until that many workers have trained together, calmly, for a while."""

    def calm() -> bool:
        now = time.time()
        switches = [(record, record.switch(size, since)) for record in fleet.records() if alive(record.pid)]
        begun = [record.times[index] for record, index in switches if index is not None]
        return len(begun) >= size and max(begun) + CALM_SECONDS < now

    fleet.wait(calm, LIMIT_SECONDS, f"training with {size} workers")


def join(fleet: Fleet, since: float, size: int) -> Event:
    """One more worker comes, which makes `size`. It may have come by itself, since then, for one that was killed."""
    there = [record for record in fleet.records() if alive(record.pid)]
    veterans = {record.pid for record in there if record.times and record.times[0] < since}
    asked = since
    if len(there) == len(veterans):
        asked = time.time()
        fleet.join()
    try:
        wait_steps(fleet, size, asked)
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return Event(kind="join", pause_s=nan, down=len(veterans))
    found = fleet.records()
    joiner = next(record for record in found if record.times and record.times[0] > asked)
    ready = fleet.asked_in(joiner, asked)
    others = [record for record in found if record.pid in veterans]
    before = usual(others, asked)
    after = middle([gap for record in others for gap in record.gaps(time.time() - CALM_SECONDS)])
    pauses = [longest(record, ready, size) - max(before, after) for record in others]
    slow = middle([gap for record in others for gap in record.gaps(asked, ready)])
    return Event(
        kind="join",
        pause_s=max(pauses),
        lost=sum(record.discarded(asked, time.time()) for record in others),
        slowing=slow / before,
        start_up_s=ready - asked,
    )


def end(fleet: Fleet, ending: str, turn: int) -> Event:
    """One of the three goes."""
    workers = [record for record in fleet.records() if alive(record.pid)]
    victim = workers[turn % len(workers)]
    survivors = {record.pid for record in workers} - {victim.pid}
    sent = time.time()
    before = usual(workers, sent)
    if ending == "leave":
        fleet.leave(victim)
    else:
        os.kill(victim.pid, signal.SIGKILL if ending == "kill -9" else signal.SIGSTOP)

    def settled() -> bool:
        left = [record for record in fleet.records() if record.pid in survivors and alive(record.pid)]
        return all(two_steps_after(record, sent, len(workers)) for record in left)

    try:
        fleet.wait(settled, LIMIT_SECONDS, f"going on after {ending}")
    except TimeoutError as error:
        print(error, file=sys.stderr)
    if ending == "SIGSTOP":
        wake(victim.pid)
    if ending == "leave":
        fleet.wait(lambda: not alive(victim.pid), LIMIT_SECONDS, "end of the leaver's process")
    time.sleep(CALM_SECONDS)
    rest = [record for record in fleet.records() if record.pid in survivors]
    going = [record for record in rest if alive(record.pid) and two_steps_after(record, sent, len(workers))]
    begin = fleet.proposed(sent) if ending == "leave" and going else sent
    usually = max(before, usual(going, time.time()) if going else before)
    pauses = [longest(record, begin, reached(record, sent, len(workers))) - usually for record in going]
    micro_batches = fleet.job.workers * JOB.batch // JOB.micro
    inherited = -(-micro_batches // len(workers) // max(1, len(survivors)))
    micro_s = before * min(len(workers), os.cpu_count() or 1) / micro_batches
    recomputing = inherited * micro_s if fleet.name == "farandole" and ending != "leave" else 0.0
    return Event(
        kind=ending,
        pause_s=max(pauses, default=nan),
        recomputing_s=recomputing,
        lost=sum(record.discarded(sent, time.time()) for record in going),
        down=len(rest) - len(going),
    )


def usual(workers: list[Record], until: float) -> float:
    """The median step of the calm seconds before, over these workers."""
    return middle([gap for record in workers for gap in record.gaps(until - CALM_SECONDS, until)])


def reached(worker: Record, since: float, before: int) -> int:
    """The number of workers that it went on with: one less than before, or one where other survivors died as well."""
    sizes = [size for size in (before - 1, 1) if worker.switch(size, since) is not None]
    return sizes[-1] if sizes else before


def two_steps_after(worker: Record, since: float, before: int) -> bool:
    index = worker.switch(reached(worker, since, before), since)
    return reached(worker, since, before) < before and index is not None and index + 2 < len(worker.times)


def longest(worker: Record, begin: float, size: int) -> float:
    """The longest gap that ends between `begin` and two steps after the first step of the new size."""
    switch = worker.switch(size, begin)
    if switch is None or switch + 2 >= len(worker.times):
        return nan
    times = worker.times
    return max(times[i] - times[i - 1] for i in range(1, switch + 3) if times[i] > begin)


def wake(pid: int) -> None:
    """Let a frozen process go on, give it five seconds to end by itself, and kill it if it did not."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(5)
        if alive(pid):
            print(f"the frozen process {pid} did not end by itself", file=sys.stderr)
            process.kill()


def describe(events: list[Event]) -> str:
    return "; ".join(
        f"{e.kind} {1e3 * e.pause_s:.0f} ms, {e.lost} steps lost" + (f", {e.down} survivors down" if e.down else "")
        for e in events
    )


def show_pauses(events: dict[str, list[Event]], options: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    for kind in ("nothing", "join", *ENDINGS):
        for name, found in events.items():
            these = [event for event in found if event.kind == kind]
            if these:
                rows.append(row(kind, name, these))
    columns = [
        "event",
        "contestant",
        "n",
        "median ms",
        "interval",
        "max ms",
        "less recomputing ms",
        "interval",
        "steps lost",
        "survivors down",
    ]
    show("Pause of the survivors beyond the median step", columns, rows, markdown=options.markdown)


def row(kind: str, name: str, events: list[Event]) -> list[str]:
    pauses = [1e3 * event.pause_s for event in events if event.pause_s == event.pause_s]
    bare = [1e3 * (event.pause_s - event.recomputing_s) for event in events if event.pause_s == event.pause_s]
    down = sum(1 for event in events if event.down)
    return [
        kind,
        name,
        str(len(events)),
        number(middle(pauses), 0),
        of_median(pauses),
        number(max(pauses, default=nan), 0),
        number(middle(bare), 0),
        of_median(bare),
        str(sum(event.lost for event in events)),
        f"{down} of {len(events)}",
    ]


def of_median(values: list[float]) -> str:
    """The interval between two order statistics in which the median lies with 95 %; a dash for less than six values."""
    beyond = int((len(values) - 1.96 * len(values) ** 0.5) / 2)
    return spread(sorted(values)[beyond : len(values) - beyond], 0) if len(values) > 5 else "-"


def show_joiners(events: dict[str, list[Event]], options: argparse.Namespace) -> None:
    rows: list[list[str]] = []
    for name, found in events.items():
        joins = [event for event in found if event.kind == "join"]
        if joins:
            start_up = middle([event.start_up_s for event in joins])
            slowing = middle([event.slowing for event in joins])
            rows.append([name, str(len(joins)), number(start_up), number(slowing, 2)])
    columns = ["contestant", "n", "start-up s", "median step, over that before"]
    show("While a joiner starts up on the same cores", columns, rows, markdown=options.markdown)


if __name__ == "__main__":
    main()
