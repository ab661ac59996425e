"""A step through the public API, in a world of one: ordinary PyTorch in, the gradient of the mean loss out.

The reference is plain PyTorch over the whole batch at once. With one shard a step there is nothing to add up, so the
bits must be the same; with several, the values.
"""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole
from tests.support.steps import (
    BATCH,
    MICROS,
    TwoHeads,
    adversaries,
    assert_grads,
    compare,
    data,
    entropy,
    grads,
    mlp,
    suppress_usage_error,
    two_losses,
    whole_batches,
)

# --- the gradient ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", MICROS)
def test_the_gradient_is_that_of_the_mean_loss_over_the_batch(run: farandole.Run, micro: int) -> None:
    compare(run, [mlp()], entropy, micro)


@pytest.mark.parametrize("micro", MICROS)
def test_several_backward_passes_add_up(run: farandole.Run, micro: int) -> None:
    compare(run, [TwoHeads()], two_losses, micro)


def test_passes_may_come_in_any_order_and_number(run: farandole.Run) -> None:
    compare(run, [TwoHeads()], lambda m, x, y: [*two_losses(m, x, y)[::-1], *two_losses(m, x, y)], 16)


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
            4: [[4, 4, 4, 4], [3, 3]],
            3: [[3, 3, 3, 3, 2, 2], [3, 3]],
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
