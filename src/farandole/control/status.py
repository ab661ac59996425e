"""What `GET /api/status` answers: the coordinator's state in one flat value, for people and scripts.

Pure: coordinator and recent step lines in, a struct out. It adds nothing that the coordinator does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from farandole.errors import UsageError
from farandole.platform.files import decoded
from farandole.protocol.coordinator import failures
from farandole.protocol.coordinator.coordinator import Coordinator
from farandole.protocol.metrics import StepLine
from farandole.protocol.numeric_facts import numerics
from farandole.protocol.values import Text, TimeClass

# --- status -----------------------------------------------------------------------------------------------------------

RATE_STEPS = 50  # the newest, of which throughput and the time left are made, wherever they are shown
LATE_S, LATE_STEPS = 2.0, 3  # a line may come so much later than its step


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    address: str


class ViewStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The view in force; number 0 before the first."""

    number: int
    size: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: starting (not let in yet), ready (asks in), member, leaving (has notice), finished.

    `speed` is that of the fastest, 1 for that one, None until it is measured; `shards` is its part of its newest step,
    of `of`.
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


class Stalled(msgspec.Struct, frozen=True, kw_only=True):
    """The training has not moved for so long; `workers` are those that do not say that they wait for others."""

    seconds: float
    workers: tuple[str, ...]


class AccountStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the time of all workers went to so far, by class, and what it comes to; None: unknown."""

    seconds: dict[TimeClass, float]
    goodput: float | None
    worker_hours: float
    dollars: float | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: starting, training, stalled, recovering, ending or over. `code` is the exit code once over, else None.

    `samples_per_s` falls while nothing comes, and is None once the training has stalled. `bits`: same, portable or
    any, as the run was started; `unpromised`: the step after which they are not promised, -1 for the beginning.
    `account` is some seconds old, None where nothing is known yet. `joiners_lost`: so many joiners in a row were
    refused or died (`protocol/coordinator/failures.py`, 5 and 6); `replaced`: whether others are started nevertheless.
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
    unpromised: int | None = None
    account: AccountStatus | None = None
    joiners_lost: int = 0
    replaced: bool = True


def describe(
    coordinator: Coordinator, *, pid: int, address: str, steps: Sequence[StepLine], now: float, time: float,
    account: AccountStatus | None = None,
) -> Status:  # fmt: skip
    """`steps` are the newest step lines, oldest first. `now` is the coordinator's time, `time` Unix time."""
    view = coordinator.view
    last = steps[-1] if steps else None
    beats = [w.heartbeat for w in coordinator.workers.values() if coordinator.let_in(w.id)]
    speeds = coordinator.speeds.relative()
    ending = coordinator.over or coordinator.ending
    stood = failures.stalled_s(coordinator, now)
    stalled = None if stood is None else Stalled(seconds=round(stood, 1), workers=failures.hung_workers(coordinator))
    settings = coordinator.settings
    return Status(
        run=settings.run,
        coordinator=CoordinatorStatus(pid=pid, address=address),
        view=ViewStatus(number=view.number if view else 0, size=view.size if view else 0),
        step=max([last.step if last else 0, *(beat.step for beat in beats)]),
        epoch=max([last.epoch if last else 0, *(beat.epoch for beat in beats)]),
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
            )
            for w in coordinator.workers.values()
        ),
        samples_per_s=None if stalled else samples_per_s(steps, time),
        loss=last.loss if last else None,
        total=last.total if last else None,
        stalled=stalled,
        bits=settings.bits,
        unpromised=coordinator.unpromised,
        account=account,
        joiners_lost=coordinator.crash_loop.joiners,
        replaced=coordinator.crash_loop.joiners < failures.FATAL,
    )


def samples_per_s(steps: Sequence[StepLine], time: float | None = None) -> float | None:
    """Samples a second over these step lines: their samples by their seconds, evaluations and pauses included.

    `time`: now, if it may be long after the last one; what is missing since then counts as a pause.
    """
    if not steps:
        return None
    elapsed = sum(line.seconds for line in steps)
    silence = time - steps[-1].time if time is not None else 0.0
    elapsed += silence if silence > max(LATE_S, LATE_STEPS * elapsed / len(steps)) else 0.0
    return sum(line.samples for line in steps) / elapsed if elapsed > 0 else None


def left_s(total: int | None, steps: Sequence[StepLine]) -> float | None:
    """Seconds to the end, at the pace of these step lines; None where nothing says it."""
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
# What a machine computes, or a run does, as `farandole numerics` writes it down and `GET /api/numerics` answers it.
#
# Its version is that of the fingerprint: those of two versions can't be compared.

VERSION = 1
LONGEST = 1 << 20  # bytes of a file
_AGAIN = "write it there anew, with `farandole numerics --json FILE`"


class Numerics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`facts` by their names. `bits`: how they are computed, same or portable; in a `run` ("" for a machine), what is
    promised there.
    """

    version: int
    facts: dict[Text, Text]
    bits: str
    run: str = ""


class _Version(msgspec.Struct):
    version: int


def of_run(coordinator: Coordinator) -> Numerics:
    """Without facts as long as the run has no worker that has asked in."""
    facts = coordinator.signature.facts if coordinator.signature else ()
    settings = coordinator.settings
    return Numerics(version=VERSION, facts=numerics(facts), run=settings.run, bits=settings.bits)


def write(path: Path, facts: dict[str, str], bits: str) -> None:
    """Raises UsageError where it can't be written."""
    content = msgspec.json.format(msgspec.json.encode(Numerics(version=VERSION, facts=facts, bits=bits)))
    try:
        path.write_bytes(content + b"\n")
    except OSError as error:
        raise UsageError(f"--json {path}: {error.strerror}") from None


def read(path: Path) -> Numerics:
    """What `write` has written.

    Raises:
        UsageError: it is not there, is something else, or of another version.
    """
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)[:LONGEST]
        version = decoded(content, _Version).version
        if version != VERSION:
            raise UsageError(
                f"{path} is of version {version}, and this farandole compares version {VERSION}: use the same "
                f"farandole on both machines, and {_AGAIN}"
            )
        return decoded(content, Numerics)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a run's ticket, or a file of `farandole numerics`") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UsageError(f"{path} is neither a ticket nor a file of `farandole numerics`; {_AGAIN}") from None
