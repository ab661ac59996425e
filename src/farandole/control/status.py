"""The answer to `GET /api/status`: the coordinator's state in one flat value, for users and scripts.

Pure: it takes the coordinator and recent step lines, and returns a struct. It adds nothing that the coordinator does
not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farandole.errors import UsageError
from farandole.platform.files import decoded
from farandole.protocol.cost import Traffic
from farandole.protocol.link_speed import LinkSpeed, SlowLink, slow_links
from farandole.protocol.metrics import StepLine
from farandole.protocol.numeric_facts import numerics
from farandole.protocol.values import Text, TimeClass

if TYPE_CHECKING:
    from farandole.protocol.coordinator.coordinator import Coordinator

# --- status -----------------------------------------------------------------------------------------------------------

RATE_STEPS = 50  # the newest step lines, from which throughput and remaining time are computed everywhere
LATE_S, LATE_STEPS = 2.0, 3  # a line may come this much later than its step


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    address: str


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The current view; number 0 before the first."""

    number: int
    size: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `state`: starting (not admitted yet), ready (asks to join), member, leaving, finished.

    `speed`: relative to the fastest worker, 1 for that one, None until it is measured. `shards`: the number of
    micro-batches of the worker in its newest step, of `of` in total. `zone`: that of its host, "" if it reports none.
    """

    id: str
    host: str
    pid: int
    pool: str
    rank: int | None
    state: str
    speed: float | None = None
    shards: int = 0
    of: int = 0
    zone: str = ""


class Stalled(msgspec.Struct, frozen=True, kw_only=True):
    """The training has made no progress for `seconds`. `workers`: those that do not report to wait for others."""

    seconds: float
    workers: tuple[str, ...]


class AccountStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The time of all workers so far by class, its totals, and the bytes between hosts; None: unknown."""

    seconds: dict[TimeClass, float]
    goodput: float | None
    worker_hours: float
    dollars: float | None
    traffic: Traffic | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run.

    `state`: starting, training, stalled, recovering, ending or over. `code`: the exit code once over, else None.
    `samples_per_s` falls while there is no progress, and is None once the training has stalled. `bits`: same, portable
    or any, as the run was started. `codec`: the format in which gradients are summed. `unpromised`: the step after
    which results are not reproducible, -1 for the beginning, None if they are. `account` is some seconds old, None if
    nothing is known yet. `joiners_lost`: the number of joiners in a row that were refused or died (docs/protocol.md,
    Crash loops 5 and 6); `replaced`: True if others are started nevertheless. `links`: the recent use of each link
    between two hosts; `slow_links`: those that are slow (`protocol/link_speed.py`), the slowest first.
    """

    run: str
    coordinator: CoordinatorStatus
    view: ViewStatus
    step: int
    epoch: int
    wanted: int
    minimum: int
    maximum: int | None
    state: str
    reason: str
    code: int | None
    workers: tuple[WorkerStatus, ...]
    samples_per_s: float | None
    loss: float | None
    total: int | None
    stalled: Stalled | None = None
    bits: str = "same"
    codec: str = "none"
    unpromised: int | None = None
    account: AccountStatus | None = None
    joiners_lost: int = 0
    replaced: bool = True
    links: tuple[LinkSpeed, ...] = ()
    slow_links: tuple[SlowLink, ...] = ()


def describe(
    coordinator: Coordinator, *, pid: int, address: str, steps: Sequence[StepLine], now: float, time: float,
    account: AccountStatus | None = None,
) -> Status:  # fmt: skip
    """The status of the run. `steps`: the newest step lines, oldest first. `now`: coordinator time; `time`: Unix
    time.
    """
    from farandole.protocol.coordinator import failures  # those who read a status need no coordinator

    view = coordinator.view
    last = steps[-1] if steps else None
    heartbeats = [w.heartbeat for w in coordinator.workers.values() if coordinator.has_trained(w.id)]
    speeds = coordinator.speeds.relative()
    ending = coordinator.over or coordinator.ending
    stalled_for_s = failures.stalled_s(coordinator, now)
    stalled = (
        None
        if stalled_for_s is None
        else Stalled(seconds=round(stalled_for_s, 1), workers=failures.hung_workers(coordinator))
    )
    settings = coordinator.settings
    links = coordinator.links.links()
    return Status(
        run=settings.run,
        coordinator=CoordinatorStatus(pid=pid, address=address),
        view=ViewStatus(number=view.number if view else 0, size=view.size if view else 0),
        step=max([last.step if last else 0, *(beat.step for beat in heartbeats)]),
        epoch=max([last.epoch if last else 0, *(beat.epoch for beat in heartbeats)]),
        wanted=coordinator.wanted,
        minimum=settings.minimum,
        maximum=settings.maximum,
        state=_state(coordinator, stalled),
        reason=ending.reason if ending else "",
        code=coordinator.over.code if coordinator.over else None,
        workers=tuple(
            WorkerStatus(
                id=w.id,
                host=w.host,
                pid=w.pid,
                pool=w.pool,
                rank=view.rank(w.id) if view and w.id in view.members else None,
                state="leaving" if w.leaving else w.state,
                speed=speeds.get(w.id),
                shards=coordinator.speeds.newest(w.id).shards,
                of=coordinator.speeds.newest(w.id).shards_total,
                zone=w.zone,
            )
            for w in coordinator.workers.values()
        ),
        samples_per_s=None if stalled else samples_per_s(steps, time),
        loss=last.loss if last else None,
        total=last.total if last else None,
        stalled=stalled,
        bits=settings.bits,
        codec=settings.codec,
        unpromised=coordinator.unpromised,
        account=account,
        joiners_lost=coordinator.crash_loop.joiners,
        replaced=coordinator.crash_loop.joiners < failures.FATAL,
        links=links,
        slow_links=slow_links(links),
    )


def samples_per_s(steps: Sequence[StepLine], time: float | None = None) -> float | None:
    """Samples a second over these step lines: their samples by their seconds, evaluations and pauses included.

    `time`: now, if that may be long after the last line; the time since then counts as a pause.
    """
    if not steps:
        return None
    elapsed = sum(line.seconds for line in steps)
    silence = time - steps[-1].time if time is not None else 0.0
    elapsed += silence if silence > max(LATE_S, LATE_STEPS * elapsed / len(steps)) else 0.0
    return sum(line.samples for line in steps) / elapsed if elapsed > 0 else None


def left_s(total: int | None, steps: Sequence[StepLine]) -> float | None:
    """Seconds to the end, at the rate of these step lines; None if unknown."""
    if total is None or not steps:
        return None
    return sum(line.seconds for line in steps) / len(steps) * max(0, total - steps[-1].step - 1)


def _state(coordinator: Coordinator, stalled: Stalled | None) -> str:
    if coordinator.over:
        return "over"
    if coordinator.ending:
        return "ending"
    if coordinator.stopping:
        return "recovering"
    if stalled:
        return "stalled"
    return "training" if coordinator.view else "starting"


# --- numerics ---------------------------------------------------------------------------------------------------------
#
# The numeric facts of a machine or a run, as `farandole numerics` writes them and `GET /api/numerics` answers them.
#
# The version is that of the fingerprint: facts of two versions can't be compared.

VERSION = 1
LONGEST = 1 << 20  # bytes of a file
_REMEDY = "write it again on that machine, with `farandole numerics --json FILE`"


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`facts` by name. `bits`: how they are computed, same or portable; in a `run` ("" for a machine), what that run
    guarantees.
    """

    version: int
    facts: dict[Text, Text]
    bits: str
    run: str = ""


class _Version(msgspec.Struct):
    version: int


def of_run(coordinator: Coordinator) -> Numerics:
    """The numeric facts of a run; none until a worker has asked to join."""
    facts = coordinator.signature.facts if coordinator.signature else ()
    settings = coordinator.settings
    return Numerics(version=VERSION, facts=numerics(facts), run=settings.run, bits=settings.bits)


def write(path: Path, facts: dict[str, str], bits: str) -> None:
    """Write the facts of a machine to a file. Raises UsageError: it can't be written."""
    content = msgspec.json.format(msgspec.json.encode(Numerics(version=VERSION, facts=facts, bits=bits)))
    try:
        path.write_bytes(content + b"\n")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None


def read(path: Path) -> Numerics:
    """The content of a file that `write` has written.

    Raises:
        UsageError: the file does not exist, is something else, or has another version.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)[:LONGEST]
        version = decoded(content, _Version).version
        if version != VERSION:
            raise UsageError(
                f"{path} has version {version}, and this farandole compares version {VERSION}: use the same "
                f"farandole on both machines, and {_REMEDY}"
            )
        return decoded(content, Numerics)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a run's ticket, or a file of `farandole numerics`") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path} is neither a ticket nor a file of `farandole numerics`; {_REMEDY}") from None
