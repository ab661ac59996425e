"""What codecs with error feedback do to a training's accuracy: top-k and PowerSGD, on the transformer of examples/.

    python benchmarks/error_feedback.py tinyshakespeare.txt none top-k:0.1 top-k:0.01 powersgd:4 powersgd:16

One process trains with plain PyTorch, once with each method. A method changes the gradient of each step before the
optimizer gets it, as if one worker sent it: what is not sent is added to the next step's gradient. top-k:PART sends
this part of each parameter's elements, those of largest magnitude. powersgd:RANK sends each matrix by two factors of
this rank (Vogels, Karimireddy, Jaggi: PowerSGD, 2019, algorithm 1), and all else as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tables import number, show
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from schedules import warmup_cosine
from shakespeare import Transformer, Windows, accuracy, cross_entropy, groups

CONTEXT = 64
Method = Callable[[str, torch.Tensor], torch.Tensor]  # a parameter's name and what is to be sent; returns what is sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a text, such as tinyshakespeare.txt")
    parser.add_argument("methods", nargs="+", help="none, top-k:PART, powersgd:RANK")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[list[str]]()
    for name in options.methods:
        found = train(options, method_of(name))
        print(f"{name}: {found:.4f}", file=sys.stderr, flush=True)
        rows.append([name, number(100 * found, 2)])
    show(f"{options.epochs} epochs, batch {options.batch}", ["method", "validation accuracy, %"], rows, markdown=False)


def method_of(text: str) -> Method:
    name, _, value = text.partition(":")
    if name == "top-k" and 0 < float(value) <= 1:
        return lambda _, whole: top_k(whole, float(value))
    if name == "powersgd" and int(value) >= 1:
        return PowerSgd(int(value))
    if text == "none":
        return lambda _, whole: whole
    raise SystemExit(f"{text}: none of none, top-k:PART with a part above 0 and up to 1, powersgd:RANK")


def top_k(whole: torch.Tensor, part: float) -> torch.Tensor:
    count = max(1, round(part * whole.numel()))
    least = whole.abs().flatten().topk(count).values[-1]
    return torch.where(whole.abs() >= least, whole, 0.0)


class PowerSgd:
    """The factors of the last step are where the power iteration of the next one begins."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._right: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if whole.ndim < 2 or min(whole.shape) <= self._rank:
            return whole
        matrix = whole.flatten(1)
        if name not in self._right:
            generator = torch.Generator().manual_seed(7)
            self._right[name] = torch.randn(matrix.shape[1], self._rank, generator=generator)
        left = torch.linalg.qr(matrix @ self._right[name])[0]
        self._right[name] = matrix.T @ left
        return (left @ self._right[name].T).view_as(whole)


def train(options: argparse.Namespace, method: Method) -> float:
    """The accuracy on the last tenth of the text."""
    torch.manual_seed(options.seed)
    text = options.path.read_text()
    places = {letter: place for place, letter in enumerate(sorted(set(text)))}
    letters = torch.tensor([places[letter] for letter in text])
    split = len(letters) * 9 // 10
    train_set = Windows(letters[:split], CONTEXT, vary=True)
    validation_set = Windows(letters[split:], CONTEXT, vary=False)
    model = Transformer(len(places), CONTEXT, layers=4, width=128, heads=4, dropout=0.05)
    optimizer = torch.optim.AdamW(groups(model, decay=0.1), lr=3e-3, betas=(0.9, 0.99))
    loader = torch.utils.data.DataLoader(train_set, options.batch, shuffle=True, drop_last=True)
    steps = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, warmup=steps // 20, floor=0.05))
    left_over: dict[str, torch.Tensor] = {}
    for _ in range(options.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).mean().backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                whole = parameter.grad + left_over.get(name, 0.0)
                sent = method(name, whole)
                left_over[name] = whole - sent
                parameter.grad.copy_(sent)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        found = [accuracy(model(x), y) for x, y in torch.utils.data.DataLoader(validation_set, 256)]
    return torch.cat(found).mean().item()


if __name__ == "__main__":
    main()
