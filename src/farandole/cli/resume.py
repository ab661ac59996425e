"""What a run goes on from: the run that its folder holds, or what `--resume` names.

Whoever resumes says nothing twice: what the bits depend on, and where the checkpoints are, is as it was. Everything
is looked at before anything is started, without torch; whether a checkpoint verifies, the worker that loads it
sees.
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
    """Options of `farandole run` that a resumed run takes over where they were not given (None)."""

    seed: int | None = None
    threads: int | None = None
    checkpoints: str | None = None
    every: str | None = None
    keep: int | None = None
    resume: str | None = None
    ledger: bool = False
    bits: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The terms that they come to, the checkpoint that the run has to begin with, and what to say of it. `takes`: it is
    to go on in the place that it begins from, which is another run's so far.
    """

    terms: RunTerms
    newest: Newest
    said: str = ""
    takes: bool = False


def settle(asked: GivenOptions, terms: RunTerms, folder: Path | None) -> ResumePlan:
    """The terms of the run to be started in `folder`, None for one yet to be made: `terms`, with what was `asked`.

    Raises:
        UsageError: something asked for can't be read or written, or contradicts the run that is resumed.
        FarandoleError: a place of checkpoints can't be reached.
        CheckpointsGone: the run that is resumed has written checkpoints, and they are not there.
    """
    Every.parse(asked.every or "never")
    before = _earlier(folder) if folder else None
    return _begun(asked, terms) if folder is None or before is None else _resumed(asked, terms, before, folder)


def _earlier(folder: Path) -> RunSettings | None:
    if not os.path.exists(folder / METRICS) or not os.path.exists(folder / SETTINGS):
        return None
    try:
        return decoded((folder / SETTINGS).read_bytes(), RunSettings)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"--folder {folder}: the settings of the run in it can't be read ({error})") from None


def _resumed(asked: GivenOptions, terms: RunTerms, before: RunSettings, folder: Path) -> ResumePlan:
    """The run that `folder` holds goes on."""
    if asked.resume is not None:
        raise UsageError(
            f"--folder {folder} holds a run, which goes on from its own checkpoints: leave out --resume, or name "
            f"another --folder"
        )
    then = before.checkpoints
    checkpoints = Checkpoints(
        url=_unchanged("--checkpoints", _place(asked.checkpoints), then.url, folder),
        every=asked.every or then.every,
        keep=asked.keep or then.keep,
        resume=then.resume,
        identity=then.identity,
    )
    run = RunIdentity(then.identity, before.run) if then.identity else None
    own = checkpoints.url or str(folder / CHECKPOINTS)
    places = [own, checkpoints.resume] if checkpoints.resume else [own]
    known = listed(folder / METRICS)
    with reaching(" and ".join(places)):
        see(places, known, run)
        found = newest(own, run) or (newest(checkpoints.resume) if checkpoints.resume else None)
        left = incomplete(own, after=found.step if found else -1, run=run)
    at = f"from step {found.step} or later" if found else "from its beginning, for it has no whole checkpoint yet"
    before_it = past_of(folder)
    if before_it is not None and before_it.outcome == "finished":
        if found is None:
            raise UsageError(
                f"--folder {folder} holds a run that has run to its end, and no checkpoint of it is left to go on "
                f"from: use another --folder"
            )
        at = f"from step {found.step}, if the script asks for more: it has run to its end before"
    return ResumePlan(
        terms=msgspec.structs.replace(
            terms,
            seed=_unchanged("--seed", asked.seed, before.seed, folder),
            threads=_unchanged("--threads", asked.threads, before.threads, folder),
            checkpoints=checkpoints,
            ledger=asked.ledger or before.ledger,
            bits=_bits(asked.bits, before.bits, folder),
        ),
        newest=Newest(step=found.step, path=own) if found and found.step > known.step else known,
        said=f"resuming the run in this folder {at}{left and f'; {left}'}",
    )


def _unchanged(option: str, asked: T | None, before: T, folder: Path) -> T:
    if asked is not None and asked != before:
        had = "none" if before == "" else before
        raise UsageError(
            f"{option} {asked}: the run in {folder} has {had}, and is resumed with that; leave the option out, or name "
            f"another --folder"
        )
    return before


def _bits(asked: str | None, before: str, folder: Path) -> str:
    """Portable bits are others, so what the run has begun with it keeps; who is let in may change."""
    return _unchanged("--bits", asked, before, folder) if "portable" in (asked, before) else asked or before


def _begun(asked: GivenOptions, terms: RunTerms) -> ResumePlan:
    """A new run, from its beginning or from another's checkpoint."""
    url, source, said = _place(asked.checkpoints) or "", "", ""
    found: Manifest | None = None
    if asked.resume is not None:
        source = _source(asked.resume)
        with reaching(source):
            found = newest(source)
        if found is None:
            raise UsageError(f"--resume {asked.resume}: no checkpoint at {source}")
        said = f"resuming from step {found.step} of run {found.run}"
    takes = url != "" and url == source
    if url:
        owner.look(url, alive=lives, takes=takes)
    seed, threads = (found.seed, int(found.fact("intra-op threads") or 1)) if found else (0, 1)
    return ResumePlan(
        terms=msgspec.structs.replace(
            terms,
            seed=seed if asked.seed is None else asked.seed,
            threads=threads if asked.threads is None else asked.threads,
            checkpoints=Checkpoints(
                url=url, every=asked.every or Checkpoints().every, keep=asked.keep or Checkpoints().keep, resume=source
            ),
            ledger=asked.ledger,
        ),
        newest=Newest(step=found.step, path=source) if found else Newest(),
        said=said,
        takes=takes,
    )


def _place(given: str | None) -> str | None:
    """A place as all workers understand it, wherever they run."""
    return given if given is None or "://" in given else str(Path(given).absolute())


def _source(given: str) -> str:
    """The place of checkpoints that `--resume` means: a run's folder stands for the run's."""
    place = _place(given)
    assert place is not None
    if "://" in place:
        return place
    before, inside = _earlier(Path(place)), Path(place, CHECKPOINTS)
    if before and before.checkpoints.url:
        if why := others_word(Path(place)):
            raise UsageError(
                f"--resume {given}: {why}, and its settings name {plain(before.checkpoints.url)} as the place of its "
                f"checkpoints: if you trust that, give it as --resume"
            )
        return _its_own(before)
    return str(inside) if os.path.isdir(inside) else place


def _its_own(before: RunSettings) -> str:
    """The place of that run's checkpoints; its newest one by name, where those of other runs lie beside it."""
    url, identity = before.checkpoints.url, before.checkpoints.identity
    if not identity:
        return url
    with reaching(url):
        own, every = Store(url, RunIdentity(identity, before.run)), Store(url)
        mine, all_ = ([entry for entry in store.entries() if entry.whole] for store in (own, every))
    return own.place(mine[0].stem) if mine and mine != all_ else url
