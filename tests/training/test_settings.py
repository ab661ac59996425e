"""What a script does to torch's settings while it trains: told once, in the step's digest, and part of the state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import farandole
from farandole.numerics import settings
from farandole.protocol.messages import SettingChanged
from tests.support.steps import BATCH, data, mlp

DENORMALS = "setting denormals flushed"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def train(run: farandole.Run, altered_in: int, *, after: bool = False) -> Iterator[farandole.Step]:
    model = mlp()
    loader = run.loader(data(), batch=farandole.GlobalBatch(BATCH, micro=4))
    run.replicate(model=model)
    for step in run.steps(loader, epochs=2):
        if step.number == altered_in and not after:
            torch.set_flush_denormal(True)
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        if step.number == altered_in and after:
            torch.set_flush_denormal(True)
        yield step


@pytest.mark.parametrize(("after", "seen_in"), [(False, 1), (True, 2)])
def test_a_setting_that_is_altered_is_told_where_it_is_first_in_force(
    run: farandole.Run, *, after: bool, seen_in: int
) -> None:
    told: list[Any] = []
    tell = run._context.tell
    run._context.tell = lambda message: (told.append(message), tell(message))[1]  # type: ignore[method-assign]
    for _ in train(run, 1, after=after):
        pass
    changes = [message for message in told if isinstance(message, SettingChanged)]
    assert changes == [SettingChanged(step=seen_in, setting=DENORMALS, before="off", now="on")]


@pytest.mark.failure(
    "Scripts that differ between workers",
    (
        "the script changes a setting of torch on one worker alone: threads, precision of products, flushing of "
        "denormal numbers"
    ),
)
def test_it_is_in_the_next_steps_digest_and_named(run: farandole.Run) -> None:
    steps = train(run, 9)
    next(steps)
    assert run._loop is not None
    state = run._loop.state
    before, all_before = state.digest(), dict(zip(*_each(run), strict=True))
    torch.set_flush_denormal(True)
    assert state.digest() == before, "nobody has computed with it"
    state.settings.look()
    assert state.digest() != before
    now = dict(zip(*_each(run), strict=True))
    assert [name for name in now if now[name] != all_before[name]] == [DENORMALS]
    assert next(iter(now)).startswith(("intra-op", "setting")), "settings come first: they are the cause"


def _each(run: farandole.Run) -> tuple[tuple[str, ...], tuple[int, ...]]:
    assert run._loop is not None
    found = run._loop.state.digests()
    return found.names, found.digests


def test_under_any_bits_unlike_settings_are_no_difference_of_replicas(run: farandole.Run) -> None:
    import msgspec

    run._terms = msgspec.structs.replace(run._terms, bits="any")
    next(train(run, 9))
    assert run._loop is not None
    state = run._loop.state
    before = state.digest()
    torch.set_flush_denormal(True)
    assert [name for name, *_ in state.settings.look()] == [DENORMALS], "it is seen"
    assert state.digest() == before
    assert DENORMALS not in _each(run)[0]


@pytest.mark.failure(
    "Scripts that differ between workers", "the script changes a setting of torch on all workers alike"
)
def test_it_is_part_of_the_state(run: farandole.Run) -> None:
    steps = train(run, 0)
    next(steps)
    assert run._loop is not None
    state = run._loop.state
    assert state.snapshot()["settings"] == {}, "as the step began, in whose body it was altered"
    next(steps)
    handed_on = state.snapshot()
    assert handed_on["settings"] == {DENORMALS: "on"}
    torch.set_flush_denormal(False)
    state.settings.look()
    state.take({**handed_on})
    assert settings.flushes()
    assert state.settings.altered == {DENORMALS: "on"}


def test_the_answer_to_a_comparison_says_who_has_made_the_sums(run: farandole.Run) -> None:
    steps = train(run, 9)
    next(steps)
    assert run._loop is not None
    next(steps)
    answer = run._loop.state.digests()
    assert [len(part.members) for part in answer.parts] == [1]
    assert answer.rest
