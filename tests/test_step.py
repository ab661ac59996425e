"""A step through the public API, in a world of one: ordinary PyTorch in, the gradient of the mean loss out.

The reference is plain PyTorch over the whole batch at once. With one shard a step there is nothing to add up, so the
bits must be the same; with several, the values.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import farandole
from farandole import run as runs
from farandole.data.loader import Loader
from farandole.errors import FarandoleError, LossNotScalar, NotReplicated, StepAbandoned, UnknownState, UsageError

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


# --- the gradient ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", MICROS)
def test_the_gradient_is_that_of_the_mean_loss_over_the_batch(run: farandole.Run, micro: int) -> None:
    compare(run, [mlp()], entropy, micro)


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


@pytest.mark.parametrize("micro", MICROS)
def test_several_backward_passes_add_up(run: farandole.Run, micro: int) -> None:
    compare(run, [TwoHeads()], two_losses, micro)


def test_passes_may_come_in_any_order_and_number(run: farandole.Run) -> None:
    compare(run, [TwoHeads()], lambda m, x, y: [*two_losses(m, x, y)[::-1], *two_losses(m, x, y)], 16)


def adversaries(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    generator, critic = modules
    made = generator(y.unsqueeze(1).float())
    told = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(x)).mean()
    fooled = F.softplus(-critic(made)).mean()
    return [told, fooled]


@pytest.mark.parametrize("micro", [16, 4])
def test_several_modules_and_optimizers(run: farandole.Run, micro: int) -> None:
    torch.manual_seed(4)
    compare(run, [nn.Linear(1, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))], adversaries, micro)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x).tanh())


@pytest.mark.parametrize("micro", [16, 4])
def test_tied_weights(run: farandole.Run, micro: int) -> None:
    compare(run, [Tied()], lambda m, x, _: [F.mse_loss(m[0](x), x)], micro)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(run: farandole.Run, reentrant: bool) -> None:
    """A layer that is used in two checkpointed parts gets its gradient in two goes: right, or refused by name."""
    model = Tied()

    def losses(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        del y
        x = x.clone().requires_grad_()
        for part in (modules[0].encode, modules[0].decode, modules[0].encode):
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant).tanh()
        return [x.square().mean()]

    if reentrant:
        with suppress_usage_error("use_reentrant=False"):
            compare(run, [model], losses, 4)
    else:
        compare(run, [model], losses, 4)


@pytest.mark.parametrize("micro", [16, 4])
def test_autocast_to_bfloat16(run: farandole.Run, micro: int) -> None:
    def losses(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [F.cross_entropy(modules[0](x).float(), y)]

    if micro == 16:
        compare(run, [mlp()], losses, micro)
    else:  # another cut rounds otherwise: bfloat16 has three digits
        loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
        model = mlp()
        run.replicate(model=model)
        step = next(run.steps(loader, epochs=1))
        for x, y in step:
            step.backward(losses([model], x, y)[0])
        plain = mlp()
        F.cross_entropy(plain(next(whole_batches(loader, 1))[0]), next(whole_batches(loader, 1))[1]).backward()
        for one, other in zip(grads(model), grads(plain), strict=True):
            assert one is not None
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.02)


def test_bfloat16_parameters(run: farandole.Run) -> None:
    compare(run, [mlp().bfloat16()], lambda m, x, y: [F.cross_entropy(m[0](x.bfloat16()), y)], 16)


def test_channels_last_parameters(run: farandole.Run) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3))
    model = model.to(memory_format=torch.channels_last)
    compare(run, [model], entropy, 4)


def test_gradient_scaling(run: farandole.Run) -> None:
    """The scaler's own loop: scale, unscale, clip, step, update."""
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH))
    model, plain = mlp(), mlp()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    run.replicate(model=model, optimizer=optimizers[0], scaler=scalers[0])

    def finish(at: int, module: nn.Module) -> None:
        scalers[at].unscale_(optimizers[at])
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scalers[at].step(optimizers[at])
        scalers[at].update()

    for step, (xs, ys) in zip(run.steps(loader, epochs=3), whole_batches(loader, 3), strict=True):
        for x, y in step:
            step.backward(scalers[0].scale(F.cross_entropy(model(x), y)))
        finish(0, model)
        optimizers[1].zero_grad()
        scalers[1].scale(F.cross_entropy(plain(xs), ys)).backward()
        finish(1, plain)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert scalers[0].get_scale() == scalers[1].get_scale() > 8.0


@pytest.mark.parametrize("micro", [16, 4])
def test_clipping_sees_the_whole_gradient(run: farandole.Run, micro: int) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    model, plain = mlp(), mlp()
    run.replicate(model=model)
    step, (xs, ys) = next(run.steps(loader, epochs=1)), next(whole_batches(loader, 1))
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    F.cross_entropy(plain(xs), ys).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, plain)]
    torch.testing.assert_close(*norms)
    assert norms[0] > 0.1
    assert_grads(grads(model), grads(plain), exact=micro == 16)


# --- which parameters take part --------------------------------------------------------------------------------


def test_unused_parameters_keep_no_gradient_and_are_not_updated(run: farandole.Run) -> None:
    """As in plain PyTorch: None, so that neither weight decay nor momentum touches them."""
    model = TwoHeads()
    before = model.spare.weight.detach().clone()
    compare(run, [model], two_losses, 4)
    assert model.spare.weight.grad is None
    assert torch.equal(model.spare.weight, before)


def test_a_parameter_that_some_shards_use_has_their_gradient(run: farandole.Run) -> None:
    """Which branch a sample takes depends on its label; some steps use a branch not at all."""
    torch.manual_seed(8)
    model = nn.ModuleList([nn.Linear(6, 1) for _ in range(3)])

    def losses(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        branches = modules[0]
        total = torch.zeros(())
        for label in y.unique().tolist():
            total = total + branches[label](x[y == label]).square().sum()  # type: ignore[index]
        return [total / len(x)]

    compare(run, [model], losses, 1, epochs=3)


def test_frozen_parameters_and_those_unfrozen_and_frozen_between_steps(run: farandole.Run) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()

    def between(number: int, modules: list[nn.Module]) -> None:
        layer = modules[0][0]  # type: ignore[index]
        if number == 1:
            assert torch.equal(layer.weight, before)
            layer.requires_grad_(True)
        elif number == 3:
            modules[0][2].requires_grad_(False)  # type: ignore[index]

    compare(run, [model], entropy, 4, epochs=3, between=between)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("at_the_end", [True, False], ids=["unfrozen at the end", "left frozen"])
def test_switching_requires_grad_within_a_step_gives_the_gradient_or_an_error(
    run: farandole.Run, at_the_end: bool
) -> None:
    """GAN loops do it around their passes. Never a gradient that is one worker's own, or one shard's."""
    torch.manual_seed(4)
    modules = [nn.Linear(1, 6), nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))]
    plain = copy.deepcopy(modules)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))

    def passes(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor, backward: Callable[..., None]) -> None:
        modules[1].requires_grad_(True)
        backward(adversaries(modules, x, y)[0], last=False)
        modules[1].requires_grad_(False)
        backward(adversaries(modules, x, y)[1], last=True)
        modules[1].requires_grad_(at_the_end)

    def alone(loss: torch.Tensor, *, last: bool) -> None:
        del last
        loss.backward()

    run.replicate(generator=modules[0], critic=modules[1])
    with nullcontext() if at_the_end else suppress_usage_error("requires_grad"):
        for step, (xs, ys) in zip(run.steps(loader, epochs=2), whole_batches(loader, 2), strict=True):
            for x, y in step:
                passes(modules, x, y, step.backward)
            for module in plain:
                module.zero_grad()
            passes(plain, xs, ys, alone)
            assert_grads(grads(*modules), grads(*plain), exact=False)


# --- torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_modules(run: farandole.Run, backend: str) -> None:
    if backend == "inductor" and not (shutil.which("gcc") or shutil.which("g++")):
        pytest.skip("inductor needs a compiler")
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model, plain = mlp(), mlp()
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model=compiled, optimizer=optimizer)
    try:
        for step, (xs, ys) in zip(run.steps(loader, epochs=2), whole_batches(loader, 2), strict=True):
            for x, y in step:
                step.backward(F.cross_entropy(compiled(x), y))
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
            F.cross_entropy(plain(xs), ys).backward()
            assert_grads(grads(model), grads(plain), exact=False)
            optimizer.step()
    finally:
        torch._dynamo.reset()


# --- loss and buffers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [16, 4, 3])
def test_the_loss_is_the_exact_mean_of_the_micro_batches_weighted_by_their_samples(
    run: farandole.Run, micro: int
) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    model = mlp()
    run.replicate(model=model)
    shapes: list[list[int]] = []
    for step in run.steps(loader, epochs=1):
        told: list[tuple[float, int]] = []
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            told.append((loss.item(), len(x)))
            step.backward(loss)
        mean = sum(loss * n for loss, n in told) / sum(n for _, n in told)
        assert step.loss == pytest.approx(mean, rel=1e-14)
        shapes.append([n for _, n in told])
    assert (
        shapes
        == {
            16: [[16], [6]],
            4: [[4, 4, 4, 4], [4, 2]],
            3: [[3, 3, 3, 3, 3, 1], [3, 3]],
        }[micro]
    )


def test_running_statistics_are_those_of_the_batch_however_it_is_cut(run: farandole.Run) -> None:
    """Equal shards: the mean of their means is the batch's; one update of momentum 0.1 a step, not one a shard."""
    loader = run.loader(data(32), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    run.replicate(model=model)
    mean = torch.zeros(6)
    for step, (xs, _) in zip(run.steps(loader, epochs=2), whole_batches(loader, 2), strict=True):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        mean = 0.9 * mean + 0.1 * xs.mean(0)
        torch.testing.assert_close(model[0].running_mean, mean)
        assert model[0].num_batches_tracked.item() == step.number + 1


def test_with_one_shard_running_statistics_are_plain_pytorchs(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH))
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    run.replicate(model=model)
    for step, (xs, ys) in zip(run.steps(loader, epochs=2), whole_batches(loader, 2), strict=True):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        F.cross_entropy(plain(xs), ys)
        assert all(map(torch.equal, model.buffers(), plain.buffers()))


def test_a_step_tells_where_it_is(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    told = []
    for step in run.steps(loader, epochs=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        told.append((step.number, step.epoch, step.samples, step.ends_epoch, step.view.size))
    assert told == [(0, 0, 16, False, 1), (1, 0, 6, True, 1), (2, 1, 16, False, 1), (3, 1, 6, True, 1)]
    assert (run.rank, run.is_leader, run.view.size) == (0, True, 1)


def begun(run: farandole.Run, model: nn.Module, micro: int = 4) -> tuple[farandole.Step, Iterator[farandole.Step]]:
    """A run whose first step has ended."""
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=micro))
    run.replicate(model=model)
    steps = run.steps(loader, epochs=2)
    step = next(steps)
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    return step, steps


# --- what goes wrong in scripts --------------------------------------------------------------------------------


def test_a_loss_that_is_not_one_number(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    x, y = next(iter(step))
    with pytest.raises(LossNotScalar, match=r"the loss has shape \(4,\); hand in one number.*loss\.mean\(\)"):
        step.backward(F.cross_entropy(model(x), y, reduction="none"))
    with pytest.raises(LossNotScalar, match=r"the loss has float; hand in one number"):
        step.backward(1.5)  # type: ignore[arg-type]


def test_a_forgotten_replicate(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    with pytest.raises(NotReplicated, match=r"run\.replicate\(model=\.\.\., optimizer=\.\.\.\)"):
        run.steps(loader, epochs=1)
    with pytest.raises(NotReplicated, match=r"run\.replicate"):
        run.fingerprint()


def test_replicating_twice_or_nothing(run: farandole.Run) -> None:
    run.replicate(model=mlp())
    with pytest.raises(UsageError, match=r"replicate was called before; hand in everything at once"):
        run.replicate(model=mlp())


def test_an_iteration_left_halfway(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    steps = run.steps(loader, epochs=1)
    step = next(steps)
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
        break
    with pytest.raises(StepAbandoned, match=r"step 0: its inner loop was left before its end.*iterate over all"):
        next(steps)


def test_an_iteration_never_begun(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    steps = run.steps(loader, epochs=1)
    next(steps)
    with pytest.raises(StepAbandoned, match=r"step 0: .*iterate over all of the step's micro-batches"):
        next(steps)


def test_a_backward_pass_forgotten_or_made_by_hand(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    batches = iter(next(run.steps(loader, epochs=1)))
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(
        UsageError, match=r"step 0: micro-batch 0 was taken but not finished; call step\.backward\(loss"
    ):
        next(batches)


def test_a_last_pass_forgotten(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    batches = iter(step)
    x, y = next(batches)
    step.backward(F.cross_entropy(model(x), y), last=False)
    with pytest.raises(UsageError, match=r"micro-batch 0 was taken but not finished.*last=False for all but the last"):
        next(batches)


def test_one_backward_pass_too_many(run: farandole.Run) -> None:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    x, y = next(iter(step))
    step.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match=r"step 0: step\.backward outside a micro-batch, or once too often"):
        step.backward(F.cross_entropy(model(x), y))


def test_a_step_is_iterated_over_once_and_tells_its_loss_afterwards(run: farandole.Run) -> None:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    with pytest.raises(StepAbandoned, match=r"step 0: its loss is known after the inner loop has ended"):
        _ = step.loss
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    with pytest.raises(StepAbandoned, match=r"step 0: its micro-batches can be iterated over once"):
        next(iter(step))


def test_two_loops(run: farandole.Run) -> None:
    model = mlp()
    begun(run, model)
    with pytest.raises(UsageError, match=r"run\.steps was called before; a run has one loop, in which the epoch tells"):
        run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1)


def test_two_loops_of_which_neither_has_begun(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    run.steps(loader, epochs=1)
    with pytest.raises(UsageError, match=r"run\.steps was called before"):
        run.steps(loader, epochs=1)


def test_no_epochs(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    with pytest.raises(UsageError, match=r"epochs=0\): at least one epoch"):
        run.steps(loader, epochs=0)


def test_a_batch_that_is_none(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"batch=64\): use farandole\.GlobalBatch\(size, micro=\.\.\.\)"):
        run.loader(data(), batch=64)  # type: ignore[arg-type]


def test_the_view_before_there_is_one(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"known once run\.steps\(\.\.\.\) has begun"):
        _ = run.rank
    assert not run.is_leader


@pytest.mark.usefixtures("run")
def test_joining_twice() -> None:
    with pytest.raises(UsageError, match=r"join\(\) was called before in this process; keep the Run that it gave"):
        farandole.join()


class Secretive:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def test_a_state_that_cannot_be_sent_is_an_error_at_the_start_not_at_the_first_join(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp(), tracker=Secretive())
    with pytest.raises(UnknownState, match=r"\['tracker'\]\['seen'\]: a builtins\.set can't be sent"):
        next(run.steps(loader, epochs=1))


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.int64(3), torch.tensor(0.5), True, 2, "text"], ids=repr
)
def test_numbers_of_every_kind_can_be_logged(run: farandole.Run, value: Any) -> None:
    begun(run, mlp())
    lines: list[Any] = []
    run._client.add_line = lines.append  # type: ignore[method-assign]
    run.log(value=value)
    (line,) = lines
    assert type(line.fields["value"]) in (bool, int, float, str)


@pytest.mark.parametrize("value", [object(), torch.zeros(3), np.zeros(3)], ids=["object", "tensor", "array"])
def test_what_is_no_number_can_not_be_logged(run: farandole.Run, value: Any) -> None:
    """It must fail where it is logged, not on the thread that would send it."""
    begun(run, mlp())
    with pytest.raises(UsageError, match=r"run\.log\(accuracy="):
        run.log(accuracy=value)


@pytest.mark.parametrize(("name", "text"), [("SEED", "one"), ("THREADS", "two")])
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(runs, "_current", None)
    monkeypatch.setenv(f"FARANDOLE_{name}", text)
    with pytest.raises(UsageError, match=rf"FARANDOLE_{name}='{text}'.*unset it"):
        farandole.join()


def test_every_error_here_is_of_our_tree() -> None:
    for error in (LossNotScalar, NotReplicated, StepAbandoned, UnknownState, UsageError):
        assert issubclass(error, FarandoleError)
