"""Settings: the only reader of FARANDOLE_* variables. An argument beats a variable, a variable beats the default."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS
from farandole.platform.plain import LONGEST_NAME, is_name, is_text

T = TypeVar("T")
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
            slot=read(environ, "LOCAL_RANK", _count, None),
            bench=environ.get("FARANDOLE_BENCH", ""),
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
