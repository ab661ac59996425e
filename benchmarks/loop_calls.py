"""What weights and values over the batch cost a step: CPU time of the worker's thread, in turns.

    python benchmarks/loop_calls.py [--rounds 5] [--steps 150] [--before PATH] [--markdown]

One process and one thread, GlobalBatch(64, micro=16), so four micro-batches a step; SGD with momentum. In each round
the kinds take turns from step to step: `plain` calls `step.backward(loss)`; `weight` gives it a weight; `values` calls
`step.mean`, `step.sum` and `step.max` besides. A round's ratio is that of the medians. `calls alone` is the time of
these three calls and of the results, over a plain step: a share that the noise of the other rows hides.
`--before PATH` names another checkout of farandole: its plain step and the plain step of this one are
launched in turns, each round both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import build, dataset
from records import middle
from tables import number, show, spread

import farandole

ROOT = Path(__file__).parents[1]
BATCH, MICRO, WARMUP = 64, 16, 15
MODELS = ("convolutional", "perceptron")
KINDS = ("plain", "weight", "values")
ALONE = "calls alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="steps of each kind in a round")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kinds = options.kinds.split(",")
        print(json.dumps(measured(options.child, kinds, options.steps)))
        return
    rows: list[list[str]] = []
    for model in MODELS:
        rounds = [launched(ROOT, model, KINDS, options.steps) for _ in range(options.rounds)]
        rows += [row(f"{model}, {kind} over plain", rounds, kind, rounds, "plain") for kind in (*KINDS[1:], ALONE)]
        if options.before:
            old, new = [], []
            for turn in range(options.rounds):
                pair = [(old, options.before), (new, ROOT)]
                for found, tree in pair if turn % 2 else reversed(pair):
                    found.append(launched(tree, model, ("plain",), options.steps))
            rows.append(row(f"{model}, plain over plain of before", new, "plain", old, "plain"))
    columns = ["step", "ms", "ratio", "min..max"]
    show(f"calls of a loop, {options.rounds} rounds", columns, rows, markdown=options.markdown)


def row(name: str, rounds: list[dict[str, float]], kind: str, others: list[dict[str, float]], other: str) -> list[str]:
    ratios = [found[kind] / base[other] for found, base in zip(rounds, others, strict=True)]
    middle_ms = 1e3 * middle([found[kind] for found in rounds])
    return [name, number(middle_ms), number(middle(ratios), 4), spread(ratios, 4)]


def launched(tree: Path, model: str, kinds: tuple[str, ...], steps: int) -> dict[str, float]:
    """The median CPU seconds of a step of each kind, from a process of its own with the farandole of `tree`."""
    command = [sys.executable, __file__, "--child", model, "--kinds", ",".join(kinds), "--steps", str(steps)]
    environ = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, kinds: list[str], steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    run = farandole.join()
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(dataset(BATCH * 16), farandole.GlobalBatch(BATCH, micro=MICRO))
    alone = 0.0
    if "values" in kinds:
        from farandole.training.values import BatchValues

        end = BatchValues.end

        def timed(self: BatchValues, *arguments: Any) -> None:
            nonlocal alone
            called = time.thread_time()
            end(self, *arguments)
            alone += time.thread_time() - called

        BatchValues.end = timed  # type: ignore[method-assign]
    spent: dict[str, list[float]] = {kind: [] for kind in (*kinds, ALONE)}
    began = time.thread_time()
    for step in run.steps(loader, base_steps=(steps + WARMUP) * len(kinds)):
        kind = kinds[step.number % len(kinds)]
        alone = 0.0
        for images, labels in step:
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
            if kind == "plain":
                step.backward(loss)
            else:
                step.backward(loss, weight=len(labels))
            if kind == "values":
                accuracy = (scores.detach().argmax(1) == labels).float().mean()
                value, count = loss.detach(), len(labels)
                called = time.thread_time()
                step.mean(accuracy=accuracy)
                step.sum(samples=count)
                step.max(loss=value)
                alone += time.thread_time() - called
        optimizer.step()
        now = time.thread_time()
        spent[kind].append(now - began)
        if kind == "values":
            spent[ALONE].append(alone)
        began = now
    return {kind: middle(found[WARMUP:]) for kind, found in spent.items() if found}


if __name__ == "__main__":
    main()
