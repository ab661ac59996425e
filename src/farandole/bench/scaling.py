"""The runs and the figures of `farandole bench scaling`. Pure: options and the workers' reports in, values out.

strong scaling     a constant global batch, the one of the script
weak scaling       a constant batch of each worker: the batch of one worker, multiplied by the workers
samples/s          the samples of a step, divided by the median time of a step, over the steps and all workers
speed-up           samples/s over those of the smallest number of workers in the same series
efficiency         the speed-up divided by the ratio of the workers
start-up           from the start of the run until the last worker's script has its first step
waiting            the exposed part of the exchange (`figures.py`), as a part of the step's time
training           the start-up, and the samples of the script's whole training divided by samples/s. Evaluations,
                   checkpoints, and changes of the workers are not in it.
dollars            of the training, for all workers. A price that is not given is unknown, never 0.

The prediction of a step of n workers takes the parts of the step of one worker:

    step(n) = c(n) * ((data + compute + folding) * shards(n) / shards(1) + landing + update + rest) + exchange(n)

shards(n): the micro-batches of the worker that has most of them; c(n): how many threads share a core, at least 1;
exchange(n): the time of an exchange by itself, as if none of it were hidden behind backward. It is that of the next
smaller number of workers p, times c(n) / c(p) and the ratio of the bytes that a worker sends, (1 - 1/n) / (1 - 1/p);
for the smallest number above 1 its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import msgspec

from farandole.bench.figures import Parts, exposed_s, joint_steps, mean_parts, median_ms, quickest
from farandole.bench.terms import DDP, FARANDOLE, MODES, Block, Exchanges, Mode, Record, RunFacts, Unfit
from farandole.errors import UsageError
from farandole.plan.batch import BatchPolicy, GlobalBatch, PerWorkerBatch
from farandole.platform.bounds import MAX_WORKERS
from farandole.protocol.cost import HOUR_S

T = TypeVar("T")
Transport = Literal["shared-memory", "gloo"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

# --- the script's batch -----------------------------------------------------------------------------------------------


def batch_in(mode: Mode, batch: BatchPolicy, workers: int) -> BatchPolicy:
    """Return the batch policy of a run of `workers` workers, for the script's own policy."""
    if mode == "strong":
        return batch if isinstance(batch, GlobalBatch) else GlobalBatch(batch.samples(1), micro=batch.micro)
    return batch if isinstance(batch, PerWorkerBatch) else GlobalBatch(batch.size * workers, micro=batch.micro)


def samples_of(*, epochs: int, base_steps: int, epoch_samples: int, base: int) -> int:
    """Return the number of samples of a training of so many epochs, or of base steps if `epochs` is 0. `base`: the base
    batch; an epoch's last one may be shorter.
    """
    if epochs:
        return epochs * epoch_samples
    whole_epochs, rest = divmod(base_steps, -(-epoch_samples // base))
    return whole_epochs * epoch_samples + rest * base


# --- options ----------------------------------------------------------------------------------------------------------


def default_workers(cores: int) -> tuple[int, ...]:
    """Return 1, 2 and the further powers of two up to the number of cores."""
    return (1, 2, *(2**power for power in range(2, cores.bit_length()) if 2**power <= cores))


def workers_of(text: str) -> tuple[int, ...]:
    """Return the numbers of workers in `text`, as "1,2,4", in ascending order.

    Raises:
        UsageError: it is not a list of numbers from 1 on, or has one twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part[:9]) <= MAX_WORKERS for part in parts):
        raise UsageError(f"--workers {text}: give whole numbers from 1 to {MAX_WORKERS}, as --workers 1,2,4")
    return tuple(sorted(_distinct("--workers", text, [int(part) for part in parts])))


def choices_of(option: str, text: str, choices: Sequence[T]) -> tuple[T, ...]:
    """Return the choices in `text`, which are separated by commas, in the order of `choices`.

    Raises:
        UsageError: one does not exist, or is there twice.
    """
    parts = _distinct(option, text, [part.strip() for part in text.split(",")])
    for part in parts:
        if part not in choices:
            raise UsageError(f"{option} {text}: {part!r} is not one of {', '.join(map(str, choices))}")
    return tuple(choice for choice in choices if choice in parts)


def prices_of(texts: Iterable[str]) -> dict[str, float]:
    """Return the dollars an hour of one worker, by machine type ("" without a name), from "0.4" and "NAME=0.4".

    Raises:
        UsageError: a price is not above 0 and finite, or a name is there twice.
    """
    prices: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            dollars = float(number)
        except ValueError:
            dollars = math.nan
        if not 0 < dollars < math.inf:
            raise UsageError(
                f"--price {text}: give dollars an hour of one worker, above 0, as 0.40 or NAME=0.40; leave out an "
                f"unknown price"
            )
        if name in prices:
            raise UsageError(f"--price {text}: there are two prices for {name or 'all machines'}; give each a NAME=")
        prices[name] = dollars
    return prices


def arguments_of(texts: Iterable[str], words: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Return the combinations of values of the placeholders in `words`, from texts such as "batch=32,64".

    Raises:
        UsageError: a text is not of this form, a name is there twice, or `words` have no such placeholder.
    """
    values: dict[str, Sequence[str]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        if not name.isidentifier() or not given or name in values:
            raise UsageError(f"--argument {text}: give each name once, with its values, as --argument batch=32,64")
        if not any(f"{{{name}}}" in word for word in words):
            raise UsageError(f"--argument {text}: no argument of the script has {{{name}}}; write it there")
        values[name] = _distinct("--argument", text, given.split(","))
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values()))


def filled(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `words` with the values in place of their placeholders. Other braces stay."""
    result = [*words]
    for name, value in values.items():
        result = [word.replace(f"{{{name}}}", value) for word in result]
    return tuple(result)


def _distinct(option: str, text: str, values: list[T]) -> list[T]:
    if len({*values}) < len(values):
        raise UsageError(f"{option} {text}: a value is there twice; give each once")
    return values


# --- runs -------------------------------------------------------------------------------------------------------------


class ScalingRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run to measure. `arguments`: the values of the placeholders, as "batch=32"; "" for none."""

    mode: Mode
    workers: int
    codec: str
    transport: Transport
    arguments: str = ""

    def words(self, runs: Sequence[ScalingRun]) -> str:
        """Return the run in words. Facts that are the same in all `runs` are left out."""
        parts = [f"{self.workers} workers" if self.workers > 1 else "1 worker"]
        if self.workers > 1:
            parts.append(f"{self.mode} scaling")
        for name, label in (("codec", "codec "), ("transport", ""), ("arguments", "")):
            if len({getattr(run, name) for run in runs}) > 1 and (name != "transport" or self.workers > 1):
                parts.append(f"{label}{getattr(self, name)}")
        return ", ".join(parts)


def runs_of(
    workers: Sequence[int], modes: Sequence[Mode], codecs: Sequence[str], transports: Sequence[Transport],
    arguments: Sequence[str] = ("",),
) -> list[ScalingRun]:  # fmt: skip
    """Return the runs to measure. One worker exchanges nothing, and its batch is the same in both modes: so all modes
    and transports share its run.
    """
    runs = [
        ScalingRun(mode=mode, workers=count, codec=codec, transport=transport, arguments=words)
        for words in arguments
        for codec in codecs
        for transport in transports
        for mode in modes
        for count in workers
    ]
    return [*dict.fromkeys(_shared(run) for run in runs)]


def _shared(run: ScalingRun) -> ScalingRun:
    """Return the run that stands for this one."""
    return msgspec.structs.replace(run, mode=MODES[0], transport=TRANSPORTS[0]) if run.workers == 1 else run


def contestants_of(run: ScalingRun, codec: str, transport: Transport, *, ddp: bool) -> tuple[str, ...]:
    """Return the contestants of a run. DistributedDataParallel has neither a codec nor a transport of ours, so it is
    measured with one of each only, the first `codec` and `transport`.
    """
    first = run.codec == codec and (run.transport == transport or run.workers == 1)
    return (FARANDOLE, DDP) if ddp and first else (FARANDOLE,)


# --- figures ----------------------------------------------------------------------------------------------------------


class ScalingMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """The measured values of a contestant in one run.

    batch: samples of a step. shards: micro-batches of a step. step_ms: median. startup_s: seconds. samples: of the
    script's whole training. parts: means, see `figures.py`. Only of farandole: `exposed` is the part of the step that
    is the exposed part of the exchange, from 0 to 1; `sent_mb` the megabytes that the worker which sends most sends in
    a step; `exchange_ms` an exchange by itself, None with one worker.
    """

    batch: int
    shards: int
    step_ms: float
    startup_s: float
    samples: int
    parts: Parts
    exposed: float | None = None
    sent_mb: float | None = None
    exchange_ms: float | None = None

    @property
    def samples_per_s(self) -> float:
        return 1e3 * self.batch / self.step_ms

    @property
    def training_s(self) -> float:
        return self.startup_s + self.samples / self.samples_per_s


class ScalingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one run, by contestant. `left_out`: why DistributedDataParallel is left out, or ""."""

    run: ScalingRun
    contestants: dict[str, ScalingMeasured]
    left_out: str = ""


class ScalingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table: one contestant with one number of workers, in a series with other numbers of workers.

    `speed_up`, `efficiency`, `predicted` (an efficiency): over `over` workers, the smallest number in the series.
    `predicted` is None for that number itself, if that is not 1, and for other contestants than farandole. `dollars`
    and `samples_per_dollar`: by machine type; None: the price is unknown.
    """

    contestant: str
    run: ScalingRun
    measured: ScalingMeasured
    samples_per_s: float
    over: int
    speed_up: float
    efficiency: float
    predicted: float | None
    training_s: float
    dollars: dict[str, float | None]
    samples_per_dollar: dict[str, float | None]


def measured(
    run: ScalingRun, reports: Mapping[str, Sequence[Record]], started: float, contestants: Sequence[str]
) -> ScalingResult:
    """Return the measurement of a run that began at Unix time `started`, from the complete reports of its workers."""
    records = [*reports.values()]
    every = [record for each in records for record in each]
    left_out = next((record.reason for record in every if isinstance(record, Unfit)), "")
    facts = [record for record in every if isinstance(record, RunFacts)]
    exchanges = [record.seconds for record in every if isinstance(record, Exchanges)]
    results: dict[str, ScalingMeasured] = {}
    for name in contestants:
        if name == DDP and left_out:
            continue
        block = joint_steps(records, name, 0)
        parts, own = mean_parts(block), name == FARANDOLE
        results[name] = ScalingMeasured(
            batch=next(r.samples for r in every if isinstance(r, Block) and r.contestant == name),
            shards=facts[0].shards, step_ms=median_ms(block), startup_s=max(each.began for each in facts) - started,
            samples=facts[0].samples, parts=parts,
            exposed=statistics.fmean(map(exposed_s, block)) * 1e3 / parts.step if own and run.workers > 1 else None,
            sent_mb=max(each.sent_bytes for each in facts) / 1e6 if own else None,
            exchange_ms=quickest(exchanges) if own and exchanges else None,
        )  # fmt: skip
    return ScalingResult(run=run, contestants=results, left_out=left_out)


def rows_of(
    results: Iterable[ScalingResult], runs: Sequence[ScalingRun], modes: Sequence[Mode],
    transports: Sequence[Transport], prices: Mapping[str, float], threads: int, cores: float,
) -> list[ScalingRow]:  # fmt: skip
    """Return the rows of all results so far, series by series. `threads`: of a worker. `cores`: that all workers share,
    infinite if each has its own.
    """
    by_run = {result.run: result for result in results}
    rows: list[ScalingRow] = []
    groups = dict.fromkeys((run.arguments, run.codec) for run in runs)
    names = dict.fromkeys(name for result in by_run.values() for name in result.contestants)
    for (arguments, codec), transport, mode, name in itertools.product(groups, transports, modes, names):
        if name != FARANDOLE and (codec, transport) != (runs[0].codec, transports[0]):
            continue
        series = [
            (row, by_run[_shared(row)].contestants[name])
            for count in sorted({run.workers for run in runs})
            for row in [ScalingRun(mode=mode, workers=count, codec=codec, transport=transport, arguments=arguments)]
            if _shared(row) in by_run and name in by_run[_shared(row)].contestants
        ]
        predicted = predictions([(row.workers, each) for row, each in series], threads, cores)
        for row, each in series:
            base_run, base = series[0]
            speed_up = each.samples_per_s / base.samples_per_s
            hours = each.training_s / HOUR_S * row.workers
            named = prices or {"": None}
            rows.append(ScalingRow(
                contestant=name, run=row, measured=each, samples_per_s=each.samples_per_s, over=base_run.workers,
                speed_up=speed_up, efficiency=speed_up * base_run.workers / row.workers,
                predicted=predicted.get(row.workers) if name == FARANDOLE else None, training_s=each.training_s,
                dollars={kind: None if price is None else price * hours for kind, price in named.items()},
                samples_per_dollar={
                    kind: None if price is None else each.samples_per_s * HOUR_S / (price * row.workers)
                    for kind, price in named.items()
                },
            ))  # fmt: skip
    return rows


def predictions(series: Sequence[tuple[int, ScalingMeasured]], threads: int, cores: float) -> dict[int, float]:
    """Return the predicted efficiency for each number of workers above 1; see the module. Empty without one worker."""
    if not series or series[0][0] != 1:
        return {}
    base, result = series[0][1], dict[int, float]()
    parts, before = base.parts, None
    for workers, each in series[1:]:
        if each.exchange_ms is None:
            continue
        shared = _shared_cores(workers, threads, cores)
        exchange_ms = each.exchange_ms
        if before is not None:
            fewer, known_ms = before
            ratio = (1 - 1 / workers) / (1 - 1 / fewer) * shared / _shared_cores(fewer, threads, cores)
            exchange_ms = known_ms * ratio
        work = (parts.data + parts.compute + parts.folding) * math.ceil(each.shards / workers) / base.shards
        step_ms = shared * (work + parts.landing + parts.update + parts.rest) + exchange_ms
        result[workers] = each.batch / step_ms / (base.batch / parts.step) / workers
        before = workers, each.exchange_ms
    return result


def _shared_cores(workers: int, threads: int, cores: float) -> float:
    return max(1.0, workers * threads / cores)
