"""The options of a run that its processes share. Each is declared here once: names, help, default, limits.

The key of a declaration is the name of the value everywhere: of the parameter of `farandole run`, and of the field of
`RunTerms`, `Checkpoints` or `Prices`. `cli/options.py` makes the command line's option of it, and `settings.py` reads
its environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farandole.errors import UsageError
from farandole.platform.bounds import MAX_COUNT, MAX_SECONDS, MAX_SEED, MAX_THREADS, MAX_WORKERS, real, whole

WORKERS, DATA, MACHINES = "Workers", "Data and checkpoints", "Machines"  # groups of `farandole run --help`
BITS, WATCHING, LIMITS = "Bits", "Watching", "Limits"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        flag: its name on the command line.
        help: one sentence or more, for `--help`.
        default: its value if it is not given.
        group: the group of `--help` that it belongs to.
        metavar: the placeholder of its value in `--help`; "" for its choices, or the type's name.
        shown_default: the default in `--help`; "" for `default` itself.
        choices: its possible values; () if it is a number, free text or a switch.
        unit: of a real number, for messages; "" for other values.
        least, most: the limits of a number.
        variable: its environment variable, for a process without a coordinator; "" if it has none.
        is_kept: a run that is resumed keeps the value that it had, unless the option is given.
        hidden: `--help` does not show it.
    """

    flag: str
    help: str
    default: Any
    group: str
    metavar: str = ""
    shown_default: str = ""
    choices: tuple[str, ...] = ()
    unit: str = ""
    least: int = 0
    most: int = MAX_COUNT
    variable: str = ""
    is_kept: bool = False
    hidden: bool = False

    def check(self, value: Any, name: str = "") -> None:
        """Raise `UsageError` if `value` is a number beyond the limits, or not one of the choices. None is no value.

        `name`: what the user has set, if not the option of the command line.
        """
        name = name or self.flag
        if value is None:
            return
        if self.choices:
            if value not in self.choices:
                raise UsageError(f"{name} {value}: use {', '.join(self.choices[:-1])} or {self.choices[-1]}")
        elif self.unit:
            real(f"{name} {{}}", value, self.least, self.most, self.unit)
        elif not isinstance(self.default, bool | str):
            whole(f"{name} {{}}", value, self.least, self.most)


RUN_OPTIONS: dict[str, Option] = {
    "wanted": Option(
        flag="--workers",
        help="How many workers to run; `farandole scale` changes it.",
        default=None,
        shown_default="2; with --pool: all that the pools have",
        most=MAX_WORKERS,
        group=WORKERS,
    ),
    "minimum": Option(
        flag="--min",
        help="Train only with at least this many workers.",
        default=1,
        most=MAX_WORKERS,
        group=WORKERS,
    ),
    "maximum": Option(
        flag="--max",
        help="Admit at most this many workers.",
        default=None,
        shown_default="no limit",
        most=MAX_WORKERS,
        group=WORKERS,
    ),
    "threads": Option(
        flag="--threads",
        help="Intra-op threads of each worker. Results depend on it.",
        default=1,
        least=1,
        most=MAX_THREADS,
        variable="FARANDOLE_THREADS",
        is_kept=True,
        group=WORKERS,
    ),
    "by_speed": Option(
        flag="--by-speed/--equal",
        help="Assign micro-batches by the measured speed of each worker, or equally.",
        default=True,
        group=WORKERS,
    ),
    "pin": Option(
        flag="--pin",
        help="Give each worker cores of its own. For idle machines.",
        default=False,
        group=WORKERS,
    ),
    "every": Option(
        flag="--checkpoint-every",
        metavar="PERIOD",
        help="Time between checkpoints: 10m, 30s, 2h, 500steps or never.",
        default="10m",
        variable="FARANDOLE_CHECKPOINT_EVERY",
        is_kept=True,
        group=DATA,
    ),
    "keep": Option(
        flag="--keep",
        help="How many checkpoints to keep.",
        default=3,
        is_kept=True,
        group=DATA,
    ),
    "ledger": Option(
        flag="--ledger",
        help="Record every sample that was used, to verify the counts.",
        default=False,
        variable="FARANDOLE_LEDGER",
        group=DATA,
    ),
    "seed": Option(
        flag="--seed",
        help="Random seed for initialisation, data order and dropout.",
        default=0,
        least=-MAX_SEED,
        most=MAX_SEED,
        variable="FARANDOLE_SEED",
        is_kept=True,
        group=BITS,
    ),
    "bits": Option(
        flag="--bits",
        choices=("same", "portable", "any"),
        help="same: refuse a machine that computes other bits. portable: x86 CPUs with AVX2 of any maker compute the "
        "same bits. any: admit every machine; an event marks the step after which results are not reproducible.",
        default="same",
        variable="FARANDOLE_BITS",
        is_kept=True,
        group=BITS,
    ),
    "codec": Option(
        flag="--codec",
        choices=(
            "none",
            "bf16",
            "fp16",
            "int8",
            "int4",
            "float32+zstd",
            "bf16+zstd",
            "fp16+zstd",
            "auto",
            "bf16+auto",
            "fp16+auto",
        ),
        help="bf16, fp16: round each micro-batch's gradients and all sums of them to 16 bits, which halves the bytes "
        "that workers exchange. int8, int4: round them to blocks of integers of 8 or 4 bits with a common scale. "
        "The bits of the result do not depend on which workers come and go, as without it. "
        "+zstd: compress what goes between hosts, at the same bits. auto, +auto: compress where that saves time.",
        default="none",
        variable="FARANDOLE_CODEC",
        is_kept=True,
        group=BITS,
    ),
    "audit": Option(
        flag="--audit",
        metavar="PART",
        help="Part of all micro-batches to compute twice, to find a machine that computes wrong: 0.1%.",
        default=0.0,
        unit="a part of all micro-batches, as 0.001 or 0.1%",
        most=1,
        group=BITS,
    ),
    "stop_undecided": Option(
        flag="--stop-undecided",
        help="Stop if two workers disagree in an audit and no third can decide.",
        default=False,
        group=BITS,
    ),
    "traffic_price": Option(
        flag="--traffic-price",
        metavar="DOLLARS",
        unit="dollars per GB",
        most=1000,
        help="Dollars for each GB that a worker sends to another zone, or to another host if no host reports its zone, "
        "for `farandole account`.",
        default=None,
        shown_default="unknown",
        group=WATCHING,
    ),
    "stop_on_nan": Option(
        flag="--stop-on-nan",
        help="Stop before the update of a step whose loss is not finite.",
        default=False,
        group=LIMITS,
    ),
    "stall_s": Option(
        flag="--stall",
        metavar="SECONDS",
        unit="seconds",
        most=round(MAX_SECONDS),
        help="Replace a worker that its peers wait for, after this long and at least ten median steps; after ten times "
        "as long in the worker's first step.",
        default=30.0,
        group=LIMITS,
    ),
    "orphan_s": Option(
        flag="--orphan-limit",
        metavar="SECONDS",
        unit="seconds",
        most=round(MAX_SECONDS),
        help="How long workers continue without a coordinator before they save and exit.",
        default=600.0,
        group=LIMITS,
    ),
    "standstill_s": Option(
        flag="--standstill",
        metavar="SECONDS",
        unit="seconds",
        most=round(MAX_SECONDS),
        help="How long the training may make no progress before an event reports it.",
        default=60.0,
        group=LIMITS,
        hidden=True,
    ),
    "stop_s": Option(
        flag="--stop-limit",
        metavar="SECONDS",
        unit="seconds",
        most=round(MAX_SECONDS),
        help="How long a requested stop waits for its step.",
        default=30.0,
        group=LIMITS,
        hidden=True,
    ),
}


def default(name: str) -> Any:
    """Return the default of the option that is declared under `name`."""
    return RUN_OPTIONS[name].default
