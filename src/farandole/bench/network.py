"""The figures of `farandole bench network`: what an exchange costs between hosts, and with which codec. Mostly pure.

The bench trains a layer whose step is nearly all exchange (`network_train.py`) without a codec, on the hosts of a run.
So the median time of a step is that of the exchange, with all links in use at once, as in training. `predict` scales
it:

    exchange(codec) = exchange(none) / times fewer bytes + time that the codec takes

The time of a codec is that of one thread of this machine: rounding one micro-batch's gradients, one sum of two, and the
way back to float32; with compression also compressing and decompressing what one host sends. It is added as if nothing
of it were hidden, and each further micro-batch of a worker costs one more rounding and sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from farandole.collective.codec import Codec

SAMPLE_NUMBERS = 1 << 21  # of the gradients on which codecs are timed
TURNS = 3  # the least time of so many counts
GAIN = 1.1  # a codec is recommended if the step is so many times faster than with a simpler one
# From the simplest to the one with most consequences. int8 and int4 add noise, so they are never recommended.
RECOMMENDED = ("none", "float32+zstd", "bf16", "bf16+zstd")


class CodecCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one codec does to 1 MB (1e6 bytes) of float32 gradients: the bytes left, and the seconds of one thread."""

    codec: str
    times_fewer_bytes: float
    seconds: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The step with one codec.

    Attributes:
        sent_mb: MB that each host sends in a step.
        exchange_ms: the time of the exchange; `step_ms`: with the computation of a step, if that is given.
        times_faster: the step without a codec, by this one.
    """

    codec: str
    sent_mb: float
    exchange_ms: float
    step_ms: float
    times_faster: float


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of the link between two hosts, while all links were in use. `rtt_ms`: the least round trip seen."""

    source: str
    target: str
    mbit_per_s: float | None
    rtt_ms: float | None


class NetworkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the bench. `mb`: MB of gradients; `exchange_ms`: the measured exchange without a codec, median."""

    hosts: tuple[str, ...]
    mb: float
    exchange_ms: float
    links: tuple[NetworkLink, ...]
    predictions: tuple[Prediction, ...]
    recommended: str


def predict(
    mb: float, hosts: int, exchange_s: float, costs: Iterable[CodecCost], compute_s: float = 0.0
) -> tuple[Prediction, ...]:
    """Return the step with each codec, "none" first.

    Args:
        mb: MB of gradients.
        hosts: how many hosts exchange them; each sends 2 * (hosts - 1) / hosts times the gradients' size.
        exchange_s: the measured time of an exchange without a codec.
        costs: the codecs' costs; `none` need not be among them.
        compute_s: the time of a step without the exchange.
    """
    sent_mb = 2 * (hosts - 1) / hosts * mb
    nothing = CodecCost(codec="none", times_fewer_bytes=1.0, seconds=0.0)
    before = compute_s + exchange_s
    result: list[Prediction] = []
    for cost in (nothing, *(each for each in costs if each.codec != "none")):
        exchange = exchange_s / cost.times_fewer_bytes + cost.seconds * mb
        step = compute_s + exchange
        result.append(
            Prediction(
                codec=cost.codec,
                sent_mb=sent_mb / cost.times_fewer_bytes,
                exchange_ms=1e3 * exchange,
                step_ms=1e3 * step,
                times_faster=before / step,
            )
        )
    return tuple(result)


def recommended(predictions: Sequence[Prediction]) -> str:
    """Return the codec to use: a simpler one unless another makes the step `GAIN` times faster."""
    faster = {each.codec: each.times_faster for each in predictions}
    best = "none"
    for codec in RECOMMENDED:
        if faster.get(codec, 0.0) >= faster[best] * GAIN:
            best = codec
    return best


# --- measurement ------------------------------------------------------------------------------------------------------


def codec_costs(codecs: Iterable[str]) -> tuple[CodecCost, ...]:
    """Return the costs of these codecs, measured in this thread, on numbers whose exponents vary like gradients'."""
    import torch

    from farandole.collective.codec import CODECS

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(SAMPLE_NUMBERS // 1024, 1, generator=generator).exp2()
    numbers = (torch.randn(SAMPLE_NUMBERS // 1024, 1024, generator=generator) * rows * 1e-3).flatten()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(_cost(CODECS[name], numbers) for name in codecs)
    finally:
        torch.set_num_threads(threads)


def _cost(codec: Codec, numbers: torch.Tensor) -> CodecCost:
    import torch
    from torch import nn

    from farandole.collective.buckets import Layout, Partials
    from farandole.collective.codec import NONE
    from farandole.collective.compression import compress, decompress

    def summed(codec: Codec) -> Callable[[], torch.Tensor]:
        """Return a function that rounds two leaves and their sum, and returns the sum as it is sent."""
        partials = Partials(Layout([nn.Parameter(torch.zeros_like(numbers))], lanes=0, codec=codec))

        def work() -> torch.Tensor:
            partials.begin(2)
            for shard, gradient in enumerate((torch.zeros_like(numbers), numbers.clone())):
                partials.open(shard, last=shard == 1)
                partials.add_gradient(0, gradient)
                partials.close(None)
            partials.wait_until_quantized()
            (total,) = partials.nodes[0].values()
            return total.flat

        return work

    rounded, plain = summed(codec), summed(NONE)
    [bucket] = Layout([nn.Parameter(torch.zeros_like(numbers))], lanes=0, codec=codec).buckets
    into = torch.empty(bucket.numbers_before(bucket.numel))

    def there_and_back() -> int:
        total = rounded()
        frame = compress(total) if codec.compresses else total
        if codec.compresses:
            decompress(frame, torch.empty_like(total))
        codec.decode(total, into)
        return frame.nbytes

    (size, seconds), (before, least) = _least(there_and_back), _least(lambda: plain().nbytes)
    return CodecCost(
        codec=codec.name, times_fewer_bytes=before / size, seconds=max(0.0, seconds - least) / (numbers.nbytes / 1e6)
    )


def _least(work: Callable[[], int]) -> tuple[int, float]:
    """Return the result and the least processor time in seconds of some calls."""
    times: list[float] = []
    result = work()
    for _ in range(TURNS):
        began = time.thread_time()
        result = work()
        times.append(time.thread_time() - began)
    return result, min(times)
