"""Settings: the only reader of FARANDOLE_* variables. An argument beats a variable, a variable beats the default."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS
from farandole.platform.output import LONGEST_NAME, is_name, is_text

T = TypeVar("T")
SLOT = "FARANDOLE_SLOT"
# By these torchrun, mpirun and the like tell a process its place in a group of fixed size. Accelerate, transformers and
# others who find them wait for such a group.
_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PMIX)_(LOCAL_)?(RANK|SIZE)"
)
AGENT = "FARANDOLE_AGENT"  # in the environment of all that the agent of a host starts: the name of its folder


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker process is told by its surroundings.

    ticket: path of the run's ticket, "" for a world of one. worker, pool: the id and the pool's name that the pool gave
    this process. seed, threads, bits: for a world of one; under a coordinator the run's own values hold. folder: where
    a world of one writes metrics and checkpoints, "" for nowhere; checkpoint_every: how often; history: a file that
    says how many workers it stands for at which step. ledger: count every delivered sample. pack: the hash of the run's
    packed code, where that is executed. interface: the address that the data plane binds to, "" for the one that leads
    to the coordinator. shared_memory: exchange through memory with workers of the same host, where that can be. slot:
    this worker's on its host, if a pool has given it one. bench: what this worker is to measure, for `farandole bench`.
    """

    ticket: str = ""
    worker: str = ""
    pool: str = ""
    host: str = ""
    seed: int = 0
    threads: int = 1
    bits: str = "same"
    folder: str = ""
    ledger: bool = False
    checkpoint_every: str = "10m"
    history: str = ""
    interface: str = ""
    code: str = ""
    returns: int = 0
    pack: str = ""
    metadata: str = ""
    shared_memory: bool = True
    slot: int | None = None
    bench: str = ""

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Settings:
        """The settings of this process.

        Raises:
            UsageError: a variable that does not parse; names it.
        """
        for name, text in environ.items():
            if name.startswith("FARANDOLE_") and not is_text(text):
                raise UsageError(f"{name}={text!r} is not UTF-8, in which a run's files are written")
        return Settings(
            ticket=environ.get("FARANDOLE_TICKET", ""),
            worker=read(environ, "FARANDOLE_WORKER", _name, ""),
            pool=read(environ, "FARANDOLE_POOL", _name, ""),
            host=read(environ, "FARANDOLE_HOST", _name, socket.gethostname()),
            seed=read(environ, "FARANDOLE_SEED", partial(_whole, -MAX_SEED, MAX_SEED), 0),
            threads=read(environ, "FARANDOLE_THREADS", partial(_whole, 1, MAX_THREADS), 1),
            bits=environ.get("FARANDOLE_BITS") or "same",
            folder=environ.get("FARANDOLE_FOLDER", ""),
            ledger=environ.get("FARANDOLE_LEDGER", "") not in ("", "0"),
            checkpoint_every=environ.get("FARANDOLE_CHECKPOINT_EVERY", "10m"),
            history=environ.get("FARANDOLE_HISTORY", ""),
            interface=environ.get("FARANDOLE_INTERFACE", ""),
            code=environ.get("FARANDOLE_CODE", ""),
            returns=read(environ, "FARANDOLE_RETURNS", _count, 0),
            pack=environ.get("FARANDOLE_PACK", ""),
            metadata=environ.get("FARANDOLE_METADATA", ""),
            shared_memory=environ.get("FARANDOLE_SHARED_MEMORY", "1") != "0",
            slot=read(environ, SLOT, _count, None),
            bench=environ.get("FARANDOLE_BENCH", ""),
        )


def leave_launcher(environ: MutableMapping[str, str]) -> list[str]:
    """Remove the variables of another launcher, and give their names: a worker has no place in a group of fixed size.

    Which GPU it is to take is kept: LOCAL_RANK becomes the slot, if none is given.
    """
    names = [name for name in environ if _OF_LAUNCHERS.fullmatch(name)]
    rank = environ.get("LOCAL_RANK", "")
    if rank.isdecimal() and not environ.get(SLOT):
        environ[SLOT] = rank
    for name in names:
        del environ[name]
    return names


def refuse_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `UsageError` where another launcher has started several of this process, each a run by itself."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and environ.get("RANK"):
        raise UsageError(
            f"WORLD_SIZE={size}: torchrun, or a launcher like it, has started {size} of this process, and each would "
            f"train the whole run by itself; start one by `farandole run --workers {size} SCRIPT`, or unset WORLD_SIZE"
        )


def agent_of(environ: bytes) -> str:
    """The agent whose process that is, "" for none's; of an environment as /proc shows it."""
    mark = f"{AGENT}=".encode()
    return next((v[len(mark) :].decode(errors="replace") for v in environ.split(b"\0") if v.startswith(mark)), "")


def verbosity() -> int:
    """How much of the log this process shows: 0, or how often `-v` was given."""
    return read(os.environ, "FARANDOLE_VERBOSE", _count, 0)


def _whole(least: int, most: int, text: str) -> int:
    if not least <= (number := int(text)) <= most:
        raise ValueError(f"use {least} to {most}")
    return number


_count = partial(_whole, 0, MAX_COUNT)


def slot(environ: Mapping[str, str] = os.environ) -> int:
    """This worker's slot on its host, which says whose GPU it takes; 0 if nobody has given it one."""
    return read(environ, SLOT, _count, 0)


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"a name has at most {LONGEST_NAME} characters, all of them to be seen")
    return text


def read(environ: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    """One variable, parsed.

    Raises:
        UsageError: it does not parse.
    """
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: {error}; unset it to use {default!r}") from error
