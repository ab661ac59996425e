"""What goes wrong in training scripts is said at once, with the remedy; and what a step tells where it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import farandole
from farandole import joining
from farandole.errors import FarandoleError, LossNotScalar, NotReplicated, StepAbandoned, UnknownState, UsageError
from tests.support.steps import BATCH, begun, data, mlp


@pytest.mark.failure(
    "The training loop",
    'the loss is not one number (`reduction="none"`)',
    seen="`LossNotScalar` at the first loss",
    outcome="the script fails, exit code 1",
)
def test_a_loss_that_is_not_one_number(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    x, y = next(iter(step))
    with pytest.raises(LossNotScalar, match=r"\(4,\).*loss\.mean\(\)"):
        step.backward(F.cross_entropy(model(x), y, reduction="none"))
    with pytest.raises(LossNotScalar, match=r"\bfloat\b"):
        step.backward(1.5)  # type: ignore[arg-type]


def test_a_forgotten_replicate(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    with pytest.raises(NotReplicated, match=r"run\.replicate\(model=\.\.\., optimizer=\.\.\.\)"):
        run.steps(loader, epochs=1)
    with pytest.raises(NotReplicated, match=r"run\.replicate"):
        run.fingerprint()


def test_replicating_twice_or_nothing(run: farandole.Run) -> None:
    run.replicate(model=mlp())
    with pytest.raises(UsageError, match=r"run\.replicate"):
        run.replicate(model=mlp())


@pytest.mark.failure(
    "The training loop",
    "the script leaves the inner loop before its end, or omits or repeats a backward pass",
    seen="an error in that step names the missing or extra call",
    outcome="the script fails, exit code 1",
)
def test_an_iteration_left_halfway(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    steps = run.steps(loader, epochs=1)
    step = next(steps)
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
        break
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        next(steps)


def test_an_iteration_never_begun(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    steps = run.steps(loader, epochs=1)
    next(steps)
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        next(steps)


@pytest.mark.failure(
    "The training loop", "the script leaves the inner loop before its end, or omits or repeats a backward pass"
)
def test_a_backward_pass_forgotten_or_made_by_hand(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    batches = iter(next(run.steps(loader, epochs=1)))
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(UsageError, match=r"step 0\b.*micro-batch 0\b.*step\.backward\(loss"):
        next(batches)


def test_a_last_pass_forgotten(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    model = mlp()
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    batches = iter(step)
    x, y = next(batches)
    step.backward(F.cross_entropy(model(x), y), last=False)
    with pytest.raises(UsageError, match=r"micro-batch 0\b.*last=False"):
        next(batches)


@pytest.mark.failure(
    "The training loop", "the script leaves the inner loop before its end, or omits or repeats a backward pass"
)
def test_one_backward_pass_too_many(run: farandole.Run) -> None:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    x, y = next(iter(step))
    step.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match=r"step 0\b.*step\.backward"):
        step.backward(F.cross_entropy(model(x), y))


def test_a_step_is_iterated_over_once_and_tells_its_loss_afterwards(run: farandole.Run) -> None:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    step = next(run.steps(loader, epochs=1))
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        _ = step.loss
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    with pytest.raises(StepAbandoned, match=r"step 0\b"):
        next(iter(step))


def test_a_loop_within_a_loop(run: farandole.Run) -> None:
    model = mlp()
    _, steps = begun(run, model)
    with pytest.raises(UsageError, match=r"run\.steps"):
        run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1)
    steps.close()  # type: ignore[attr-defined]
    run.steps(run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4)), epochs=1)


def test_two_loops_of_which_neither_has_begun(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    run.steps(loader, epochs=1)
    with pytest.raises(UsageError, match=r"run\.steps"):
        run.steps(loader, epochs=1)


def test_no_epochs(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp())
    with pytest.raises(UsageError, match=r"epochs=0\)"):
        run.steps(loader, epochs=0)


def test_a_batch_that_is_none(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"batch=64\).*farandole\.GlobalBatch\(size, micro="):
        run.loader(data(), batch=64)  # type: ignore[arg-type]


@pytest.mark.failure(
    "The training loop",
    "the script reads `run.rank` or `run.is_leader` before the loop",
    seen="an error at once says when they exist, also in a single-process run",
    outcome="the script fails, exit code 1",
)
def test_the_view_before_there_is_one(run: farandole.Run) -> None:
    with pytest.raises(UsageError, match=r"\.rank\b.*run\.steps"):
        _ = run.rank
    with pytest.raises(UsageError, match=r"\.is_leader\b.*run\.steps"):
        _ = run.is_leader


@pytest.mark.usefixtures("run")
def test_joining_twice() -> None:
    with pytest.raises(UsageError, match=r"farandole\.join\(\)"):
        farandole.join()


class Secretive:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def test_a_state_that_cannot_be_sent_is_an_error_at_the_start_not_at_the_first_join(run: farandole.Run) -> None:
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=mlp(), tracker=Secretive())
    with pytest.raises(UnknownState, match=r"\['tracker'\]\['seen'\].*builtins\.set"):
        next(run.steps(loader, epochs=1))


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.int64(3), torch.tensor(0.5), True, 2, "text"], ids=repr
)
def test_numbers_of_every_kind_can_be_logged(run: farandole.Run, value: Any) -> None:
    begun(run, mlp())
    lines: list[Any] = []
    run._context.add_line = lines.append  # type: ignore[method-assign]
    run.log(value=value)
    (line,) = lines
    assert type(line.fields["value"]) in (bool, int, float, str)


@pytest.mark.failure(
    "The training loop",
    (
        "`run.log` gets a reserved name (`time`, `event`, `step`, `view`, `worker`), invisible characters, over 100 "
        "values, or a whole number beyond 2^63"
    ),
)
@pytest.mark.parametrize("value", [object(), torch.zeros(3), np.zeros(3)], ids=["object", "tensor", "array"])
def test_what_is_no_number_can_not_be_logged(run: farandole.Run, value: Any) -> None:
    """It must fail where it is logged, not on the thread that would send it."""
    begun(run, mlp())
    with pytest.raises(UsageError, match=r"run\.log\(accuracy="):
        run.log(accuracy=value)


@pytest.mark.failure(
    "The training loop",
    (
        "`run.log` gets a reserved name (`time`, `event`, `step`, `view`, `worker`), invisible characters, over 100 "
        "values, or a whole number beyond 2^63"
    ),
    seen="an error at the call names it",
    outcome="the script fails there",
)
@pytest.mark.parametrize("name", ["event", "step", "time", "view", "worker"])
def test_what_a_line_says_of_itself_can_not_be_logged(run: farandole.Run, name: str) -> None:
    begun(run, mlp())
    with pytest.raises(UsageError, match=rf"run\.log\({name}="):
        run.log(**{name: 1.0})


@pytest.mark.failure(
    "The training loop",
    (
        "`run.log` gets a reserved name (`time`, `event`, `step`, `view`, `worker`), invisible characters, over 100 "
        "values, or a whole number beyond 2^63"
    ),
)
def test_what_nobody_can_see_can_not_be_logged(run: farandole.Run) -> None:
    begun(run, mlp())
    with pytest.raises(UsageError, match=r"run\.log\('acc\\u202euracy'=.*\b256\b"):
        run.log(**{"acc\u202euracy": 1.0})
    with pytest.raises(UsageError, match=r"run\.log.*\b101\b.*\b100\b"):
        run.log(**{f"n{number}": 1.0 for number in range(101)})
    with pytest.raises(UsageError, match=r"run\.log\(n=9223372036854775808\)"):
        run.log(n=2**63)


@pytest.mark.parametrize(("name", "text"), [("SEED", "one"), ("THREADS", "two")])
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(joining, "_current", None)
    monkeypatch.setenv(f"FARANDOLE_{name}", text)
    with pytest.raises(UsageError, match=rf"FARANDOLE_{name}='{text}'"):
        farandole.join()


def test_every_error_here_is_of_our_tree() -> None:
    for error in (LossNotScalar, NotReplicated, StepAbandoned, UnknownState, UsageError):
        assert issubclass(error, FarandoleError)


@pytest.mark.failure(
    "The training loop",
    "the gradients of a layer are sparse (`Embedding(sparse=True)`)",
    seen="an error in the first step names the parameter and the remedy",
    outcome="exit code 1",
)
def test_a_sparse_gradient_is_refused_by_name(run: farandole.Run) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    run.replicate(model=model)
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=BATCH // 2))
    step = next(iter(run.steps(loader, epochs=1)))
    next(iter(step))
    with pytest.raises(UsageError, match=r"model\.weight.*torch\.sparse_coo.*sparse=False"):
        step.backward(model(torch.arange(6)).square().mean())
