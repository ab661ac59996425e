"""Runs the user's model under DistributedDataParallel, without changes to the user's script.

It replaces the model's `forward` within the inner loop of a bench's step only, and is removed after the block, so that
it does not affect other contestants. It exchanges the sum of a step's micro-batches with the last one (`no_sync` for
the others), with `gradient_as_bucket_view`, as a good script would.

Not every script can use it. A `Trial`, which exchanges nothing, first checks for known problems. If another error
occurs, DDP is left out with that error as the reason. Workers that wait for a worker whose DDP failed give up after
`LIMIT`.

Its process group is not registered in torch, so no code in the script believes that it runs distributed. Gloo connects
over the loopback interface, and trusts any process that connects meanwhile, as in any script that uses Gloo.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

LIMIT = timedelta(seconds=30)
LOOPBACK = "127.0.0.1"
SHOWN = 3  # names of parameters in a message
_dist: Any = dist  # torch's annotations lack many of its names


def connect(path: Path, rank: int, size: int, device: torch.device) -> Any:
    """Return a group of `size` workers on this machine. They meet through a file that only this user can read."""
    store, gloo, kind = _dist.FileStore(str(path), size), _dist.ProcessGroupGloo, _dist.ProcessGroup.BackendType.GLOO
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = LIMIT
    group, backend = _dist.ProcessGroup(store, rank, size), gloo(store, rank, size, options)
    group._set_default_backend(kind)
    for each in {"cpu", device.type}:
        group._register_backend(torch.device(each), kind, backend)
    return group


class Trial:
    """Plain accumulation of a step that records how the script uses its model; see `Way`."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.reason = ""
        modules = {name: thing for name, thing in objects.items() if isinstance(thing, torch.nn.Module)}
        self.models = {name: m for name, m in modules.items() if any(p.requires_grad for p in m.parameters())}
        self._forwards = self._passes = 0
        self._counts: list[tuple[int, int]] = []

    @contextmanager
    def around(self) -> Generator[None]:
        model = next(iter(self.models.values()))
        own = model.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._forwards += torch.is_grad_enabled()
            return own(*args, **kwargs)

        with _in_place_of_forward(model, counted):
            yield
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self.reason = unfit([*self.models], self._counts, unused, compiled=compiled)

    def opens(self, *, last: bool) -> None:
        del last
        self._forwards = self._passes = 0

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        loss.backward(torch.full_like(loss, weight))
        self._passes += 1
        if last:
            self._counts.append((self._forwards, self._passes))


def unfit(models: Sequence[str], passes: Sequence[tuple[int, int]], unused: Sequence[str], *, compiled: bool) -> str:
    """Return why a script can't use DistributedDataParallel, "" if no problem is known.

    `models`: the trained models; `passes`: the numbers of forward and backward passes of each micro-batch; `unused`:
    parameters without a gradient; `compiled`: True if the model was compiled in place.
    """
    forwards = {forward for forward, _ in passes}
    backwards = max((backward for _, backward in passes), default=0)
    if len(models) > 1:
        return f"the script trains {len(models)} models ({', '.join(models)}), but DistributedDataParallel takes one"
    if compiled:
        return "the model was compiled in place (model.compile()), so its forward can't be replaced"
    if not passes:
        return "a worker has no micro-batch in a step; raise the batch, or lower micro"
    if 0 in forwards:
        return "the script does not call the model itself, as model(inputs), so DistributedDataParallel would not run"
    if max(forwards) > 1:
        return f"the script calls the model {max(forwards)} times for one backward pass"
    if backwards > 1:
        return f"the script makes {backwards} backward passes over a micro-batch"
    if unused:
        more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
        return f"no gradient for {', '.join(unused[:SHOWN])}{more}, but all parameters must be used"
    return ""


class Ddp:
    """DistributedDataParallel around `model` over a `group`, for a block; see `Way`."""

    def __init__(self, model: torch.nn.Module, group: Any) -> None:
        self.reason = ""
        self._within = False
        self._model, self._own = model, model.forward
        # If the reducer of DistributedDataParallel held the last reference to the group, its destructor would wait for
        # the group's threads while it holds the GIL, and these may need the GIL.
        self._group = group
        self._ddp: DistributedDataParallel | None = None
        try:
            self._ddp = DistributedDataParallel(_Inner(model), process_group=group, gradient_as_bucket_view=True)
        except (RuntimeError, ValueError) as error:
            self._fail(error)

    @contextmanager
    def around(self) -> Generator[None]:
        with _in_place_of_forward(self._model, self._forward):
            yield
        self._ddp = None
        gc.collect()  # also removes its hooks

    def opens(self, *, last: bool) -> None:
        self._within = True
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor, weight: float, *, last: bool) -> None:
        try:
            loss.backward(torch.full_like(loss, weight))
        except RuntimeError as error:
            self._fail(error)
        self._within = not last

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._ddp is None or self.reason or not self._within or not torch.is_grad_enabled():
            return self._own(*args, **kwargs)
        try:
            return self._ddp(*args, **kwargs)
        except RuntimeError as error:
            self._fail(error)
            return self._own(*args, **kwargs)

    def _fail(self, error: Exception) -> None:
        self.reason = self.reason or str(error).strip().partition("\n")[0] or type(error).__name__


class _Inner(torch.nn.Module):
    """Calls the model's own forward, even while that is replaced."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self._own = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


@contextmanager
def _in_place_of_forward(model: torch.nn.Module, instead: Callable[..., Any]) -> Generator[None]:
    own = model.__dict__.get("forward")  # set on the instance itself, as in compiled models
    model.__dict__["forward"] = instead
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own
