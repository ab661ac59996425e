"""What a worker sets that drives a CUDA device, before the script's first work there; `--bits same` needs most of it.

A GPU computes the same bits twice with

- torch's deterministic algorithms: an operator without one is an error, which is told by its name (`explained`);
- cuDNN without its benchmark, which picks kernels by the clock, and deterministic;
- cuBLAS's workspace of a fixed size (`platform/switches.py`), read when its handle is made.

Whoever alters one of these before the run's first step is refused, and later changes are told as any setting's are.
TF32 stays as torch or the script has it; it is a fact like the others (`settings.py`). With `--bits any` nothing of
this is set. The device is made the current one in any case, so that "cuda" alone is this worker's own.

Left out: streams of the script's own. What is handed to other threads, of ours or the exchange's, is ordered on the
default stream only.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from pathlib import Path

import torch

import farandole
from farandole import settings as surroundings
from farandole.errors import NotDeterministic, UsageError
from farandole.membership.likeness import SETTING
from farandole.numerics import settings
from farandole.platform import switches

_log = logging.getLogger(__name__)

NEEDED = {"deterministic algorithms": "on", "cuDNN benchmark": "off", "cuDNN deterministic": "on"}  # facts of settings
_NO_FORM = re.compile(r"([\w ]+?) does not have a deterministic implementation, but you set 'torch\.use_deter")
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, farandole))

_asked_for = False  # deterministic algorithms, by us


def local_device() -> torch.device:
    """The one that this worker drives: that of its slot on the host, of those that are visible to it."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", surroundings.slot() % torch.cuda.device_count())


def devices() -> int:
    """How many this process sees."""
    return torch.cuda.device_count()


def begin(device: torch.device, bits: str) -> None:
    """Before the script's first work on `device`; nothing for a CPU.

    Raises:
        UsageError: work there has begun, without what `bits` needs.
    """
    if device.type != "cuda":
        return
    if bits == "same":
        _be_deterministic()
    torch.cuda.set_device(device)
    if surroundings.slot() >= (devices := torch.cuda.device_count()):
        _log.warning(
            "workers share %s: this one is in slot %d of its host (FARANDOLE_SLOT), where %d can be seen; the bits are "
            "the same, the speed is not", device, surroundings.slot(), devices,
        )  # fmt: skip


def refuse_altered(device: torch.device, bits: str) -> None:
    """The script is about to train.

    Raises:
        UsageError: it has altered what `begin` has set.
    """
    if device.type != "cuda" or bits != "same":
        return
    facts = dict(settings.facts())
    for name, needed in NEEDED.items():
        if (found := facts[SETTING + name]) != needed:
            raise UsageError(
                f"{name}: the script has it {found} after farandole.join(), and --bits same needs it {needed} on CUDA; "
                f"leave it as farandole.join() sets it, or give the run --bits any"
            )


def operator(error: BaseException) -> str:
    """The operator of which `error` says that it has no deterministic form; "" if it says something else."""
    found = _NO_FORM.search(str(error)) if isinstance(error, RuntimeError) else None
    return found[1].strip() if found else ""


def explained(error: BaseException) -> BaseException:
    """What the script has raised; in words of ours where it comes of what is set here."""
    if not _asked_for or not (name := operator(error)):
        return error
    return NotDeterministic(
        f"{name}{_place(error)} has no form on CUDA that computes the same bits twice, and --bits same needs one: use "
        f"another operator in its place, or give the run --bits any"
    )


def _be_deterministic() -> None:
    global _asked_for
    [(name, value)] = switches.SAME.items()
    if torch.cuda.is_initialized() and os.environ.get(name) != value:
        raise UsageError(
            f"--bits same: work on a CUDA device has begun before farandole.join(), without {name}={value}; call "
            f"farandole.join() first, or start the process with `farandole run` or with that variable set"
        )
    os.environ[name] = value
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    _asked_for = True


def _place(error: BaseException) -> str:
    """Where the script has called it, as a remark."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
