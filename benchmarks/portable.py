"""What `--bits portable` costs: steps of the examples' nets and of others, beside the same as torch comes, in turns.

    python benchmarks/portable.py [--rounds 9] [NET ...]

Two processes, each with one thread, take turns of a few steps; the ratio is the median over the turns' ratios, so that
what else the machine does counts for both; times are of the CPU. A step is forward, backward and update of one
micro-batch, without farandole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
TURN_S = 0.4
Step = Callable[[], None]


def nets() -> dict[str, Callable[[], Step]]:
    """By name; built when called. Those of the examples have their optimizers and micro-batches."""
    import cifar10
    import detect
    import digits
    import fashion_mnist
    import finetune
    import segment
    import shakespeare
    import torch
    import torch.nn.functional as F
    from torch import nn

    sys.path.insert(0, str(Path(__file__).parent))
    import models

    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # noqa: E731
    adamw = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731

    def step(model: nn.Module, given: Any, optimizer_of: Any, loss: Callable[[Any], Any]) -> Step:
        optimizer = optimizer_of(model)

        def once() -> None:
            optimizer.zero_grad()
            loss(model(given)).backward()
            optimizer.step()

        return once

    def classes(model: nn.Module, shape: tuple[int, ...], count: int, optimizer_of: Any) -> Step:
        labels = torch.randint(0, count, shape[:1])
        return step(model, torch.randn(shape), optimizer_of, lambda out: F.cross_entropy(out, labels))

    def frozen(model: Any) -> Any:
        model.set_mode(frozen=False)
        return model

    def letters() -> Step:
        text = torch.randint(0, 65, (16, 65))
        model = shakespeare.Transformer(65, 64, 4, 128, 4, 0.05)
        return step(model, text[:, :-1], adamw, lambda out: shakespeare.cross_entropy(out, text[:, 1:]).mean())

    def cells() -> Step:
        model, grids = detect.Detector(), torch.rand(4, len(detect.CLASSES) + 5, 32, 40) + 0.01
        pictures = torch.randn(4, 3, 256, 320).to(memory_format=torch.channels_last)
        return step(model, pictures, adamw, lambda out: detect.losses(out, grids).mean())

    def stamps() -> Step:
        masks = (torch.rand(8, 1, 64, 64) > 0.5).float()
        return step(segment.UNet(16), torch.randn(8, 3, 64, 64), adamw, lambda out: segment.mask_loss(out, masks))

    def encoder() -> Step:
        layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, "gelu", batch_first=True)
        return step(nn.TransformerEncoder(layer, 2), torch.randn(16, 128, 256), adamw, lambda out: out.square().mean())

    def recurrent(kind: Any) -> Step:
        return step(kind(128, 256, 2), torch.randn(32, 16, 128), adamw, lambda out: out[0].square().mean())

    return {
        "digits.py": lambda: classes(digits.net(32), (16, 1, 8, 8), 10, sgd),
        "fashion_mnist.py": lambda: classes(fashion_mnist.net(), (64, 1, 28, 28), 10, adamw),
        "cifar10.py": lambda: classes(cifar10.resnet(20), (32, 3, 32, 32), 10, sgd),
        "shakespeare.py": letters,
        "finetune.py": lambda: classes(frozen(finetune.FineTuned(20)), (16, 3, 128, 128), 20, adamw),
        "detect.py": cells,
        "segment.py": stamps,
        "perceptron of 7.9 M, SGD": lambda: classes(models.build("perceptron"), (64, 1, 28, 28), 10, sgd),
        "perceptron of 7.9 M, AdamW": lambda: classes(models.build("perceptron"), (64, 1, 28, 28), 10, adamw),
        "convolutional net of 1.7 M": lambda: classes(models.build("convolutional"), (64, 1, 28, 28), 10, sgd),
        "transformer, 2 layers of 256": encoder,
        "LSTM, 2 layers of 256": lambda: recurrent(nn.LSTM),
        "GRU, 2 layers of 256": lambda: recurrent(nn.GRU),
    }


def contestant(bits: str) -> None:
    """One of the two: a line of its input is the net whose turn it is; it answers in milliseconds a step."""
    from farandole.platform import cpu

    cpu.set_for(bits)
    import torch

    from farandole.numerics import portable
    from farandole.training import run_state

    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    run_state.keep_freed_memory()
    if bits == "portable":
        portable.take_over(1, torch.device("cpu"))
    known, built = nets(), dict[str, Step]()
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name not in built:
            torch.manual_seed(0)
            built = {name: known[name]()}
            built[name]()
        took, began = list[float](), time.perf_counter()
        while len(took) < 3 or time.perf_counter() - began < TURN_S:
            start = time.process_time()
            built[name]()
            took.append(1e3 * (time.process_time() - start))
        print(statistics.median(took), flush=True)


class Contestant:
    def __init__(self, bits: str) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--as", bits], text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)  # fmt: skip
        self.nets: list[str] = json.loads(self._read())

    def turn(self, net: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(net + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def measured(chosen: list[str], rounds: int) -> Iterator[tuple[str, float, float, float]]:
    """Each net's name, milliseconds as torch comes, portable, and the ratio."""
    plain, portable = Contestant("same"), Contestant("portable")
    for net in chosen or plain.nets:
        turns = [(plain.turn(net), portable.turn(net)) for _ in range(rounds)]
        ours, theirs = (statistics.median(turn[n] for turn in turns) for n in (1, 0))
        yield net, theirs, ours, statistics.median(ours / theirs for theirs, ours in turns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("nets", nargs="*")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--as", dest="bits", choices=("same", "portable"))
    args = parser.parse_args()
    if args.bits:
        contestant(args.bits)
        return
    print("| a step, ms | as torch comes | portable | ratio |\n| --- | --- | --- | --- |")
    for net, theirs, ours, ratio in measured(args.nets, args.rounds):
        print(f"| {net} | {theirs:.1f} | {ours:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
