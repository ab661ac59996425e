"""A world of one that is resumed from what it has saved comes to the bits of one that nothing happened to."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import farandole
from farandole import joining
from farandole.collective.state_transfer import Snapshot, restore
from farandole.errors import UnknownState, UsageError
from tests.support.harness import read_lines
from tests.support.steps import BATCH, SEED, data, mlp
from tests.support.streams import Numbers, Resumable, Sized
from tests.training.conftest import Interrupted, Join

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
EPOCHS = 4  # of two steps each


class Script:
    """A training script; subclasses say what they do at the top of the body, in a micro-batch and after the update."""

    def __init__(self, run: farandole.Run) -> None:
        self.run = run
        self.model = self.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        run.replicate(**self.replicated())

    def make_model(self) -> nn.Sequential:
        return mlp()

    def replicated(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def top(self, step: farandole.Step) -> None: ...

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(inputs), targets)

    def after(self, step: farandole.Step) -> None: ...

    def train(
        self, stops: Callable[[str, int], bool] = lambda *_: False, breaks_at: tuple[str, int] = ("", 0), **options: Any
    ) -> str:
        """To its end, or to where it stops or breaks: a place (top, within, end, after) of a step. The fingerprint."""

        def come_to(place: str, step: farandole.Step) -> None:
            if stops(place, step.number):
                raise Interrupted

        loader = self.run.loader(options.pop("dataset", data()), batch=farandole.GlobalBatch(BATCH, micro=4), **options)
        for step in self.run.steps(loader, epochs=EPOCHS):
            self.top(step)
            come_to("top", step)
            for inputs, targets in step:
                step.backward(self.loss(inputs, targets))
                come_to("within", step)
            come_to("end", step)
            if breaks_at == ("end", step.number):
                break
            self.optimizer.step()
            self.after(step)
            come_to("after", step)
            if breaks_at == ("after", step.number):
                break
        return self.run.fingerprint()


def interrupted(join: Join, script: type[Script], place: str, number: int) -> str:
    """The fingerprint of a run that was saved where its script raised, and was resumed from that."""
    run = join("interrupted")
    with pytest.raises(Interrupted):
        script(run).train(lambda *at: at == (place, number))
    assert run._end_alone()
    return script(join("interrupted")).train()


# --- the random state at the top of a loop body ------------------------------------------------------------------


class Mixup(Script):
    def top(self, step: farandole.Step) -> None:
        del step
        self.strength = 1 + torch.rand(()) + random.random() + np.random.rand()

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs * self.strength, targets)


def test_what_the_body_draws_at_its_top_is_the_steps_own(join: Join) -> None:
    assert interrupted(join, Mixup, "within", 5) == Mixup(join("whole")).train()


# --- what the body does before the inner loop --------------------------------------------------------------------


class StepsFirst(Script):
    """Everything plain changes at the top of the body."""

    def replicated(self) -> dict[str, Any]:
        self.mean = Mean()
        return {**super().replicated(), "mean": self.mean}

    def make_model(self) -> nn.Sequential:
        return nn.Sequential(*mlp(), Scaled())

    def top(self, step: farandole.Step) -> None:
        self.schedule.step()
        self.optimizer.param_groups[0]["momentum"] *= 0.9
        self.mean.value = 0.5 * self.mean.value + step.number
        self.model[3].times += 1

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs, targets) * (1 + self.mean.value)


class Mean:
    """An object of the script's own."""

    value = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class Scaled(nn.Module):
    """It has a number as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.times

    def get_extra_state(self) -> int:
        return self.times

    def set_extra_state(self, state: int) -> None:
        self.times = state


class RateIsTensor(StepsFirst):
    """A scheduler fills such a rate in place."""

    def __init__(self, run: farandole.Run) -> None:
        super().__init__(run)
        assert isinstance(self.optimizer.param_groups[0]["lr"], torch.Tensor)

    def replicated(self) -> dict[str, Any]:
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=torch.tensor(0.1), foreach=False, capturable=False
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        return {**super().replicated(), "optimizer": self.optimizer, "schedule": self.schedule}

    def top(self, step: farandole.Step) -> None:
        del step
        self.schedule.step()


@pytest.mark.parametrize("script", [StepsFirst, RateIsTensor])
@pytest.mark.parametrize("place", ["top", "within"])
def test_what_is_saved_in_the_middle_of_a_body_is_the_state_of_its_beginning(
    script: type[Script], place: str, join: Join, tmp_path: Path
) -> None:
    assert interrupted(join, script, place, 5) == script(join("whole")).train()
    assert len(list((tmp_path / "interrupted" / "checkpoints").glob("step-00000005-*.json"))) == 1


class Averages(Script):
    """Parameters change before the inner loop: an average of weights is too large to be kept."""

    def make_model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 300), nn.Linear(300, 3))

    def replicated(self) -> dict[str, Any]:
        self.average = self.make_model().requires_grad_(False)
        return {**super().replicated(), "average": self.average}

    def top(self, step: farandole.Step) -> None:
        if step.number == 3:
            for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.1)


@pytest.mark.failure(
    "The training loop",
    "the loop body changes parameters before the inner loop (an average of weights), and the script fails in that step",
    seen="the state is saved as `after-step-N...pt`",
    outcome="no run resumes from it; change parameters after the inner loop; a change through `.data` is not detected",
)
@pytest.mark.parametrize(("place", "number", "name"), [
    ("top", 3, "after-step-00000003"), ("within", 3, "after-step-00000003"), ("within", 4, "step-00000004"),
])  # fmt: skip
def test_it_has_another_name_where_a_body_has_changed_what_is_not_kept(
    place: str, number: int, name: str, join: Join, tmp_path: Path
) -> None:
    run = join("interrupted")
    with pytest.raises(Interrupted):
        Averages(run).train(lambda *at: at == (place, number))
    assert run._end_alone()
    [saved] = (tmp_path / "interrupted" / "checkpoints").glob("*.json")
    assert saved.name.startswith(name)


def test_a_joiner_is_handed_the_state_of_the_steps_beginning(join: Join) -> None:
    """Also where the loop body has gone on meanwhile: a rate that is a tensor lies where the scheduler changes it."""
    for script in (StepsFirst, RateIsTensor):
        run = join(script.__name__)
        trained = script(run)
        with pytest.raises(Interrupted):
            trained.train(lambda *at: at == ("after", 2))
        steps = run._loop
        assert steps is not None
        steps.state.begin(steps.progress.after)
        handed_on = Snapshot(steps.state.snapshot())
        digest = steps.state.digest()
        trained.top(cast("farandole.Step", SimpleNamespace(number=3)))
        joiner = script(join(f"{script.__name__} joiner"))
        next(
            iter(
                joiner.run.steps(joiner.run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=EPOCHS)
            )
        )
        assert joiner.run._loop is not None
        state = joiner.run._loop.state
        state.position = steps.state.position
        state.take(restore(handed_on.skeleton, handed_on.stripe(0, 1)))
        assert state.digest() == digest
        joiner.top(cast("farandole.Step", SimpleNamespace(number=3)))
        assert joiner.run.fingerprint() == run.fingerprint(), "it does what the body does once"


# --- state that can't be saved -----------------------------------------------------------------------------------


class Remembers(torch.optim.SGD):
    """It has `thing` in its state from update `first` on."""

    thing: Any = None
    first = 0
    updates = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        if self.updates >= self.first:
            self.state[self.param_groups[0]["params"][0]]["losses"] = self.thing
        self.updates += 1
        return found


def remembering(first: int, thing: Any) -> type[Script]:
    class Remembering(Script):
        def replicated(self) -> dict[str, Any]:
            self.optimizer = Remembers(self.model.parameters(), lr=0.1, momentum=0.9)
            self.optimizer.first, self.optimizer.thing = first, thing
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
            return super().replicated()

    return Remembering


THINGS = {
    "deque": deque([1.0]), "set": {1, 2}, "array": np.zeros(2), "sparse": torch.zeros(2).to_sparse(),
    "float8": torch.zeros(2, dtype=torch.float8_e4m3fn), "number": 1 << 70, "nested": ["a", deque()],
}  # fmt: skip


@pytest.mark.failure(
    "The training loop",
    "an update adds a value that can't be sent without pickle to the state: a `deque`, a set, an array of an optimizer",
    seen="`UnknownState` before the next step, with the path of the value",
    outcome=(
        "exit code 1; that state is not saved; return numbers, text, tensors, lists, tuples and dicts from "
        "`state_dict()`"
    ),
)
@pytest.mark.parametrize("thing", THINGS.values(), ids=THINGS.keys())
@pytest.mark.parametrize("first", [0, 3])
def test_state_that_cannot_be_saved_is_an_error_in_the_first_step_that_has_it(
    first: int, thing: Any, join: Join
) -> None:
    run = join("run")
    begun = []
    with pytest.raises(UnknownState, match=r"\['objects'\]\['optimizer'\]\['state'\]\[0\]\['losses'\]"):
        remembering(first, thing)(run).train(lambda place, number: begun.append((place, number)) is not None)
    assert begun[-1] == ("after", first), "no step begins with it"
    assert not run._end_alone(), "nothing is saved, and that is the exit code"


@pytest.mark.failure(
    "The training loop",
    "an update adds a value that can't be sent without pickle to the state: a `deque`, a set, an array of an optimizer",
)
def test_after_the_last_step_it_is_an_error_at_the_end(join: Join, tmp_path: Path) -> None:
    run = join("run")
    with pytest.raises(UnknownState):  # of the fingerprint, after the loop
        remembering(2 * EPOCHS - 1, deque())(run).train()
    assert not run._end_alone()
    [told] = [line for line in read_lines(tmp_path / "run") if line.get("event") == "not saved"]
    assert "losses" in told["reason"]
    assert not [line for line in read_lines(tmp_path / "run") if line.get("event") == "finished"]


# --- what state_dict() leaves out --------------------------------------------------------------------------------


class Noisy(nn.Module):
    """It has attributes of each kind, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kind, self.shape, self.uses = 1.0, "plain", (1, 2), True
        self.home = object()
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        extra = 0.1 if self.kind == "odd" else 0.0
        return inputs * self.scale + self.shape[0] + extra + (0.0 if self.uses else 0.5) + getattr(self, "late", 0.0)


class Changes(Script):
    """What decides what is computed, and is in no state_dict(), changes in step 2, at its top or after its update."""

    at_top = False

    def make_model(self) -> nn.Sequential:
        torch.manual_seed(2)
        first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        return nn.Sequential(first, Noisy(), nn.Sequential(nn.BatchNorm1d(8), nn.LeakyReLU()), nn.Linear(8, 3))

    def top(self, step: farandole.Step) -> None:
        if step.number == 2 and self.at_top:
            self.change()

    def after(self, step: farandole.Step) -> None:
        if step.number == 2 and not self.at_top:
            self.change()

    def change(self) -> None:
        frozen, noisy, _, _ = cast("Any", self.model)
        frozen[1].eval()
        frozen[1].momentum = None
        frozen[2].p = np.float64(0.6)
        self.model[2][0].momentum = 0.5  # type: ignore[index]
        self.model[2][1].negative_slope = 0.3  # type: ignore[index]
        noisy.scale, noisy.kind, noisy.shape, noisy.uses = 2.0, "odd", (3, 4), False
        noisy.late = 0.25


class ChangesAtTop(Changes):
    at_top = True


@pytest.mark.parametrize("script", [Changes, ChangesAtTop])
@pytest.mark.parametrize(("place", "number"), [("within", 2), ("within", 3), ("top", 5)])
def test_what_state_dict_leaves_out_is_part_of_the_state(
    script: type[Script], place: str, number: int, join: Join
) -> None:
    assert interrupted(join, script, place, number) == script(join("whole")).train()


class Warms(Script):
    """What is computed depends on how often it was: a world of one goes on with the count."""

    def make_model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), Noisy(), nn.Linear(8, 3))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs, targets) / cast("Any", self.model[1]).calls


@pytest.mark.failure(
    "The training loop",
    "a forward pass changes a plain attribute (a counter of calls)",
    seen="one warning in the first step names it",
    outcome="training continues; each worker has its own value; use a buffer if results depend on it",
)
def test_what_forward_passes_count_goes_on_alone_and_is_compared_with_nobody(join: Join) -> None:
    assert interrupted(join, Warms, "within", 5) == Warms(join("whole")).train()
    run = join("again")
    with pytest.raises(Interrupted):
        Warms(run).train(lambda *at: at == ("after", 2))
    assert run._loop is not None
    state = run._loop.state
    state.begin(run._loop.progress.after)
    assert "model.1.calls" in state.snapshot(own=True)["attributes"]
    assert state.snapshot()["attributes"] == {}, "a joiner has its own"
    digest = state.digest()
    cast("Any", run._loop.replica.objects["model"])[1].calls += 1
    state.begin(run._loop.progress.after)
    assert state.digest() == digest


class Swaps(Script):
    """An activation becomes another: nobody can hand that over."""

    swaps = True

    def after(self, step: farandole.Step) -> None:
        if step.number == 2 and self.swaps:
            self.model[1] = nn.ReLU()


@pytest.mark.failure(
    "The training loop",
    "the script replaces a module or function of the model while it trains (`model.act = nn.GELU()`)",
    seen="a joiner without it is refused, with the attribute; after a resume, `RESULTS MAY DIFFER` names it",
    outcome="it can't be sent: build the model with it, or decide by `step.number` in the forward pass",
)
def test_what_cannot_be_kept_is_named_at_a_resume(join: Join, tmp_path: Path) -> None:
    interrupted(join, Swaps, "within", 5)
    [resumed] = [line for line in read_lines(tmp_path / "interrupted") if line.get("event") == "resumed"]
    [text] = [text for text in resumed["differences"] if text.startswith("model.1")]
    assert re.findall("ReLU|Tanh", text) == ["ReLU", "Tanh"]


def test_an_attribute_that_is_another_is_in_the_digest_by_its_name(join: Join) -> None:
    run = join("run")
    with pytest.raises(Interrupted):
        Changes(run).train(lambda *at: at == ("after", 2))
    assert run._loop is not None
    state, model = run._loop.state, cast("Any", run._loop.replica.objects["model"])
    state.begin(run._loop.progress.after)
    digest, names = state.digest(), state.digests()
    assert "model.0.1.training" in names.names
    model[0][2].p = 0.7
    state.begin(run._loop.progress.after)
    assert state.digest() != digest
    unlike = [
        n for n, one, other in zip(names.names, names.digests, state.digests().digests, strict=True) if one != other
    ]
    assert unlike == ["model.0.2.p"]
    assert names.names[: len(run._loop.state._compared)] == tuple(run._loop.state._compared), "the cause comes first"


# --- a loop that is left, and what nothing goes on from ----------------------------------------------------------


@pytest.mark.failure(
    "Checkpoints",
    "the script of a single-process run with `FARANDOLE_FOLDER` ends, leaves its loop by `break`, or fails",
)
@pytest.mark.parametrize("place", ["end", "after"])
def test_a_loop_left_by_break_goes_on(place: str, join: Join, tmp_path: Path) -> None:
    """Before the update it is still the state of the step's beginning."""
    run = join("left")
    StepsFirst(run).train(breaks_at=(place, 4))
    assert run._end_alone()
    assert StepsFirst(join("left")).train() == StepsFirst(join("whole")).train()
    lines = read_lines(tmp_path / "left")
    assert [line["step"] for line in lines if line.get("event") == "resumed"] == [5 if place == "after" else 4]
    assert [line["whole"] for line in lines if line.get("event") == "saved"] == [True]


@pytest.mark.failure(
    "Checkpoints",
    "a run is started again, and its newest state is `after-step-N...pt`",
    seen="`CHECKPOINT SKIPPED`, with the path and the reason",
    outcome="it resumes from the newest complete checkpoint; without any, it starts at step 0 and says so",
)
def test_what_nothing_goes_on_from_is_said(join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error between two steps the update may be done by half."""
    monkeypatch.setattr("sys.last_value", Interrupted(), raising=False)  # as Python leaves it

    def fails(number: int) -> list[str]:
        run = join("failed")
        with pytest.raises(Interrupted):
            Script(run).train(lambda *at: at == ("after", number))
        assert run._end_alone()
        return [line["reason"] for line in read_lines(tmp_path / "failed") if line.get("event") == "checkpoint damaged"]

    assert fails(3) == []
    [reason] = fails(5)
    assert "after-step-00000003-" in reason
    [_, *reasons] = fails(6)
    assert [name in reason for name, reason in zip(("step-00000005", "step-00000003"), reasons, strict=True)] == [
        True,
        True,
    ]
    steps = [line["step"] for line in read_lines(tmp_path / "failed") if line.get("event") == "resumed"]
    assert steps == [0, 0], "it is told where it begins"


# --- options that are others at a resume -------------------------------------------------------------------------


def split(first: int) -> Subset[Any]:
    return Subset(data(), [*range(first, 22), *range(first)])


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "shuffle": ({"shuffle": True}, {"shuffle": False}, "order of the samples: .*shuffled"),
    "drop_last": ({}, {"drop_last": True}, "samples in the data that an epoch leaves out"),
    "split": ({"dataset": split(0)}, {"dataset": split(5)}, "samples in the data that a Subset picks"),
}


@pytest.mark.failure(
    "Checkpoints",
    "a run resumes in the middle of an epoch with another `shuffle`, seed, `drop_last`, length or `Subset` of the data",
    seen=(
        "an error at once, with both values; at the end of an epoch, `RESULTS MAY DIFFER` for another `shuffle` or seed"
    ),
    outcome="nothing is trained, because samples would count twice or never",
)
@pytest.mark.parametrize(("then", "now", "said"), OTHERS.values(), ids=OTHERS.keys())
def test_another_order_within_an_epoch_is_refused(
    then: dict[str, Any], now: dict[str, Any], said: str, join: Join
) -> None:
    run = join("run")
    Script(run).train(breaks_at=("after", 2), **then)
    assert run._end_alone()
    with pytest.raises(UsageError, match=said):
        Script(join("run")).train(**now)


@pytest.mark.failure(
    "Checkpoints",
    "a run resumes in the middle of an epoch with another `shuffle`, seed, `drop_last`, length or `Subset` of the data",
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_another_seed_counts_within_an_epoch_where_it_orders_samples(
    join: Join, monkeypatch: pytest.MonkeyPatch, *, shuffle: bool
) -> None:
    run = join("run")
    Script(run).train(breaks_at=("after", 2), shuffle=shuffle)
    assert run._end_alone()
    monkeypatch.setenv("FARANDOLE_SEED", str(SEED + 1))
    if shuffle:
        with pytest.raises(UsageError, match=r"seed: .*\b5\b.*\b6\b"):
            Script(join("run")).train(shuffle=shuffle)
    else:
        Script(join("run")).train(shuffle=shuffle)


@pytest.mark.failure(
    "Checkpoints",
    "a run resumes in the middle of an epoch with another `shuffle`, seed, `drop_last`, length or `Subset` of the data",
)
def test_another_order_at_an_epochs_end_is_told(join: Join, tmp_path: Path) -> None:
    run = join("run")
    Script(run).train(breaks_at=("after", 3))
    assert run._end_alone()
    Script(join("run")).train(shuffle=False)
    [resumed] = [line for line in read_lines(tmp_path / "run") if line.get("event") == "resumed"]
    assert [text for text in resumed["differences"] if text.startswith("order of the samples")]


class OtherRate(Script):
    """As if somebody had given --rate and --freeze."""

    def __init__(self, run: farandole.Run) -> None:
        self.model = self.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.model[0].requires_grad_(False)
        self.run = run
        run.replicate(**self.replicated())


@pytest.mark.failure(
    "Checkpoints",
    (
        "a run resumes with another learning rate, other optimizer or scheduler settings, or other frozen parameters "
        "in the script"
    ),
    seen="one line in `resumed`, with the value of the script now and at the start of the run",
    outcome=(
        "the values of the checkpoint count; set others after the first step has begun, or start a new run from the "
        "weights"
    ),
)
def test_what_a_checkpoint_overrules_is_told_in_one_line(join: Join, tmp_path: Path) -> None:
    run = join("run")
    Script(run).train(breaks_at=("after", 2))
    assert run._end_alone()
    for number, script in enumerate((Script, OtherRate)):
        other = script(join("run"))
        other.train(breaks_at=("after", 3 + number))
        assert other.run._end_alone()
        assert other.model[0].weight.requires_grad
    same, another = [line["differences"] for line in read_lines(tmp_path / "run") if line.get("event") == "resumed"]
    assert same == []
    [line] = another
    for name in ("optimizer.param_groups[0].lr is 0.3 in this script, and was 0.1", "model.0.weight.requires_grad"):
        assert name in line


# --- a stream ----------------------------------------------------------------------------------------------------


class OfNumbers(Script):
    """Its samples are the numbers of a stream."""

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(torch.sin(inputs)), targets)


def pairs(numbers: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.stack(numbers)
    return values[:, None] * torch.arange(6), values.long() % 3


@pytest.mark.parametrize(
    ("kind", "processes"),
    [(Sized, 0), (Resumable, 0), pytest.param(Resumable, 1, marks=(pytest.mark.processes, pytest.mark.long))],
)
def test_a_run_on_a_stream_goes_on_at_the_mark_of_its_checkpoint(
    join: Join, kind: type[Numbers], processes: int
) -> None:
    """Step 45 of 100 is in the second of four epochs, at sample 320: beyond the mark at 256."""

    def train(folder: str, stops: Callable[[str, int], bool] = lambda *_: False) -> tuple[str, int]:
        dataset = kind(400)
        script = OfNumbers(join(folder))
        dataset._read.clear()
        options: dict[str, Any] = {"num_workers": processes, "collate_fn": pairs}
        return script.train(stops, dataset=dataset, **options), dataset.reads

    whole, _ = train("whole")
    with pytest.raises(Interrupted):
        train("interrupted", lambda *at: at == ("within", 45))
    assert joining._current is not None
    assert joining._current._end_alone()
    resumed, reads = train("interrupted")
    assert resumed == whole
    if not processes:
        twice = 2 * 8  # the first samples
        skipped = 256 if kind is Resumable else 0
        assert reads == twice + 3 * 400 - skipped
