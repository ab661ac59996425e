"""The ownership of a checkpoint store by one run, recorded in the store's object `.run`.

A run has an *identity*, a random number that does not change during its life: across coordinator restarts,
`farandole run --folder` on its folder, and `--take-over` on another machine. It is in the run's settings, in the name
and the manifest of each of its checkpoints, and in the object `.run` in their store, with the run's name, host and
folder. A process that finds it there, and can write to the store, reaches the run's own store (`reach.py`).

Two rules keep runs apart, and the first alone is enough for safety:

1. A run sees, resumes from and removes only checkpoints with its identity (`store.py`). So two runs in one store, for
   any reason, do not touch each other's checkpoints.
2. A store has one owner. `claim` writes `.run`, or raises an error that names the owner:

       no owner                                claimed
       this run (it resumes)                   claimed again, also when its machine was lost
       another run that is alive               refused. A run is alive if its folder is visible here, and locked
       another run that may be over            refused, except with `--resume` of the same store, which takes it over
       another run that is known to be over,
       and no checkpoint of another run exists claimed: a run that could not start leaves only `.run`

   This process can't know whether a run on another machine is alive: with `--resume` of its store the user states that
   it is over. If that is wrong, rule 1 holds, and workers of the other run that start later report the new owner.

If two runs claim a free store at the same time: `.run` is created only if it does not exist. A folder guarantees that,
and so do S3 and Google Cloud Storage. In a store without this guarantee both may write: so each reads `.run` again
after `SETTLE_S`, and the last writer owns the store. If the first writer does not notice that, it is not stopped, and
rule 1 holds.

For a store in a run's own folder the folder decides, which one process locks at a time (`control/run_folder.py`): its
`checkpoints` belong to its run, and `adopt` finds the identity of that run.
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
    """The content of `.run`. Earlier versions wrote only the identity.

    `id`: the run's identity; `machine`: a unique name of the machine that started it; `inside`: the store is in the
    run's own `folder`; `time`: seconds since the epoch.
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
    """Return a random identity of 32 hexadecimal digits."""
    return secrets.token_hex(16)


def this_run(identity: str, folder: Path, *, inside: bool) -> Owner:
    """Return the owner for the run in `folder`, which this process starts or resumes."""
    folder = folder.resolve()
    return Owner(
        id=identity, run=folder.name, host=socket.gethostname(), machine=_machine(), folder=str(folder), inside=inside,
        time=time.time(),
    )  # fmt: skip


def owner_of(store: Store) -> Owner | None:
    """Return the store's owner; None if there is none, or `.run` is not readable (the disk was full when written).

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
    """Return the identity of the run whose checkpoints are at `place`, in its own `folder`.

    Without checkpoints it returns a new one. This process holds the lock of the folder.

    Raises:
        UsageError: the store belongs to a run of another folder.
        Exception: the store can't be read.
    """
    store = Store(place)
    owner = owner_of(store)
    if owner is not None and not owner.inside and owner.run and owner.folder != str(folder.resolve()):
        raise UsageError(f"{place} has the checkpoints of {owner}: use another folder")
    if owner is not None:
        return owner.id
    for entry in store.entries():
        try:
            if identity := store.manifest(entry.stem).run_id:
                return identity
        except DamagedError:
            continue
    return new_identity()


def mark_inside(place: str, owner: Owner) -> None:
    """Write `owner` to the store in its run's own folder.

    A failure is logged, and the run continues: the next process takes the identity from the checkpoints.
    """
    store = Store(place)
    try:
        if owner_of(store) != owner:
            store.put(MARK, _written(owner))
    except OSError as error:
        _log.warning("%s can't be written at %s: %s", MARK, place, first_line(error))


def look(url: str, *, alive: Alive, takes: bool = False) -> None:
    """Check that a new run could `claim` the store at `url`, without changing it. Raises the errors of `claim`."""
    store = Store(url)
    store.check()
    with _refusing(url):
        _judge(store, owner_of(store), Owner(id=""), alive, takes=takes)


def claim(url: str, owner: Owner, *, alive: Alive, takes: bool = False) -> None:
    """Claim the store at `url` for `owner`'s run; the module's docstring has the rules.

    `alive(owner, folder)`: returns True if that run is alive. `takes`: the user resumes from this store, and so
    takes it over from a run that is over.

    Raises:
        UsageError: another run owns it, or it can't be read or written.
    """
    store = Store(url)
    store.check()
    with _refusing(url), _one_at_a_time(store):
        for _ in range(_TRIES):
            present = owner_of(store)
            _judge(store, present, owner, alive, takes=takes)
            if present is not None and msgspec.structs.replace(present, time=owner.time) == owner:
                return
            if present is None and not store.put_new(MARK, _written(owner)) and owner_of(store) is not None:
                continue  # another run was faster
            if owner_of(store) != owner:
                store.put(MARK, _written(owner))
            if not store.local:
                time.sleep(SETTLE_S)
            if owner_of(store) == owner:
                return
    raise UsageError(
        f"checkpoints at {url}: another run claims this store at the same time: use another one, or start this run "
        f"again when the other run is over"
    )


@contextlib.contextmanager
def _refusing(url: str) -> Generator[None]:
    try:
        yield
    except FarandoleError:
        raise
    except Exception as error:  # noqa: BLE001  each kind of store has its own errors
        raise UsageError(f"checkpoints at {url} can't be used: {first_line(error)}") from None


@contextlib.contextmanager
def _one_at_a_time(store: Store) -> Generator[None]:
    """Hold a lock among the processes that see the same folder, if its file system supports locks; else do nothing."""
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


def _judge(store: Store, present: Owner | None, owner: Owner, alive: Alive, *, takes: bool) -> None:
    """Raise UsageError if `owner` can't claim the store of owner `present`."""
    if present is not None:
        folder = str(Path(store.path).parent.resolve()) if present.inside and store.local else present.folder
        if folder and folder != owner.folder and alive(present, Path(folder)):
            raise UsageError(
                f"checkpoints at {store.url} are those of {present}, which is alive: use another store, or end that "
                f"run with `farandole stop --run {folder}`"
            )
        if present.id == owner.id:
            return
    if takes or (present is None and owner.inside):
        return
    if any(not entry.run or not owner.id.startswith(entry.run) for entry in store.entries()):
        raise UsageError(
            f"checkpoints at {store.url} are those of {present or 'another run'}: resume from them with --resume "
            f"{store.url}, or use another store"
        )
    if present is not None and present.machine != _machine() and not owner.inside:
        raise UsageError(
            f"checkpoints at {store.url} are those of {present}, which has written none so far and may be alive: use "
            f"another store; if that run is over, remove {MARK} there"
        )


def _written(owner: Owner) -> bytes:
    return msgspec.json.format(msgspec.json.encode(owner)) + b"\n"


def _machine() -> str:
    """Return the boot id and the mount namespace of this machine: two machines may have one host name."""
    try:
        return f"{Path(_BOOT).read_text().strip()} {os.readlink(_MOUNTS)}"
    except OSError:
        return f"{socket.gethostname()} {os.uname().sysname}"
