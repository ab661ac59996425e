"""Whose a place of checkpoints is: one run's, whose name stands in it.

A run has an *identity*, a random number that it keeps as long as it lives: over coordinators that are started again,
`farandole run --folder` on its folder, and `--take-over` on another machine. It is in the run's settings, in the name
and the manifest of each of its checkpoints, and in the object `.run` at their place, with the run's name, host and
folder. Who finds it there, and can write beside it, reaches the run's own store (`reach.py`).

Two things keep runs apart, and the first alone keeps them from harm:

1. A run sees, goes on from and removes only checkpoints with its identity (`store.py`). So two runs in one place, for
   whatever reason, do not touch each other's.
2. A place has one owner. `claim` writes `.run`, or says who has it:

       nobody                                  it is taken
       this run (it goes on)                   it is taken again, also when its machine was lost
       another run that is alive               refused. Alive is one whose folder is seen from here, and held
       another run that may be over            refused, but with `--resume` of the same place, which takes it over
       the same, known to be over, and no
       checkpoint of another run is there      it is taken: a run that could not start leaves no more than this

   Whether a run on another machine is alive can't be known here: `--resume` of its place is the user's word that it is
   over. Where that word is wrong, 1 holds, and its workers that start from then on say whose the place is now.

Two that claim a free place at the same moment: `.run` is created only if it is not there. A folder does that, and so do
S3 and Google's store. In a store that does not, both may write: so each reads it again after `SETTLE_S`, and the last
one to write has the place. Beyond that the first of the two is not stopped, and 1 holds.

In a run's own folder the folder decides, which one process holds at a time (`control/run_folder.py`): what lies in its
`checkpoints` is its run's, and `adopt` finds out which that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from farandole.checkpoint.store import DamagedError, Store, first_line
from farandole.errors import FarandoleError, UsageError

MARK = ".run"
SETTLE_S = 1.0
_TRIES = 3
_ID = re.compile(r"[0-9a-f]{32}")
_BOOT, _MOUNTS = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt"

_log = logging.getLogger(__name__)


Alive = Callable[["Owner", Path], bool]


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """What `.run` says. `id`: the run's identity; `machine`: where it was started, as no other machine is called;
    `inside`: the place is the checkpoints' in the run's own `folder`. Of earlier versions there is the identity alone.
    """

    id: str
    run: str = ""
    host: str = ""
    machine: str = ""
    folder: str = ""
    inside: bool = False
    time: float = 0.0

    def __str__(self) -> str:
        return f"run {self.run} ({self.folder} on {self.host})" if self.run else "another run"


def new_identity() -> str:
    return secrets.token_hex(16)


def this_run(identity: str, folder: Path, *, inside: bool) -> Owner:
    """The run in `folder`, which this process starts or goes on with."""
    folder = folder.resolve()
    return Owner(
        id=identity, run=folder.name, host=socket.gethostname(), machine=_machine(), folder=str(folder), inside=inside,
        time=time.time(),
    )  # fmt: skip


def owner_of(store: Store) -> Owner | None:
    """Whose the place is; None: nobody's, or not to be read (a disk was full when it was written).

    Raises:
        OSError: the store can't be reached.
    """
    try:
        content = store.small(MARK)
    except FileNotFoundError:
        return None
    text = content.decode(errors="replace").strip()
    if _ID.fullmatch(text):
        return Owner(id=text)
    try:
        return msgspec.json.decode(content, type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def adopt(place: str, folder: Path) -> str:
    """The identity of the run whose checkpoints lie at `place`, in its own `folder`, which this process holds; a new
    one if there are none.

    Raises:
        UsageError: the place is that of a run of another folder.
        Exception: it can't be read.
    """
    store = Store(place)
    owner = owner_of(store)
    if owner is not None and not owner.inside and owner.run and owner.folder != str(folder.resolve()):
        raise UsageError(f"{place} has the checkpoints of {owner}: name another folder")
    if owner is not None:
        return owner.id
    for entry in store.entries():
        try:
            if found := store.manifest(entry.stem).run_id:
                return found
        except DamagedError:
            continue
    return new_identity()


def mark_inside(place: str, owner: Owner) -> None:
    """Write `owner` at the place of its run's own folder. Where that fails it is told, and the run goes on: who comes
    next takes the identity from the checkpoints.
    """
    store = Store(place)
    try:
        if owner_of(store) != owner:
            store.put(MARK, _written(owner))
    except OSError as error:
        _log.warning("%s can't be written at %s: %s", MARK, place, first_line(error))


def look(url: str, *, alive: Alive, takes: bool = False) -> None:
    """See that a new run could `claim` the place at `url`, and leave it as it is. Raises as `claim` does."""
    store = Store(url)
    store.check()
    with _refusing(url):
        _judge(store, owner_of(store), Owner(id=""), alive, takes=takes)


def claim(url: str, owner: Owner, *, alive: Alive, takes: bool = False) -> None:
    """Take the place at `url` for `owner`'s run; see the module's head. `alive` says of a run and its folder whether it
    is; `takes`: the user has named the place to go on from, and so takes it over from a run that is over.

    Raises:
        UsageError: another run has it, or it can't be read or written.
    """
    store = Store(url)
    store.check()
    with _refusing(url), _one_at_a_time(store):
        for _ in range(_TRIES):
            there = owner_of(store)
            _judge(store, there, owner, alive, takes=takes)
            if there is not None and msgspec.structs.replace(there, time=owner.time) == owner:
                return
            if there is None and not store.put_new(MARK, _written(owner)) and owner_of(store) is not None:
                continue  # somebody was faster
            if owner_of(store) != owner:
                store.put(MARK, _written(owner))
            if not store.local:
                time.sleep(SETTLE_S)
            if owner_of(store) == owner:
                return
    raise UsageError(
        f"checkpoints at {url}: another run claims this place at the same moment: name another one, or start this run "
        f"again when that one is over"
    )


@contextlib.contextmanager
def _refusing(url: str) -> Generator[None]:
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:  # noqa: BLE001  every kind of place has errors of its own
        raise UsageError(f"checkpoints at {url} can't be used: {first_line(error)}") from None


@contextlib.contextmanager
def _one_at_a_time(store: Store) -> Generator[None]:
    """Of the processes that see the same folder, where its file system keeps locks. Elsewhere nothing is kept out."""
    if not store.local:
        yield
        return
    handle = os.open(store.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _judge(store: Store, there: Owner | None, owner: Owner, alive: Alive, *, takes: bool) -> None:
    """Raises UsageError where `owner` can't have the place."""
    if there is not None:
        folder = str(Path(store.path).parent.resolve()) if there.inside and store.local else there.folder
        if folder and folder != owner.folder and alive(there, Path(folder)):
            raise UsageError(
                f"checkpoints at {store.url} are those of {there}, which is alive: name another place, or end that run "
                f"with `farandole stop --run {folder}`"
            )
        if there.id == owner.id:
            return
    if takes or (there is None and owner.inside):
        return
    if any(not entry.run or not owner.id.startswith(entry.run) for entry in store.entries()):
        raise UsageError(
            f"checkpoints at {store.url} are those of {there or 'another run'}: go on from them with --resume "
            f"{store.url}, or name another place"
        )
    if there is not None and there.machine != _machine() and not owner.inside:
        raise UsageError(
            f"checkpoints at {store.url} are those of {there}, which has written none so far and may be alive: name "
            f"another place; if that run is over, remove {MARK} there"
        )


def _written(owner: Owner) -> bytes:
    return msgspec.json.format(msgspec.json.encode(owner)) + b"\n"


def _machine() -> str:
    """The machine since it was started, and what a process sees of its files: two may have one host name."""
    try:
        return f"{Path(_BOOT).read_text().strip()} {os.readlink(_MOUNTS)}"
    except OSError:
        return f"{socket.gethostname()} {os.uname().sysname}"
