"""The settings of a worker process. Only this module reads FARANDOLE_* variables.

An argument takes precedence over a variable, and a variable over the default.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT
from farandole.platform.output import LONGEST_NAME, is_name, is_text
from farandole.run_options import RUN_OPTIONS, default

T = TypeVar("T")
SLOT = "FARANDOLE_SLOT"
# torchrun, mpirun and other launchers set these variables to give a process its place in a group of fixed size.
# Accelerate, transformers and other libraries that see them wait for such a group.
OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"(OMPI_COMM_WORLD|MV2_COMM_WORLD|PMI|PMIX)_(LOCAL_)?(RANK|SIZE)"
)
AGENT = "FARANDOLE_AGENT"  # set in all processes that a host's agent starts: the name of the agent's folder


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that a worker process reads from its environment.

    ticket: path of the run's ticket, "" for a single process (`world_size=1`). worker, pool: the worker id and the
    pool's name that the pool assigned to this process. seed, threads, bits, codec: for a single process only; under a
    coordinator the run's values apply. folder: where a single process writes metrics and checkpoints, "" for nowhere;
    checkpoint_every: how often it writes checkpoints; history: a file that states how many workers it represents at
    which step. ledger: count every delivered sample. pack: the hash of the run's packed code, if packed code is
    executed. interface: the address that the data plane binds to, "" for the one on the route to the coordinator.
    shared_memory: exchange through shared memory with workers of the same host, where possible. slot: this worker's
    slot on its host, if a pool has assigned one. bench: what this worker measures, for `farandole bench`.
    zone: the zone of its host, "" if unknown. check: the part of `farandole check` that this process computes.
    """

    ticket: str = ""
    worker: str = ""
    pool: str = ""
    host: str = ""
    seed: int = default("seed")
    threads: int = default("threads")
    bits: str = default("bits")
    codec: str = default("codec")
    folder: str = ""
    ledger: bool = default("ledger")
    checkpoint_every: str = default("every")
    history: str = ""
    interface: str = ""
    code: str = ""
    returns: int = 0
    pack: str = ""
    metadata: str = ""
    shared_memory: bool = True
    slot: int | None = None
    bench: str = ""
    check: str = ""
    zone: str = ""

    @staticmethod
    def read(environ: Mapping[str, str] = os.environ) -> Settings:
        """Return the settings of this process.

        Raises:
            UsageError: a variable does not parse. The message names it.
        """
        for name, text in environ.items():
            if name.startswith("FARANDOLE_") and not is_text(text):
                raise UsageError(f"{name}={text!r} is not valid UTF-8, which the run's files need")
        return Settings(
            ticket=environ.get("FARANDOLE_TICKET", ""),
            worker=read(environ, "FARANDOLE_WORKER", _name, ""),
            pool=read(environ, "FARANDOLE_POOL", _name, ""),
            host=read(environ, "FARANDOLE_HOST", _name, socket.gethostname()),
            seed=_of_run(environ, "seed", int),
            threads=_of_run(environ, "threads", int),
            bits=_of_run(environ, "bits", str),
            codec=_of_run(environ, "codec", str),
            folder=environ.get("FARANDOLE_FOLDER", ""),
            ledger=_of_run(environ, "ledger", lambda text: text != "0"),
            checkpoint_every=_of_run(environ, "every", str),
            history=environ.get("FARANDOLE_HISTORY", ""),
            interface=environ.get("FARANDOLE_INTERFACE", ""),
            code=environ.get("FARANDOLE_CODE", ""),
            returns=read(environ, "FARANDOLE_RETURNS", _count, 0),
            pack=environ.get("FARANDOLE_PACK", ""),
            metadata=environ.get("FARANDOLE_METADATA", ""),
            shared_memory=environ.get("FARANDOLE_SHARED_MEMORY", "1") != "0",
            slot=read(environ, SLOT, _count, None),
            bench=environ.get("FARANDOLE_BENCH", ""),
            check=environ.get("FARANDOLE_CHECK", ""),
            zone=read(environ, "FARANDOLE_ZONE", _name, ""),
        )


def _of_run(environ: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T:
    """Return the run's option `name` from its environment variable, checked as on the command line."""
    option = RUN_OPTIONS[name]
    value = read(environ, option.variable, parse, option.default)
    option.check(value, option.variable)
    return value


def leave_launcher(environ: MutableMapping[str, str]) -> list[str]:
    """Remove the variables of another launcher, and return their names.

    A worker has no place in a group of fixed size. The choice of the GPU is kept: LOCAL_RANK becomes the slot, if no
    slot is set.
    """
    names = [name for name in environ if OF_LAUNCHERS.fullmatch(name)]
    rank = environ.get("LOCAL_RANK", "")
    if rank.isdecimal() and not environ.get(SLOT):
        environ[SLOT] = rank
    for name in names:
        del environ[name]
    return names


def refuse_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` if another launcher has started several copies of this process, each of them a run."""
    size = environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1 and environ.get("RANK"):
        raise UsageError(
            f"WORLD_SIZE={size}: torchrun or another launcher has started {size} copies of this process, and each "
            f"would train the whole run alone; use `farandole run --workers {size} SCRIPT`, or unset WORLD_SIZE"
        )


def of_other_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the settings that hold for one process only, for processes of other hosts."""
    everywhere = ("FARANDOLE_METADATA",)
    return {n: value for n, value in environ.items() if not n.startswith("FARANDOLE_") or n in everywhere}


def agent_of(environ: bytes) -> str:
    """Return the agent that started the process with this environment, "" for none. `environ`: as /proc shows it."""
    mark = f"{AGENT}=".encode()
    return next((v[len(mark) :].decode(errors="replace") for v in environ.split(b"\0") if v.startswith(mark)), "")


def verbosity() -> int:
    """Return the log level of this process: 0, or how often `-v` was given."""
    return read(os.environ, "FARANDOLE_VERBOSE", _count, 0)


def _whole(least: int, most: int, text: str) -> int:
    """Parse a whole number from `least` to `most`."""
    if not least <= (number := int(text)) <= most:
        raise ValueError(f"use {least} to {most}")
    return number


_count = partial(_whole, 0, MAX_COUNT)


def slot(environ: Mapping[str, str] = os.environ) -> int:
    """Return this worker's slot on its host, which selects its GPU; 0 if none is assigned."""
    return read(environ, SLOT, _count, 0)


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"a name has at most {LONGEST_NAME} characters, all of them printable")
    return text


def read(environ: Mapping[str, str], name: str, parse: Callable[[str], T], default: T) -> T:
    """Return variable `name` as `parse` reads it, or `default` if it is not set or empty.

    Raises:
        UsageError: the variable does not parse.
    """
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: {error}; unset it to use {default!r}") from error
