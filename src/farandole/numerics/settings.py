"""torch's settings that affect bits, as facts: a name and its value as text. A fact can also be applied.

A script may alter the settings at any time, some only for the calling thread (denormals). Reading all of them takes
16 us, so a run checks them in every step (`Alterations`). A thread of farandole that computes uses the settings of the
training thread (`flush_as`).

Not included: settings of environment variables alone (the fingerprint shows them), generators, the processes of a
loader, which have the settings at their fork, and the threads within an operator (`--threads` above 1): torch sets the
flushing of denormals only in the calling thread, so it is not defined which elements of a large tensor are flushed.
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
from farandole import settings as process_settings
from farandole.errors import NotDeterministic, UsageError
from farandole.platform import cpu
from farandole.protocol.numeric_facts import SETTING, THREADS

# --- settings ---------------------------------------------------------------------------------------------------------

_SMALLEST = 2.0**-1022  # the smallest normal float64
_DETERMINISTIC = ("off", "warn", "on")  # as torch numbers them


class Setting(NamedTuple):
    """The functions that read and write a setting."""

    read: Callable[[], object]
    write: Callable[[Any], None]  # takes the value, not its text


def setting_facts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of all settings of the calling thread."""
    for name, setting in _SETTINGS.items():
        yield name, _words(setting.read())


def setting_values() -> tuple[object, ...]:
    """Return the values of all settings, not as text: a comparison of values is faster."""
    return tuple([setting.read() for setting in _SETTINGS.values()])


def put(name: str, value: str) -> None:
    """Apply a fact in the calling thread. An unknown name is ignored."""
    if name in _SETTINGS:
        _SETTINGS[name].write(_parsed(value))


def flushes() -> bool:
    """Return True if the calling thread flushes denormal numbers to zero. Python's own multiplication shows it."""
    half = _SMALLEST * 0.5
    return half == 0.0


def flush_as(flushing: bool) -> None:
    """Set the flushing of denormals in the calling thread, to that of another thread."""
    if flushes() is not flushing:
        torch.set_flush_denormal(flushing)


def _attribute(path: str) -> Setting:
    """Return the setting for an attribute of torch.backends."""
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


def _parsed(words: str) -> Any:
    if words in ("on", "off"):
        return words == "on"
    if words.isdigit():
        return int(words)
    attribute = getattr(torch, words, None)
    return attribute if isinstance(attribute, torch.dtype) else words


# --- alterations ------------------------------------------------------------------------------------------------------
#
# Settings that a script alters while it trains: detected when the next inner loop begins, and equal on all workers.
#
# Only the settings during the computation of shards matter. So each step checks them when its inner loop begins, after
# the first part of the loop's body. Settings that were altered since the worker requested admission belong to the run's
# state, like any value that a script sets: joiners and resumed runs get them. All settings are in the digest of the
# next step. So a setting that is altered on one worker alone ends the run like any other difference of replicas, with
# the setting's name (`training/digest.py`).


class Alterations:
    """The altered settings of the training thread. The present settings are the initial ones."""

    def __init__(self) -> None:
        self._first = dict(setting_facts())
        self._known_values = dict(self._first)
        self._values = setting_values()

    @property
    def known_values(self) -> Mapping[str, str]:
        """All settings at the last check, as text by name."""
        return self._known_values

    @property
    def altered(self) -> dict[str, str]:
        """The settings that differ from the initial ones, as text by name."""
        return {name: value for name, value in self._known_values.items() if self._first[name] != value}

    def look(self) -> list[tuple[str, str, str]]:
        """Return the settings that were altered since the last check: name, old value, new value."""
        values = setting_values()
        if values == self._values:
            return []
        self._values = values
        changes = [
            (name, self._known_values[name], now) for name, now in setting_facts() if self._known_values[name] != now
        ]
        self._known_values.update((name, now) for name, _, now in changes)
        return changes

    def take(self, altered: Mapping[str, str]) -> None:
        """Apply the settings that the run has altered. All others get their initial values of this worker."""
        for name, first in self._first.items():
            value = altered.get(name, first)
            if self._known_values[name] != value:
                put(name, value)
                self._known_values[name] = value
        self._values = setting_values()


# --- cuda -------------------------------------------------------------------------------------------------------------
#
# The settings of a worker on a CUDA device, made before the script's first work there; mostly for `--bits same`.
#
# A GPU computes the same bits twice with
#
# - torch's deterministic algorithms: an operator without one is an error that names the operator (`explained`);
# - cuDNN without its benchmark, which selects kernels by time, and in deterministic mode;
# - cuBLAS's workspace of a fixed size (`platform/cpu.py`), read when its handle is created.
#
# A script that alters one of these before the run's first step is refused; later changes are reported like those of any
# setting. TF32 keeps the value of torch or the script; it is a fact like the others. With `--bits any`
# none of this is set. In any case the worker's device becomes the current one, so that "cuda" means this device.
#
# Not supported: the script's own streams. Data for other threads, of farandole or of the exchange, is ordered only on
# the default stream.

_log = logging.getLogger(__name__)
REQUIRED_SETTINGS = {"deterministic algorithms": "on", "cuDNN benchmark": "off", "cuDNN deterministic": "on"}
_NO_FORM = re.compile(r"([\w ]+?) does not have a deterministic implementation, but you set 'torch\.use_deter")
_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, farandole))
_asked_for = False  # True after `_be_deterministic` has switched on deterministic algorithms


def local_device() -> torch.device:
    """Return this worker's device: the visible GPU with the number of its slot on the host, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", process_settings.slot() % torch.cuda.device_count())


def devices() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def build() -> str:
    """Return what the installed torch was built for: "CPU", or a version of CUDA or ROCm."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def begin(device: torch.device, bits: str) -> None:
    """Prepare `device` before the script's first work there. It does nothing for a CPU.

    Raises:
        UsageError: work there has begun without the settings that `bits` needs.
    """
    if device.type != "cuda":
        return
    if bits == "same":
        _be_deterministic()
    torch.cuda.set_device(device)
    if process_settings.slot() >= (devices := torch.cuda.device_count()):
        _log.warning(
            "workers share %s: this one has slot %d of its host (FARANDOLE_SLOT), where %d devices are visible; "
            "results are bit-identical, but slower", device, process_settings.slot(), devices,
        )  # fmt: skip


def refuse_altered(device: torch.device, bits: str) -> None:
    """Check torch's settings before the script trains.

    Raises:
        UsageError: the script has altered a setting that `begin` has made.
    """
    if device.type != "cuda" or bits != "same":
        return
    facts = dict(setting_facts())
    for name, required in REQUIRED_SETTINGS.items():
        if (value := facts[SETTING + name]) != required:
            raise UsageError(
                f"{name}: the script has set it to {value} after farandole.join(), but --bits same needs {required} on "
                f"CUDA; do not change it, or start the run with --bits any"
            )


def operator(error: BaseException) -> str:
    """Return the operator that has no deterministic form, according to `error`; "" for another error."""
    match = _NO_FORM.search(str(error)) if isinstance(error, RuntimeError) else None
    return match[1].strip() if match else ""


def explained(error: BaseException) -> BaseException:
    """Return the script's exception `error`, or a NotDeterministic with a remedy if the settings here caused it."""
    if not _asked_for or not (name := operator(error)):
        return error
    return NotDeterministic(
        f"{name}{_place(error)} has no deterministic form on CUDA, and --bits same needs one: use another operator, or "
        f"start the run with --bits any"
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
    """Return the script's file and line of the call, in parentheses."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
