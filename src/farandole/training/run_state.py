"""The whole state of the run: it is sent to joiners, written to checkpoints, and loaded from both.

Beside the replica it holds the run's position, the number of workers that began each step so far (the history, which a
replay needs: unsent lines of metrics are lost with a worker), and its `origin`. An origin is a beginning of the state,
from nothing or from a checkpoint: all workers that received the state have the origin of the worker that began it. The
ledger needs it, to distinguish steps that count from those that a resumed run repeats.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import farandole
from farandole.checkpoint import reach, restore
from farandole.checkpoint.restore import ORDER, UNSHUFFLED, RestoredState
from farandole.checkpoint.save import CheckpointSaver
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import DamagedError, Manifest, RunIdentity, Store, first_line, reaching
from farandole.code import snapshot
from farandole.control.run_folder import CHECKPOINTS
from farandole.data.facts import facts_of, picked
from farandole.data.ledger import Ledger
from farandole.data.loader import Loader
from farandole.data.sampler_order import SamplerOrder
from farandole.data.stream import Stream
from farandole.errors import CheckpointsGone, FarandoleError, WorkerSuperseded
from farandole.numerics import modes
from farandole.numerics import settings as numeric_settings
from farandole.numerics.fingerprint import fingerprint
from farandole.numerics.settings import Alterations
from farandole.plan.shards import FIRST_LOOP, LoopStart, Position
from farandole.protocol import numeric_facts
from farandole.protocol.difference import in_words
from farandole.protocol.messages import Checkpoints, Digests, NotFinite, Restored, Saved, Signature
from farandole.protocol.view import View
from farandole.training import digest
from farandole.training.digest import UNKNOWN, ModuleAttributes, PartsDigest, StepDigest
from farandole.training.learning_rate import LearningRate
from farandole.training.progress import Length
from farandole.training.replica import Replica
from farandole.worker.context import WorkerContext

# --- options ----------------------------------------------------------------------------------------------------------
#
# Options of a script that a checkpoint overrides: the initial settings of optimizers, schedulers, frozen parameters.
#
# A resumed run continues with the rates of the checkpoint, and with all other state of its optimizers and schedulers.
# A new rate on the command line has no effect, and the user must see that. The rate in the checkpoint differs from the
# script's initial rate also without a new option, because schedulers change it. So the state keeps the script's initial
# settings, which are compared with those of the resumed script.

LONGEST = 100  # most characters of a value


def options_of(replica: Replica) -> dict[str, str]:
    """Return the settings of optimizers and schedulers, and the frozen parameters, as text by name."""
    options: dict[str, str] = {}
    for name, thing in replica.objects.items():
        if isinstance(thing, torch.optim.Optimizer):
            for index, group in enumerate(thing.param_groups):
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                options |= {f"{name}.param_groups[{index}].{key}": _words(value) for key, value in settings.items()}
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            options |= {f"{name}.{key}": _words(value) for key, value in thing.state_dict().items()}
    frozen = [name for name, parameter in replica.parameters.items() if not parameter.requires_grad]
    return options | {f"{name}.requires_grad": "False" for name in frozen}


def overruled(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return at most one line: the options that differ now from those at the run's beginning."""
    unlike = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    words = [f"{name} is {now.get(name, 'none')} in this script, and was {then.get(name, 'none')}" for name in unlike]
    return [f"the checkpoint overrides settings of the script: {in_words(words)}"] if words else []


def _words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return repr(value)[:LONGEST] if " at 0x" not in repr(value) else type(value).__name__


# --- run state --------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


class RunState:
    """The run's state in one worker.

    Attributes:
        position: the state is that at the beginning of this step.
        at_step_start: True if the state is that of the start of a step, and no update has begun; False between a step's
            end and the next one's beginning.
        settings: torch's settings, with the script's changes.
        between: what the calls between two loops have returned, as (call, result); for each loop, those after it.
    """

    def __init__(
        self,
        replica: Replica,
        context: WorkerContext,
        settings: Checkpoints,
        *,
        folder: Path | None,
        seed: int,
        signature: Signature,
        over: Callable[[Position], bool],
        ledger: Ledger | None,
        learning_rate: LearningRate,
        stream: Stream | None = None,
        stop_on_nan: bool = False,
        bits: str = "same",
        loop: LoopStart = FIRST_LOOP,
        before: RunState | None = None,
    ) -> None:
        """`loop`: the number and the facts of this loop; `before`: the state of the loop before it."""
        self.position = before.position if before else Position()
        self._context = context
        if before is None:
            self.at_step_start = True
        self._replica = replica
        self._loop = loop
        self.between: list[list[tuple[str, Any]]] = before.between if before else []
        self.settings = before.settings if before else Alterations()
        self.attributes = before.attributes if before else ModuleAttributes(replica.objects)
        self._options: dict[str, str] = before._options if before else options_of(replica)  # at the run's beginning
        self._altered = self.settings.altered
        self._digest = StepDigest(replica)
        self.parts = PartsDigest(replica, before.parts if before else None)
        self._equal_settings = bits != "any"
        self._learning_rate = learning_rate
        self._stream = stream
        self._rates = deepcopy(learning_rate.state())
        self._run = folder.name if folder else ""
        self._seed = seed
        self._facts = signature.facts
        self._over = over
        self._ledger = ledger
        self._origin = before._origin if before else ""
        self._history: list[tuple[int, int]] = before._history if before else []
        self._restored = RestoredState()
        self._finite = before._finite if before else True  # False if the newest step's loss is not finite
        self._stop_on_nan = stop_on_nan
        self._has_state = before._has_state if before else False  # True if the state is not the script's initial state
        own = settings.url or (str(folder / CHECKPOINTS) if folder else "")
        self._places = [place for place in (own, settings.resume) if place]
        self._saver: CheckpointSaver | None = before._saver if before else None
        self._own = own
        self._identity = RunIdentity(settings.identity, self._run) if settings.identity else None
        if self._saver:
            self._saver.describe = self._manifest
        elif own:
            every = Every.parse(settings.every)
            self._saver = CheckpointSaver(
                Store(own, self._identity), every, settings.keep, describe=self._manifest, tell=context.tell,
                parameters=replica.parameters.keys(),
            )  # fmt: skip

    @property
    def at_step_start(self) -> bool:
        return self._context.at_step_start

    @at_step_start.setter
    def at_step_start(self, value: bool) -> None:
        self._context.at_step_start = value  # heartbeats report it

    # --- at a step's beginning and end -----------------------------------------------------------------------

    def digest(self) -> int:
        """Return the digest of the replica at the beginning of the current step."""
        return self._digest.at(self.position.step, self._compared)

    def digests(self) -> Digests:
        """Return the digests of all parts of the replica: between two steps, or at the current step's beginning."""
        try:
            if not self.at_step_start:
                self._copy_values()
            names, digests = digest.each(self._replica, self._compared)
            parts, rest_digest = self.parts.at(self.position.step, self._compared)
        except (RuntimeError, FarandoleError) as error:  # the others must not wait for the digests
            _log.warning("no digests of the replica: %s", error)
            (names, digests), (parts, rest_digest) = ((), ()), UNKNOWN
        return Digests(step=self.position.step, names=names, digests=digests, parts=parts, rest=rest_digest)

    @property
    def _compared(self) -> Mapping[str, str]:
        """The settings and attributes that must be equal on all workers, by name."""
        settings = self.settings.known_values if self._equal_settings else {}
        return {**settings, **self.attributes.compared()}

    def begin(self, position: Position) -> None:
        """Make the present state that of `position`: a step begins, or the run is over.

        Raises:
            UnknownState: the state has a value that can't be sent or saved.
        """
        self._copy_values()
        self.position, self.at_step_start = position, True

    def _copy_values(self) -> None:
        """Copy the values that may change before the step's update. See `Replica.keep_buffers`."""
        self._replica.keep_buffers()
        self.attributes.keep()
        self._altered = self.settings.altered
        self._rates = deepcopy(self._learning_rate.state())

    @property
    def updated(self) -> bool:
        """True if a parameter, or another large tensor, was changed since the current step began."""
        return self._replica.plain.changed()

    @property
    def _begins_step(self) -> bool:
        """True if a checkpoint written now would hold the state at a step's beginning."""
        return self.at_step_start and not self._replica.plain.changed()

    def began(self, workers: int) -> None:
        """Record that `workers` workers have begun the current step."""
        if not self._history or self._history[-1][1] != workers:
            self._history.append((self.position.step, workers))

    def judge(self, step: int, loss: float) -> bool:
        """Check the step's exact loss, which is equal on all workers. False: the run ends here, on all workers.

        All workers hold the state at the step's beginning then, because the update has not been made yet.
        """
        finite = math.isfinite(loss)
        stops = self._stop_on_nan and not finite
        if not finite and (self._finite or stops):
            self._context.tell(NotFinite(step=step, loss=str(loss)))
        if not stops:
            self._finite = finite
        return not stops

    def checkpoint(self) -> None:
        """Copy the state for a checkpoint, if one is due and this worker is the one that writes checkpoints."""
        if self._saver:
            at_once, self._context.instructions.save_at_once = self._context.instructions.save_at_once, False
            snapshot = partial(self.snapshot, own=True)
            self._saver.step_begins(self.position, snapshot, leads=self._context.instructions.saves, at_once=at_once)

    @property
    def restored(self) -> dict[str, Any]:
        """The state of the checkpoint that `restore` has found."""
        return self._restored.state

    # --- sending and loading ---------------------------------------------------------------------------------

    def snapshot(self, *, own: bool = False) -> dict[str, Any]:
        """Return the state at the step's beginning, by reference. `own`: with the values of this worker alone."""
        before = [[step, workers] for step, workers in self._history if step < self.position.step]
        ours: dict[str, Any] = {
            "learning_rate": self._rates,
            "history": before,
            "origin": self._origin,
            "finite": self._finite,
            "settings": self._altered,
            "attributes": self.attributes.state(own=own),
            "options": self._options,
        }
        if any(self.between):
            ours["between"] = self.between
        if self._stream is not None and (mark := self._stream.mark(self.position.epoch, self.position.offset)):
            ours["stream"] = mark
        return {**self._replica.state(), **ours}

    def take(self, state: dict[str, Any]) -> None:
        """Load the state that another worker has sent at the join."""
        self._load(state)
        self._enter(state["origin"])

    def renew(self, state: dict[str, Any]) -> None:
        """Load another worker's state of the same step, because this replica differs from it."""
        self.at_step_start = False
        self._load(state)
        self.at_step_start = True

    def unreached(self) -> str:
        """Return why this worker can't write to the run's checkpoints; "" if it can, or the run has none."""
        return reach.unreached(self._own, self._identity.id if self._identity else "") if self._own else ""

    def restore(self, view: View) -> Position | None:
        """Load the newest checkpoint, in the worker that begins the first `view`. Returns its position.

        Without any checkpoint, the script's initial state is the run's. Returns None if the run has a newer checkpoint
        than this worker finds, so that another worker must begin; or if the checkpoint is at the end of the length that
        the script requests. The latter is reported, and ends the run.

        Raises:
            CheckpointsGone: a single process does not find the newest checkpoint.
            FarandoleError: there are checkpoints that can't be used, or can't be reached.
            WorkerSuperseded: there is none, and this worker has loaded another worker's state before.
        """
        with reaching(" and ".join(self._places)):
            try:
                reach.see(self._places, self._context.state_machine.newest, self._identity)
            except CheckpointsGone as gone:
                self._context.short(view, gone)
                return None
            restored = self._restored = restore.find(self._places, self._identity)
        if restored.manifest is not None and restored.position.loop.number > self._loop.number:
            return restored.position  # the state is loaded when the script is there
        if restored.manifest is None:
            if self._has_state or self._loop.number:
                raise WorkerSuperseded(
                    "the state that this worker has received is no longer the run's: another process replaces it"
                )
            return Position()
        if restored.position.loop.number < self._loop.number:
            raise behind()
        loop = dataclasses.replace(restored.position.loop, facts=self._loop.facts)
        restored.position = dataclasses.replace(restored.position, loop=loop)
        self.load(restored)
        self._has_state = True
        if self._over(restored.position):
            self._context.tell(Restored(step=restored.position.step, path=restored.path, done=True))
            return None
        return restored.position

    def load(self, restored: RestoredState) -> None:
        """Load a checkpoint of this script, and list in `restored.differences` what differs here.

        Raises:
            UsageError: it belongs to another job.
            DamagedError: its content can't be loaded into the script's objects.
        """
        assert restored.manifest is not None
        restored.differences = restore.compare(restored.manifest, self._facts, self._seed, restored.path)
        options = self._options
        try:
            restored.differences += self._load(restored.state)
            restored.differences += overruled(self._options, options)
            self._options = options
        except Exception as error:
            raise DamagedError(
                f"{restored.path}: its content is not the state of this script's objects "
                f"({type(error).__name__}: {first_line(error)}); resume from a checkpoint of this script"
            ) from error
        unlike = digest.unlike(self._replica, restored.state)
        restored.differences += [f"{name} differs: load_state_dict() has changed or lost it" for name in unlike]

    def _load(self, state: dict[str, Any]) -> list[str]:
        """Load `state`. Returns a text for each part of it that can't be loaded and differs here."""
        self._replica.load(state)
        unlike = self.attributes.take(state.get("attributes", {}))
        self._options = state.get("options", self._options)
        if "learning_rate" in state:  # checkpoints of versions without rules lack it
            self._learning_rate.load(state["learning_rate"])
            self._history = [(step, workers) for step, workers in state["history"]]
        if self._stream is not None:
            self._stream.learn([state.get("stream", b"")])
        self._finite = bool(state.get("finite", True))
        self.between = calls_between(state)
        self.settings.take(state.get("settings", {}))
        self._copy_values()
        return unlike

    def begin_run(self, position: Position) -> None:
        """Begin the first view with the state that `restore` has loaded."""
        restored, self._restored = self._restored, RestoredState()
        origin = secrets.token_hex(8)
        if self._ledger:
            parent = restored.state["origin"] if restored.state else ""
            self._ledger.resumed(origin=origin, step=position.step, parent=parent)
        self._enter(origin, position)
        if restored.path or restored.damaged:
            self._context.tell(
                Restored(
                    step=position.step,
                    path=restored.path,
                    damaged=tuple(restored.damaged),
                    differences=tuple(restored.differences),
                    finite=restored.manifest is None or restored.manifest.finite,
                    last_finite=restored.last_finite,
                )
            )

    def _enter(self, origin: str, position: Position | None = None) -> None:
        self._origin, self._has_state = origin, True
        if self._ledger:
            self._ledger.entered(origin=origin)
        if self._saver:
            self._saver.enter((position or self.position).step)

    # --- the last checkpoint ---------------------------------------------------------------------------------

    def save(self, between: bool) -> Saved:
        """Write the last checkpoint, except if the state is one between two steps and `between` is false.

        With `between` a run can't resume from the checkpoint, whole or not. Within a step the state is that at the
        step's beginning, even if the loop body has changed plain values and buffers since. If it has changed other
        tensors too, the state counts as one between two steps.

        Raises:
            OSError: the store is full or can't be reached.
            FarandoleError: this worker has no store.
        """
        if self._saver is None:
            raise FarandoleError("this worker has no run folder to save to")
        is_step_begin = self._begins_step
        if not is_step_begin and not between:
            return Saved(error="the state is one between two steps", between=True)
        if not is_step_begin:
            self._copy_values()
        whole = is_step_begin and not between
        began = time.monotonic()
        path, finite = self._saver.save(self.position, self.snapshot(own=True), whole=whole)
        return Saved(path=path, finite=finite, seconds=round(time.monotonic() - began, 6))

    def end_alone(self) -> bool:
        """Write the last checkpoint of a single process. Returns False, with a report, if that fails."""
        if self._saver is None:
            return True
        try:
            between = not self._begins_step
            saved = self.save(between=between)
            saved.between = between
        except Exception as error:  # noqa: BLE001  no error may look like a normal end
            saved = Saved(error=first_line(error))
        self._context.tell(saved)
        return not saved.error

    def _manifest(self, position: Position, whole: bool) -> Manifest:
        return Manifest(
            epoch=position.epoch,
            offset=position.offset,
            step=position.step,
            whole=whole,
            run=self._run,
            run_id=self._identity.id if self._identity else "",
            worker=self._context.worker,
            seed=self._seed,
            facts=self._facts,
            time=time.time(),
        )


def calls_between(state: Mapping[str, Any]) -> list[list[tuple[str, Any]]]:
    """Return what the calls between two loops have returned, from a state: see `RunState.between`."""
    return [[(call, result) for call, result in calls] for calls in state.get("between", [])]


def behind() -> WorkerSuperseded:
    """Return the error of a worker whose script is in a later loop than the run, and can't go back."""
    return WorkerSuperseded(
        "the run goes on from a state of an earlier loop of the script: another process replaces it"
    )


# --- signature --------------------------------------------------------------------------------------------------------
#
# A worker's signature: the facts that must be equal on all workers for equal bits.
#
# Library versions, the kind of device, the intra-op threads, torch's settings, the fingerprint and the decoder of the
# data are numerics, which `protocol/numeric_facts.py` compares. The code, the data's length and its other facts, the
# batch policy and the replicated tensors are the job. A joiner with a different job is refused, and the first
# difference is named.


def signature(device: torch.device, loader: Loader, length: Length, replica: Replica) -> Signature:
    """Return this worker's signature; differences are reported in its order. Raises UsageError if it is too large."""
    return Signature.of(_facts(device, loader, length, replica))


def machine(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the facts of the libraries and the hardware that affect bits, with this process's threads and settings."""
    yield numeric_facts.TORCH, str(torch.__version__)
    yield numeric_facts.NUMPY, np.__version__
    yield numeric_facts.DEVICE, _name(device)
    yield from numeric_settings.setting_facts()
    yield from fingerprint(device)


def local_facts(threads: int, bits: str, like: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[str, str]]:
    """Yield the numeric facts of a worker on this machine, for a process that does not train.

    It applies the script's settings `like`, by name of the fact, to this process.
    """
    device = numeric_settings.local_device()
    for name, value in like.items():
        numeric_settings.put(name, value)
    torch.set_num_threads(threads)
    modes.begin(bits, threads, device)
    return machine(device)


def _facts(device: torch.device, loader: Loader, length: Length, replica: Replica) -> Iterator[tuple[str, str]]:
    yield "farandole version", farandole.__version__
    yield from machine(device)
    yield from snapshot.facts()
    yield from facts_of_loop(loader, length)
    yield from replica.facts()


def facts_of_loop(loader: Loader, length: Length) -> Iterator[tuple[str, str]]:
    """Yield the facts of a loop's data, batch and length."""
    yield "samples in the data", "unknown" if loader.endless else str(loader.length)
    if picks := picked(loader.dataset):
        yield "samples in the data that a Subset picks", picks
    if loader.stream is not None:
        yield ORDER, str(loader.stream)
    elif isinstance(loader.order, SamplerOrder):
        yield ORDER, str(loader.order)
    else:
        yield ORDER, "shuffled, by the run's seed" if loader.order.shuffle else UNSHUFFLED
    for name, value in facts_of(loader.dataset).items():
        yield name if name.startswith(numeric_facts.DECODING) else f"data's {name}", value
    if loader.left_out:
        yield "samples in the data that an epoch leaves out (drop_last)", str(loader.left_out)
    yield "batch policy", repr(loader.batch)
    yield from ((name, str(value)) for name, value in dataclasses.asdict(length).items() if value)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


# --- memory -----------------------------------------------------------------------------------------------------------
#
# The process's heap: keep freed memory, and touch memory before it is needed.
#
# Each step allocates and frees megabytes of activations and gradients. glibc's malloc returns large blocks to the
# kernel, which zeroes them again page by page at their next use: a step of 45 ms of a small convolutional net had 2,000
# page faults, some 3 ms, and none after `keep_freed_memory`. A joiner that receives 10 MB of state has all of its page
# faults while everyone waits for it: the copy took 38 ms in memory that was never touched before, 3 ms in touched
# memory. Other allocators and systems are not changed.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 32 << 20  # bytes; the largest threshold that glibc accepts: larger blocks are always mapped anew
_PIECE = 16 << 20
_MOST = 512 << 20


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, in one arena for all threads, so that a thread reuses what another has touched.

    It does nothing if one of glibc's own MALLOC_* variables is set.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)  # setting one of the two switches off glibc's adapting of both
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    mallopt(_M_ARENA_MAX, 1)


def touch(size: int) -> None:
    """Touch `size` bytes of heap, at most 512 MB, and free them."""
    pieces = [torch.zeros(_PIECE, dtype=torch.uint8) for _ in range(min(size, _MOST) // _PIECE + 1)]
    pieces.clear()
