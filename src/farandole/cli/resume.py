"""Finds what a run resumes from: the run in its folder, or the checkpoint of `--resume`.

A resumed run keeps the options that its results depend on and the place of its checkpoints, so the user need not repeat
them. Everything is checked before anything is started, without torch. The worker that loads a checkpoint verifies it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from farandole.checkpoint import owner
from farandole.checkpoint.reach import listed, see
from farandole.checkpoint.schedule import Every
from farandole.checkpoint.store import Manifest, RunIdentity, Store, incomplete, newest, reaching
from farandole.cli.folders import lives, others_word, past_of
from farandole.control.run_folder import CHECKPOINTS, METRICS, SETTINGS
from farandole.errors import UsageError
from farandole.platform.files import decoded
from farandole.platform.output import plain
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Checkpoints, Newest, RunTerms

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """Options of `farandole run`. A resumed run takes the former value of an option that is not given (None)."""

    seed: int | None = None
    threads: int | None = None
    checkpoints: str | None = None
    every: str | None = None
    keep: int | None = None
    resume: str | None = None
    ledger: bool = False
    bits: str | None = None
    codec: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The terms of a run and its initial checkpoint.

    Attributes:
        newest: the checkpoint that the run must begin with, or a later one.
        note: a note for the user, "" for none.
        takes: the run writes its checkpoints to the place that it resumes from, which belongs to another run so far.
    """

    terms: RunTerms
    newest: Newest
    note: str = ""
    takes: bool = False


def settle(options: GivenOptions, terms: RunTerms, folder: Path | None) -> ResumePlan:
    """Combines `terms` with the given options and, if `folder` holds a run, with the terms of that run.

    `folder` is None if the folder has yet to be created.

    Raises:
        UsageError: an option can't be read or written, or contradicts the run that is resumed.
        FarandoleError: a place of checkpoints can't be reached.
        CheckpointsGone: the resumed run has written checkpoints, and they are missing.
    """
    Every.parse(options.every or "never")
    before = _earlier(folder) if folder else None
    return (
        _plan_new_run(options, terms) if folder is None or before is None else _resumed(options, terms, before, folder)
    )


def _earlier(folder: Path) -> RunSettings | None:
    if not os.path.exists(folder / METRICS) or not os.path.exists(folder / SETTINGS):
        return None
    try:
        return decoded((folder / SETTINGS).read_bytes(), RunSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--folder {folder}: the settings of the run in it can't be read ({error})") from None


def _resumed(options: GivenOptions, terms: RunTerms, before: RunSettings, folder: Path) -> ResumePlan:
    """Returns the plan to resume the run in `folder`."""
    if options.resume is not None:
        raise UsageError(
            f"--folder {folder} holds a run, which resumes from its own checkpoints: leave out --resume, or give "
            f"another --folder"
        )
    then = before.checkpoints
    checkpoints = Checkpoints(
        url=_unchanged("--checkpoints", _place(options.checkpoints), then.url, folder),
        every=options.every or then.every,
        keep=options.keep or then.keep,
        resume=then.resume,
        identity=then.identity,
    )
    run = RunIdentity(then.identity, before.run) if then.identity else None
    own = checkpoints.url or str(folder / CHECKPOINTS)
    places = [own, checkpoints.resume] if checkpoints.resume else [own]
    recorded = listed(folder / METRICS)
    with reaching(" and ".join(places)):
        see(places, recorded, run)
        checkpoint = newest(own, run) or (newest(checkpoints.resume) if checkpoints.resume else None)
        unfinished = incomplete(own, after=checkpoint.step if checkpoint else -1, run=run)
    at = f"from step {checkpoint.step}" if checkpoint else "from step 0, since it has no complete checkpoint yet"
    before_it = past_of(folder)
    if before_it is not None and before_it.outcome == "finished":
        if checkpoint is None:
            raise UsageError(
                f"--folder {folder} holds a finished run, and none of its checkpoints is left to resume "
                f"from: use another --folder"
            )
        at = f"from step {checkpoint.step}, if the script now sets more steps: the run is finished"
    return ResumePlan(
        terms=msgspec.structs.replace(
            terms,
            seed=_unchanged("--seed", options.seed, before.seed, folder),
            threads=_unchanged("--threads", options.threads, before.threads, folder),
            checkpoints=checkpoints,
            ledger=options.ledger or before.ledger,
            bits=_bits(options.bits, before.bits, folder),
            codec=_codec(options.codec, before.codec, folder),
        ),
        newest=Newest(step=checkpoint.step, path=own) if checkpoint and checkpoint.step > recorded.step else recorded,
        note=f"resuming the run in this folder {at}{unfinished and f'; {unfinished}'}",
    )


def _unchanged(option: str, value: T | None, before: T, folder: Path) -> T:
    if value is not None and value != before:
        had = "none" if before == "" else before
        raise UsageError(
            f"{option} {value}: the run in {folder} has {had} and keeps it; leave the option out, or give "
            f"another --folder"
        )
    return before


def _bits(value: str | None, before: str, folder: Path) -> str:
    """Returns the mode of results. Portable results differ, so a run keeps that choice; same and any may change."""
    return _unchanged("--bits", value, before, folder) if "portable" in (value, before) else value or before


def _codec(value: str | None, before: str, folder: Path) -> str:
    """Returns the codec. The format of the sums stays, because it decides the results; their compression may change."""
    formats = [(codec or before).split("+")[0] for codec in (value, before)]
    formats = ["none" if name in ("float32", "auto") else name for name in formats]
    return (value or before) if formats[0] == formats[1] else _unchanged("--codec", value, before, folder)


def _plan_new_run(options: GivenOptions, terms: RunTerms) -> ResumePlan:
    """Returns the plan of a new run, which starts at step 0 or from a checkpoint of another run."""
    url, source, note = _place(options.checkpoints) or "", "", ""
    checkpoint: Manifest | None = None
    if options.resume is not None:
        source = _source(options.resume)
        with reaching(source):
            checkpoint = newest(source)
        if checkpoint is None:
            raise UsageError(f"--resume {options.resume}: no checkpoint at {source}")
        note = f"resuming from step {checkpoint.step} of run {checkpoint.run}"
    takes = url != "" and url == source
    if url:
        owner.look(url, alive=lives, takes=takes)
    seed, threads = (checkpoint.seed, int(checkpoint.fact("intra-op threads") or 1)) if checkpoint else (0, 1)
    return ResumePlan(
        terms=msgspec.structs.replace(
            terms,
            seed=seed if options.seed is None else options.seed,
            threads=threads if options.threads is None else options.threads,
            checkpoints=Checkpoints(
                url=url,
                every=options.every or Checkpoints().every,
                keep=options.keep or Checkpoints().keep,
                resume=source,
            ),
            ledger=options.ledger,
        ),
        newest=Newest(step=checkpoint.step, path=source) if checkpoint else Newest(),
        note=note,
        takes=takes,
    )


def _place(location: str | None) -> str | None:
    """Returns a URL as it is, and a path as an absolute path, so that all workers can use it."""
    return location if location is None or "://" in location else str(Path(location).absolute())


def _source(location: str) -> str:
    """Returns the place of checkpoints that `--resume` means; a run's folder means the place of that run."""
    place = _place(location)
    assert place is not None
    if "://" in place:
        return place
    before, inside = _earlier(Path(place)), Path(place, CHECKPOINTS)
    if before and before.checkpoints.url:
        if why := others_word(Path(place)):
            raise UsageError(
                f"--resume {location}: {why}, and its settings name {plain(before.checkpoints.url)} as the place of "
                f"its checkpoints: if you trust that place, give it as --resume"
            )
        return _its_own(before)
    return str(inside) if os.path.isdir(inside) else place


def _its_own(before: RunSettings) -> str:
    """Returns the place of a run's checkpoints, or the newest one if runs share the place."""
    url, identity = before.checkpoints.url, before.checkpoints.identity
    if not identity:
        return url
    with reaching(url):
        own, every = Store(url, RunIdentity(identity, before.run)), Store(url)
        mine, all_ = ([entry for entry in store.entries() if entry.whole] for store in (own, every))
    return own.place(mine[0].stem) if mine and mine != all_ else url
