"""What of torch's settings bears on bits, as facts: a name, and its value in words. And each can be set by them.

A script may alter them at any time, some for the calling thread alone (denormals). Reading all takes 16 us, so a run
looks in every step (`settings.py`). Where a thread of ours computes, it follows the training thread (`flush_as`).

Left out: what only environment variables say (it shows in the fingerprint), generators, the processes of a loader,
which have what was set when they were forked, and the threads within an operator (`--threads` above 1): torch lets
denormals be flushed in the calling thread alone, so which elements of a large tensor are flushed is nobody's promise.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import backends

import farandole
from farandole import settings as surroundings
from farandole.errors import NotDeterministic, UsageError
from farandole.platform import cpu
from farandole.protocol.numeric_facts import SETTING, THREADS

# --- settings ---------------------------------------------------------------------------------------------------------

_SMALLEST = 2.0**-1022  # of float64 that is not denormal
_DETERMINISTIC = ("off", "warn", "on")  # as torch numbers them


class Setting(NamedTuple):
    read: Callable[[], object]
    write: Callable[[Any], None]  # what its words stand for


def setting_facts() -> Iterator[tuple[str, str]]:
    """All of them, of the calling thread."""
    for name, setting in _SETTINGS.items():
        yield name, _words(setting.read())


def setting_values() -> tuple[object, ...]:
    """The same, not in words: so that nothing is to be told is known sooner."""
    return tuple([setting.read() for setting in _SETTINGS.values()])


def put(name: str, value: str) -> None:
    """Set what a fact says, in the calling thread. What is not known here stays as it is."""
    if name in _SETTINGS:
        _SETTINGS[name].write(_meant(value))


def flushes() -> bool:
    """Whether the calling thread takes denormal numbers for zero. Python's own multiplication shows it."""
    half = _SMALLEST * 0.5
    return half == 0.0


def flush_as(flushing: bool) -> None:
    """The calling thread is to do as another one does."""
    if flushes() is not flushing:
        torch.set_flush_denormal(flushing)


def _attribute(path: str) -> Setting:
    """Of torch.backends."""
    owner, _, name = path.rpartition(".")
    read = attrgetter(path)

    def write(value: object) -> None:
        setattr(attrgetter(owner)(backends) if owner else backends, name, value)

    return Setting(lambda: read(backends), write)


def _autocast(kind: str) -> Setting:
    def write(value: Any) -> None:
        torch.set_autocast_enabled(kind, value is not False)
        if value is not False:
            torch.set_autocast_dtype(kind, value)

    return Setting(lambda: torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind), write)


def _set_deterministic(value: object) -> None:
    torch.set_deterministic_debug_mode(_DETERMINISTIC.index(_words(value)))


_SETTINGS: dict[str, Setting] = {
    THREADS: Setting(torch.get_num_threads, torch.set_num_threads),
    **{
        SETTING + name: setting
        for name, setting in {
            "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
            "denormals flushed": Setting(flushes, flush_as),
            "deterministic algorithms": Setting(
                lambda: _DETERMINISTIC[torch.get_deterministic_debug_mode()],
                _set_deterministic,
            ),
            "precision of products": _attribute("fp32_precision"),
            "precision of products, oneDNN": _attribute("mkldnn.matmul.fp32_precision"),
            "precision of convolutions, oneDNN": _attribute("mkldnn.conv.fp32_precision"),
            "precision of recurrent layers, oneDNN": _attribute("mkldnn.rnn.fp32_precision"),
            "precision of products, CUDA": _attribute("cuda.matmul.fp32_precision"),
            "precision of convolutions, cuDNN": _attribute("cudnn.conv.fp32_precision"),
            "precision of recurrent layers, cuDNN": _attribute("cudnn.rnn.fp32_precision"),
            "sums in bfloat16, CUDA": _attribute("cuda.matmul.allow_bf16_reduced_precision_reduction"),
            "sums in float16, CUDA": _attribute("cuda.matmul.allow_fp16_reduced_precision_reduction"),
            "oneDNN": _attribute("mkldnn.enabled"),
            "oneDNN deterministic": _attribute("mkldnn.deterministic"),
            "cuDNN": _attribute("cudnn.enabled"),
            "cuDNN benchmark": _attribute("cudnn.benchmark"),
            "cuDNN deterministic": _attribute("cudnn.deterministic"),
            "attention by flash kernels": Setting(backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
            "attention by memory-efficient kernels": Setting(
                backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp
            ),
            "attention by plain kernels": Setting(backends.cuda.math_sdp_enabled, backends.cuda.enable_math_sdp),
            "autocast on CPU": _autocast("cpu"),
            "autocast on CUDA": _autocast("cuda"),
        }.items()
    },
}


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).removeprefix("torch.")


def _meant(words: str) -> Any:
    if words in ("on", "off"):
        return words == "on"
    if words.isdigit():
        return int(words)
    found = getattr(torch, words, None)
    return found if isinstance(found, torch.dtype) else words


# --- alterations ------------------------------------------------------------------------------------------------------
#
# Settings that a script alters while it trains: noticed as the next inner loop begins, and the same on all workers.
#
# What counts is what is in force where shards are computed, so each step looks as its inner loop begins, when the
# loop's body has done what it does. What was altered since the worker asked in belongs to the run's state like any
# value that a script sets: joiners and resumed runs get it. All settings are in the digest of the next step, so one
# that is altered on one worker alone ends the run as any replica does that differs, by its name
# (`training/digest.py`).


class Alterations:
    """Of the training thread. Begins with the settings as they are."""

    def __init__(self) -> None:
        self._first = dict(setting_facts())
        self._known = dict(self._first)
        self._values = setting_values()

    @property
    def known(self) -> Mapping[str, str]:
        """All settings, as they were when last looked at."""
        return self._known

    @property
    def altered(self) -> dict[str, str]:
        """Those that are others than in the beginning."""
        return {name: value for name, value in self._known.items() if self._first[name] != value}

    def look(self) -> list[tuple[str, str, str]]:
        """What was altered since the last look: names, and their values before and now."""
        values = setting_values()
        if values == self._values:
            return []
        self._values = values
        found = [(name, self._known[name], now) for name, now in setting_facts() if self._known[name] != now]
        self._known.update((name, now) for name, _, now in found)
        return found

    def take(self, altered: Mapping[str, str]) -> None:
        """Set what the run had altered by then, and nothing else: the rest is as it was when this worker asked in."""
        for name, first in self._first.items():
            value = altered.get(name, first)
            if self._known[name] != value:
                put(name, value)
                self._known[name] = value
        self._values = setting_values()


# --- cuda -------------------------------------------------------------------------------------------------------------
#
# What a worker sets that drives a CUDA device, before the script's first work there; `--bits same` needs most of it.
#
# A GPU computes the same bits twice with
#
# - torch's deterministic algorithms: an operator without one is an error, which is told by its name (`explained`);
# - cuDNN without its benchmark, which picks kernels by the clock, and deterministic;
# - cuBLAS's workspace of a fixed size (`platform/cpu.py`), read when its handle is made.
#
# Whoever alters one of these before the run's first step is refused, and later changes are told as any setting's are.
# TF32 stays as torch or the script has it; it is a fact like the others (`settings.py`). With `--bits any` nothing of
# this is set. The device is made the current one in any case, so that "cuda" alone is this worker's own.
#
# Left out: streams of the script's own. What is handed to other threads, of ours or the exchange's, is ordered on the
# default stream only.

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
    facts = dict(setting_facts())
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
    [(name, value)] = cpu.SAME.items()
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
