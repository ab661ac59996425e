"""What the codecs add to a step of one process, with one thread for torch: beside the backward pass, and after it.

    python benchmarks/beside_backward.py                       # none, bf16, int8, int4; a minute
    python benchmarks/beside_backward.py --codec none int4 --rounds 5
    python benchmarks/beside_backward.py --device cuda --width 1024

A step has four micro-batches of a small transformer. Each round measures every codec once, in turns, and compares it
with the first codec of the same round. Another core must be idle to show what quantization beside the backward pass
saves.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tables import number, show, spread
from torch import nn

from farandole.collective.codec import CODECS
from farandole.training.gradients import Gradients, ShardTotals
from farandole.training.replica import Replica

SHARDS = 4
STEPS = 5  # after one that is not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", nargs="+", default=["none", "bf16", "int8", "int4"], choices=list(CODECS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=256, help="features of the transformer's layers")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).to(options.device)
    batch = torch.randn(8, 64, options.width, device=options.device)
    rounds = [[step_s(model, batch, codec) for codec in options.codec] for _ in range(options.rounds)]
    rows = []
    for index, codec in enumerate(options.codec):
        times, ratios = [each[index] for each in rounds], [each[index] / each[0] for each in rounds]
        median_ms = number(1e3 * statistics.median(times))
        rows.append([codec, median_ms, number(statistics.median(ratios), 2), spread(ratios, 2)])
    title = f"{sum(map(torch.numel, model.parameters())):,} parameters, {SHARDS} micro-batches, {options.rounds} rounds"
    columns = ["codec", "ms a step", f"times {options.codec[0]}", "min..max"]
    show(title, columns, rows, markdown=options.markdown)


def step_s(model: nn.Module, batch: torch.Tensor, codec: str) -> float:
    """The median time of a step, in seconds: until its sums are there."""
    gradients, times = Gradients(Replica({"model": model}), codec=CODECS[codec]), list[float]()
    for step in range(1 + STEPS):
        began = time.perf_counter()
        gradients.partials.begin(SHARDS, step)
        for shard in range(SHARDS):
            gradients.partials.open(shard, last=shard == SHARDS - 1)
            loss = model(batch).pow(2).mean()
            gradients.backward(loss, 1.0, last=True)
            gradients.fill(ShardTotals(loss=float(loss.detach()), weight=1.0, samples=1, scale=1.0))
            gradients.close(lambda *_: None)
        gradients.partials.wait_until_quantized()
        if batch.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    gradients.unhook()
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
