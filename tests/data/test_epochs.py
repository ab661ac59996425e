"""`set_epoch` wherever samples are read, and changes to a data set that its loader processes would never see."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset

import farandole
from farandole.data.loader import Key, Loader
from farandole.errors import UsageError
from tests.support.drawing import keys

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
processes = pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.processes)])


class Crop:
    """A transform, with a strength of its own."""

    def __init__(self) -> None:
        self.strength = 1.0

    def __call__(self, value: float) -> float:
        return value * self.strength


class Plain(Dataset[Any]):
    """A sample says which epoch it was read in, by the attribute that scripts set."""

    weight = 1

    def __init__(self, length: int = 48) -> None:
        self.length = length
        self.epoch = -1
        self.p: Any = 0.5
        self._hidden = 3
        self.names = ["a", "b"]
        self.table = np.zeros(4)
        self.tensor = torch.zeros(2000)
        self.options = {"size": 3}
        self.transform: Any = None
        self.steps = [Crop(), Crop()]
        self.file: Any = None
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.reads += 1
        self.file = self.file or object()
        return index, self.epoch


class Epochal(Plain):
    """The same, with the method; it counts how often that is called in this process."""

    def __init__(self, length: int = 48) -> None:
        super().__init__(length)
        self._calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._calls.append(epoch)


class Wrapper(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def read_in(loader: Loader, epochs: int = 2) -> list[tuple[int, set[int]]]:
    """Each micro-batch's epoch, and the epochs in which its samples were read."""
    found = []
    for key in keys(loader, epochs):
        batch: Any = loader.fetch(key)
        while not isinstance(batch[-1], torch.Tensor):
            batch = batch[-1]
        found.append((key.epoch, set(batch[-1].tolist())))
    return found


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda inner: inner,
    "a subset": lambda inner: Subset(inner, range(0, 48, 2)),
    "a subset of a subset": lambda inner: Subset(Subset(inner, range(40)), range(20)),
    "in a concatenation": lambda inner: ConcatDataset([Subset(inner, range(12)), inner]),
    "in a stack": lambda inner: StackDataset(inner, inner),
    "in a wrapper of the user's own": lambda inner: Wrapper(Wrapper(inner)),
}


@processes
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_each_sample_is_read_in_its_own_epoch(make: Callable[..., Loader], wrapped: str, num_workers: int) -> None:
    """Also those that are read ahead of the border."""
    loader = make(WRAPPED[wrapped](Epochal()), num_workers=num_workers)
    loader.expect(iter(keys(loader, epochs=3)))
    assert all(epochs == {epoch} for epoch, epochs in read_in(loader, epochs=3))


@processes
def test_an_earlier_epoch_is_gone_back_to(make: Callable[..., Loader], num_workers: int) -> None:
    """As a round is that is done again; and who comes in the middle of an epoch is told of that one first."""
    loader = make(Epochal(), num_workers=num_workers)
    for epoch in (5, 6, 5, 0):
        assert set(loader.fetch(Key(epoch, epoch, 0, 8, 16))[1].tolist()) == {epoch}


def test_it_is_called_once_an_epoch_in_a_process() -> None:
    dataset = Epochal()
    loader = Loader(dataset, farandole.GlobalBatch(24, micro=8), seed=3)
    read_in(loader, epochs=3)
    assert dataset._calls == [0, 1, 2]


@processes
def test_read_ahead_and_pinned_in_one_process_the_script_sees_the_step_in_hand(
    make: Callable[..., Loader], num_workers: int
) -> None:
    dataset = Epochal()
    loader = make(dataset, num_workers=num_workers)
    loader.expect(iter(keys(loader, epochs=2)))
    for key in keys(loader, epochs=2):
        loader.fetch(key)
        assert dataset.epoch == key.epoch


class Weigh:
    """A collate function that follows the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Any]) -> Any:
        return torch.tensor([sample[0] for sample in samples]), torch.full((len(samples),), self.epoch)


@processes
def test_a_collate_function_may_have_it_too(make: Callable[..., Loader], num_workers: int) -> None:
    loader = make(Plain(), num_workers=num_workers, collate_fn=Weigh())
    assert all(epochs == {epoch} for epoch, epochs in read_in(loader))


def test_two_loaders_of_one_data_set_do_not_disturb_each_other() -> None:
    """As a training and an evaluation of the same one."""
    dataset = Epochal()
    batch = farandole.GlobalBatch(24, micro=8)
    one, other = Loader(dataset, batch, seed=3), Loader(Subset(dataset, range(20)), batch, seed=0)
    for epoch in (3, 4, 4, 5):
        assert set(one.fetch(Key(epoch, epoch, 0, 0, 8))[1].tolist()) == {epoch}
        assert set(other.fetch(Key(0, 0, 0, 0, 8))[1].tolist()) == {0}


def test_another_data_set_at_the_same_address_is_told() -> None:
    for _ in range(50):  # the address is soon used again
        loader = Loader(Epochal(8), farandole.GlobalBatch(8, micro=8), seed=0)
        assert set(loader.fetch(Key(4, 0, 0, 0, 8))[1].tolist()) == {4}


# --- what the script changes -----------------------------------------------------------------------------------------


def _replace(dataset: Any, name: str, value: Any) -> None:
    setattr(dataset, name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda d: _replace(d, "epoch", 1), "Plain.epoch"),
    "a new attribute": (lambda d: _replace(d, "stage", 1), "Plain.stage"),
    "an attribute that is gone": (lambda d: delattr(d, "p"), "Plain.p"),
    "of its class": (lambda d: _replace(type(d), "weight", type(d).weight + 1), "Plain.weight"),
    "a private number": (lambda d: _replace(d, "_hidden", 4), "Plain._hidden"),
    "a list that grows": (lambda d: d.names.append("c"), "Plain.names"),
    "an entry of a list": (lambda d: d.names.__setitem__(0, "c"), "Plain.names"),
    "an entry of a dict": (lambda d: d.options.update(size=4), "Plain.options"),
    "within an array": (lambda d: d.table.__setitem__(0, 1), "Plain.table"),
    "within a tensor": (lambda d: d.tensor.add_(1), "Plain.tensor"),
    "another tensor": (lambda d: _replace(d, "tensor", torch.ones(2000)), "Plain.tensor"),
    "a transform": (lambda d: _replace(d, "transform", Crop()), "Plain.transform"),
    "a transform's own number": (lambda d: _replace(d.steps[1], "strength", 2.0), r"Plain.steps\[1\].strength"),
    "a transform in a list": (lambda d: d.steps.__setitem__(0, Crop()), "Plain.steps"),
}


@pytest.mark.failure(
    "Data and loader processes",
    "the script sets an attribute of the dataset, a transform or `collate_fn` while it trains",
    seen="an error names the attribute, its old and new value, and `set_epoch`",
    outcome="the run ends as after an error of the script, for any `num_workers`",
)
@processes
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_script_changes_is_named(
    make: Callable[..., Loader], change: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "weight", 1)
    dataset = Plain()
    loader = make(Wrapper(dataset), num_workers=num_workers)
    ahead = keys(loader, epochs=2)
    loader.expect(iter(ahead))
    loader.enter(0)
    loader.fetch(ahead[0])
    do, name = CHANGES[change]
    do(dataset)
    with pytest.raises(UsageError, match=rf"^Wrapper.{name.replace('Plain', 'inner')} .*set_epoch\(epoch\)"):
        loader.fetch(ahead[1])


@processes
def test_what_processes_share_is_none_the_less_a_change(make: Callable[..., Loader], num_workers: int) -> None:
    """Who reads ahead sees it too early."""
    dataset = Plain()
    dataset.p = multiprocessing.Value("i", 0)
    loader = make(dataset, num_workers=num_workers)
    loader.fetch(keys(loader)[0])
    dataset.p.value = 1
    with pytest.raises(UsageError, match=r"^Plain\.p\b"):
        loader.fetch(keys(loader)[1])


UNCHANGED: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "an equal value": lambda d: _replace(d, "names", ["a", "b"]),
    "an equal tensor": lambda d: _replace(d, "tensor", torch.zeros(2000)),
    "a file that is opened": lambda d: _replace(d, "file", d.file or object()),
    "a cache": lambda d: _replace(d, "_cache", {1: 2}),
    "a private object": lambda d: _replace(d, "_connection", object()),
}


@pytest.mark.failure(
    "Data and loader processes",
    "the script sets an attribute of the dataset, a transform or `collate_fn` while it trains",
)
@processes
@pytest.mark.parametrize("change", UNCHANGED)
def test_what_is_no_change(make: Callable[..., Loader], change: str, num_workers: int) -> None:
    """What reading changes in the data set itself is none either: `Plain` counts its reads."""
    dataset = Plain()
    loader = make(dataset, num_workers=num_workers)
    for key in keys(loader, epochs=2):
        loader.enter(key.epoch)
        UNCHANGED[change](dataset)
        loader.fetch(key)


class Counting:
    """A collate function that weighs by its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.scale = float("nan")

    def __call__(self, items: list[Any]) -> torch.Tensor:
        self.calls += 1
        return self.calls * torch.tensor(items)


def test_what_making_samples_changes_is_named_once(
    make: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(Plain(), num_workers=0, collate_fn=Counting())
    for key in keys(loader, epochs=2):
        loader.fetch(key)
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "Counting.calls" in told
    assert "Plain.reads" in told
    assert "Plain.file" not in told, "a file that is opened"
    assert "Counting.scale" not in told


def test_a_data_set_that_reading_leaves_as_it_is_is_not_named(
    make: Callable[..., Loader], caplog: pytest.LogCaptureFixture
) -> None:
    loader = make(Subset(Wrapper(Crops()), range(20)), num_workers=0)
    for key in keys(loader, epochs=2):
        loader.fetch(key)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Crops(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = Crop()
        self._cache: dict[int, float] = {}

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return self._cache.setdefault(index, self.transform(float(index)))


@processes
def test_a_script_may_call_set_epoch_as_well(make: Callable[..., Loader], num_workers: int) -> None:
    """At the top of the body, or at the end of it for the next epoch; not with an epoch that is not due."""
    dataset = Epochal()
    loader = make(Wrapper(dataset), num_workers=num_workers)
    for epoch in range(3):
        loader.enter(epoch)
        dataset.set_epoch(epoch)
        assert set(loader.fetch(Key(epoch, epoch, 0, 0, 8))[1].tolist()) == {epoch}
        dataset.set_epoch(epoch + 1)
    loader.enter(3)
    dataset.set_epoch(7)
    with pytest.raises(UsageError, match=r"^Wrapper\.inner\.epoch\b.*\b3\b.*\b7\b"):
        loader.fetch(Key(3, 3, 0, 0, 8))


class Network(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 2)


def test_the_model_in_a_data_set_is_the_runs() -> None:
    dataset = Network()
    loader = Loader(dataset, farandole.GlobalBatch(24, micro=8), seed=3)
    loader.fetch(keys(loader)[0])
    dataset.model.eval()
    loader.fetch(keys(loader)[1])


# --- in a run --------------------------------------------------------------------------------------------------------


def losses(run: farandole.Run, dataset: Any, body: Callable[[farandole.Step], None] = lambda _: None) -> list[float]:
    model = torch.nn.Linear(1, 1)
    run.replicate(model=model)
    found = []
    for step in run.steps(run.loader(dataset, batch=farandole.GlobalBatch(24, micro=8)), epochs=3):
        body(step)
        for _, epochs in step:
            step.backward(model.weight.sum() * 0 + epochs.double().mean())
        found.append(step.loss)
    return found


def test_a_loop_body_sees_the_epoch_and_so_do_its_samples(run: farandole.Run) -> None:
    dataset = Epochal()
    seen: list[tuple[int, int]] = []
    assert losses(run, dataset, lambda step: seen.append((step.epoch, dataset.epoch))) == [0, 0, 1, 1, 2, 2]
    assert seen == [(epoch, epoch) for epoch in (0, 0, 1, 1, 2, 2)]


@pytest.mark.failure(
    "Data and loader processes",
    "the script sets an attribute of the dataset, a transform or `collate_fn` while it trains",
)
def test_an_attribute_that_the_loop_sets_is_an_error(run: farandole.Run) -> None:
    dataset = Plain()
    with pytest.raises(UsageError, match=r"^Plain\.epoch\b.*-1\b.*\b0\b"):
        losses(run, dataset, lambda step: setattr(dataset, "epoch", step.epoch))


def test_an_evaluation_is_of_epoch_0_and_leaves_the_training_its_own(run: farandole.Run) -> None:
    dataset, model = Epochal(), torch.nn.Linear(1, 1)
    run.replicate(model=model)
    for step in run.steps(run.loader(dataset, batch=farandole.GlobalBatch(24, micro=8)), epochs=2):
        for _, epochs in step:
            step.backward(model.weight.sum() * 0 + epochs.double().mean())
        assert step.loss == step.epoch
        value = run.evaluate(model, dataset, lambda epochs: epochs.double(), predict=lambda _, batch: (batch[1],))
        assert value == 0
