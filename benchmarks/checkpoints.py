"""What a checkpoint costs training: python benchmarks/checkpoints.py [--rounds N] [--period STEPS]

A world of one trains a perceptron with AdamW: about 100 MB of parameters and optimizer state. In one process, blocks
of steps with and without checkpoints take turns, so that both meet the same neighbours on a shared machine. Told are
the time that the training thread is blocked for a checkpoint, against a bare copy of the same tensors into memory that
has been touched before, and the time of a step: of those that begin with the copy, of those while a checkpoint is
being written behind them, and of the others.
"""

from __future__ import annotations

import argparse
import atexit
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH, LAYERS, MICRO, BATCH = 1024, 8, 64, 64


def bare_copy(state: object, rounds: int) -> list[float]:
    """Milliseconds to copy the state's tensors, the memory to copy to being there and touched."""
    from farandole.collective.state_transfer import encode

    tensors = encode(state)[1]
    held = [torch.zeros_like(tensor) for tensor in tensors]
    taken: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        for mine, tensor in zip(held, tensors, strict=True):
            mine.copy_(tensor)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def row(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    low, high = (ordered[0], ordered[-1]) if ordered else (0.0, 0.0)
    return f"| {name} | {len(values)} | {median(values) if values else 0:.1f} | {low:.1f} | {high:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6, help="blocks of steps with checkpoints, and as many without")
    parser.add_argument("--period", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, help="where to write them; default: a temporary folder")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FARANDOLE_FOLDER"] = str(args.folder or temporary)
        os.environ["FARANDOLE_CHECKPOINT_EVERY"] = "never"
        measure(args.rounds, args.period)


def measure(rounds: int, period: int) -> None:
    import farandole
    from farandole.checkpoint.schedule import Every
    from farandole.protocol.messages import Checkpointed, Message

    run = farandole.join()
    model = nn.Sequential(*[part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.replicate(model=model, optimizer=optimizer)
    block = 3 * period
    warmup, steps = 10, 10 + 2 * rounds * block
    loader = run.loader(TensorDataset(torch.randn(steps * BATCH, WIDTH)), farandole.GlobalBatch(BATCH, micro=MICRO))

    told: list[Checkpointed] = []
    tell = run._context.tell

    def listen(message: Message) -> None:
        if isinstance(message, Checkpointed):
            told.append(message)
        tell(message)

    run._context.tell = listen  # before the loop begins, which hands it on
    atexit.unregister(run._context._end)  # the folder may be gone by then
    times: dict[str, list[float]] = defaultdict(list)
    copies: list[float] = []
    ended = time.perf_counter()
    for step in run.steps(loader, epochs=1):
        for (rows,) in step:
            step.backward(model(rows).square().mean())
        optimizer.step()
        now = time.perf_counter()
        saver = run._require_state()._saver
        assert saver is not None
        number = step.number - warmup
        with_checkpoints = number >= 0 and number // block % 2 == 1
        if number >= 0:
            kind = "without"
            if with_checkpoints:
                kind = "that begins with the copy" if saver._last_step == step.number else "while one is written"
                kind = kind if saver._writing or kind.startswith("that") else "between two"
            times[kind].append((now - ended) * 1e3)
        if number >= 0 and number % block == 0:
            copies += bare_copy(run._require_state().snapshot(), 5)
        saver._every = Every(steps=period) if (number + 1) // block % 2 == 1 and number >= -1 else Every()
        ended = time.perf_counter()

    assert saver._thread is not None
    saver._thread.join()
    errors = [message.error for message in told if message.error]
    written = [message for message in told if not message.error]
    megabytes = written[0].bytes / 1e6
    print(f"\nState of {megabytes:.0f} MB, a checkpoint every {period} steps, one thread, {os.cpu_count()} cores:\n")
    print("| | n | median ms | min | max |\n| --- | ---: | ---: | ---: | ---: |")
    print(row("a bare copy of the state", copies))
    print(row("training blocked by a checkpoint", [message.copy_ms for message in written]))
    print(row("writing it, in the background", [message.seconds * 1e3 for message in written]))
    for kind in ("without", "that begins with the copy", "while one is written", "between two"):
        print(row({"without": "a step without checkpoints"}.get(kind, f"a step {kind}"), times[kind]))
    every = [value for kind, values in times.items() if kind != "without" for value in values]
    mean = (sum(every) / len(every)) / (sum(times["without"]) / len(times["without"]))
    print(f"\nMean step with checkpoints over mean step without: {mean:.3f}")
    if errors:
        print(f"{len(errors)} were left out or failed: {errors[0]}")


if __name__ == "__main__":
    main()
