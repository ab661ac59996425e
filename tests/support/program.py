"""A program of other people in this test's environment: program.py [--calm] SCRIPT [ARGUMENTS ...]

torchvision is loaded also where its wheel was made for another build of torch (`examples/vision.py`).

With --calm the program draws nothing at random. It and its port draw their random numbers in another order, so that
their losses differ. Here what is drawn depends on what it is drawn for, and not on the order: a data loader keeps the
data's order, dropout drops nothing, noise is a function of the row that it is for. Batch normalization uses its running
statistics, which stay as they are, since those of a batch are others than those of its micro-batches. Without a GPU,
`.cuda()` stays on the CPU. The program knows nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from farandole.data.order import derive, set_random_state


def noise_of(values: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return numbers like noise, of the shape of `values`: each a function of its place and of its row's sum."""
    rows = values.detach().double().reshape(len(values), -1)
    places = torch.arange(rows.shape[1], dtype=torch.float64)
    return (1.5 * torch.sin(places * 12.9898 + rows.sum(1, keepdim=True) * 0.618)).reshape(values.shape).to(values)


def integers(low: int, high: int | tuple[int, ...], size: tuple[int, ...] | None = None, **_: Any) -> torch.Tensor:
    """Return what torch.randint may draw. Every fourth row is the same, as in micro-batches of four."""
    first, last, shape = (0, low, high) if size is None else (low, high, size)
    assert isinstance(last, int)
    assert not isinstance(shape, int)
    rows = first + torch.arange(shape[0]) % 4 * (last - first) // 4
    return rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def without_augmentation() -> None:
    from torchvision import transforms

    for kind in (transforms.RandomHorizontalFlip, transforms.RandomApply, transforms.RandomGrayscale):
        kind.forward = lambda _, img: img
    transforms.RandomResizedCrop.get_params = staticmethod(lambda img, *_: (0, 0, img.height, img.width))


def in_order(begin: Callable[..., None]) -> Callable[..., None]:
    """Return `DataLoader.__init__` without shuffling and without processes."""

    def ordered(self: DataLoader[Any], dataset: Any, *arguments: Any, **options: Any) -> None:
        if isinstance(options.get("sampler"), RandomSampler):
            options["sampler"] = SequentialSampler(dataset)
        for name in ("shuffle", "persistent_workers", "prefetch_factor"):
            options.pop(name, None)
        begin(self, dataset, *arguments, **{**options, "num_workers": 0})

    return ordered


def calm() -> None:
    set_random_state(derive(0, "start"))  # as farandole.join() does
    torch.set_num_threads(1)  # as in a run
    torch.set_default_dtype(torch.float64)  # so that the order of sums does not show
    DataLoader.__init__ = in_order(DataLoader.__init__)
    torch.nn.functional.dropout = lambda values, *_, **__: values  # what torch.nn.Dropout calls
    torch.randn_like = noise_of
    torch.randn = lambda *size, **options: noise_of(torch.zeros(*size, **options))
    torch.randint = integers
    np.random.randint = lambda low, high=None: int(low if high is None else high) - 1
    np.random.uniform = lambda low, high: (low + high) / 2
    np.random.shuffle = lambda _: None
    if "vision" in sys.modules:
        without_augmentation()
    _BatchNorm.forward = lambda self, input: torch.nn.functional.batch_norm(
        input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
    )
    torch.Tensor.float = torch.Tensor.double
    torch.distributions.Categorical.sample = lambda self, *_: self.probs.argmax(-1)
    if importlib.util.find_spec("gymnasium"):
        import gymnasium

        gymnasium.Env.np_random = property(lambda _: np.random.default_rng(0), lambda *_: None)
    if not torch.cuda.is_available():
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2] / "examples")
    with contextlib.suppress(ModuleNotFoundError):  # without torchvision
        import vision

        vision.datasets.cifar.check_integrity = lambda fpath, *_: Path(fpath).exists()  # not the checksum: ours is less
    if sys.argv[1] == "--calm":
        del sys.argv[1]
        calm()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
