"""Steps of a world of one, for tests: data, a model, and the comparison with plain PyTorch over the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole.data.loader import Loader
from farandole.errors import UsageError

N, BATCH = 22, 16  # an epoch: a window of 16 and one of 6
MICROS = [16, 8, 4, 3, 1]
SEED = 5


def data(length: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(length, 6, generator=generator), torch.randint(0, 3, (length,), generator=generator)
    )


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def whole_batches(loader: Loader, epochs: int) -> Iterator[list[torch.Tensor]]:
    """Each step's samples at once, in the run's order."""
    for epoch in range(epochs):
        for start in range(0, loader.length, loader.batch.size):
            index = torch.from_numpy(loader.order.samples(epoch, start, min(start + loader.batch.size, loader.length)))
            yield [tensor[index] for tensor in loader.dataset.tensors]  # type: ignore[attr-defined]


def grads(*modules: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


def assert_grads(got: list[torch.Tensor | None], wanted: list[torch.Tensor | None], *, exact: bool) -> None:
    assert [g is None for g in got] == [w is None for w in wanted]
    for one, other in zip(got, wanted, strict=True):
        if one is not None and other is not None:
            if exact:
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def compare(
    run: farandole.Run,
    modules: list[nn.Module],
    losses: Callable[..., list[torch.Tensor]],
    micro: int,
    *,
    epochs: int = 2,
    exact: bool | None = None,
    between: Callable[[int, list[nn.Module]], object] = lambda *_: None,
) -> None:
    """Trains `modules` in a run and copies of them in plain PyTorch, and compares gradients in every step.

    `losses(modules, *batch)` gives the losses of one micro-batch, each for a backward pass of its own; `between` is
    what else the loop does after a step.
    """
    plain = copy.deepcopy(modules)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in modules]
    references = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in plain]
    named = {f"m{k}": m for k, m in enumerate(modules)} | {f"o{k}": o for k, o in enumerate(optimizers)}
    run.replicate(**named)
    wholes = whole_batches(loader, epochs)
    exact = micro >= BATCH if exact is None else exact
    for step in run.steps(loader, epochs=epochs):
        for batch in step:
            *first, last = losses(modules, *batch)
            for loss in first:
                step.backward(loss, last=False)
            step.backward(last)
        whole = next(wholes)
        for reference in references:
            reference.zero_grad()
        total = 0.0
        for loss in losses(plain, *whole):
            loss.backward()
            total += loss.item()
        assert_grads(grads(*modules), grads(*plain), exact=exact)
        assert step.loss == pytest.approx(total, rel=1e-4 if not exact else 1e-12)
        assert step.samples == len(whole[0])
        with torch.no_grad():  # both go on from the same weights: differences would add up otherwise
            for mine, theirs in zip(modules, plain, strict=True):
                theirs.load_state_dict(mine.state_dict())
        for optimizer, reference in zip(optimizers, references, strict=True):
            reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
            reference.step()
        if exact:
            for mine, theirs in zip(modules, plain, strict=True):
                assert all(map(torch.equal, mine.parameters(), theirs.parameters()))
        for some in (modules, plain):
            between(step.number, some)
    assert next(wholes, None) is None
    assert step.number == epochs * len(loader) - 1


def train(run: farandole.Run, model: nn.Module) -> Iterator[farandole.Step]:
    """Gives each step where the script may do anything: after its update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model, optimizer=optimizer)
    for step in run.steps(loader, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        yield step


def begun(run: farandole.Run, model: nn.Module, micro: int = 4) -> tuple[farandole.Step, Iterator[farandole.Step]]:
    """A run whose first step has ended."""
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    run.replicate(model=model)
    steps = run.steps(loader, epochs=2)
    step = next(steps)
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    return step, steps


@contextmanager
def suppress_usage_error(remedy: str) -> Iterator[None]:
    """What we do not support may be refused, if the message says what to do instead; never answered wrongly."""
    try:
        yield
    except UsageError as error:
        if remedy not in str(error):
            raise


def entropy(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [F.cross_entropy(modules[0](x), y)]


class TwoHeads(nn.Module):
    """Parameters of the trunk are in both losses, of a head in one, of `spare` in none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 8)
        self.left, self.right, self.spare = nn.Linear(8, 3), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.left(hidden), self.right(hidden)


def two_losses(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    left = F.cross_entropy(modules[0](x)[0], y)
    right = modules[0](x)[1].square().mean()
    return [left, right]


def adversaries(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    generator, critic = modules
    made = generator(y.unsqueeze(1).float())
    told = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(x)).mean()
    fooled = F.softplus(-critic(made)).mean()
    return [told, fooled]


def per_sample(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1) == y
