"""The examples train on small data in the real formats, made here; and come to the same bits, every sample used once,
under a random history of joins, leaves and kills.

`make test` trains them within its own process (test_examples_policy), `make test-long` strikes the one whose gradients
are switched on in the middle; `make examples-test` trains and strikes all.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.script import alone, history, struck
from chaos.verdict import Reference
from tests.support.examples import (
    EXAMPLES,
    TABLE,
)

pytestmark = pytest.mark.processes

LIMIT_S = 200.0


# --- data --------------------------------------------------------------------------------------------------------


# --- the table ---------------------------------------------------------------------------------------------------


FROZEN_AT_FIRST = "finetune"


@dataclass(frozen=True)
class Trained:
    arguments: list[str]
    reference: Reference
    printed: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """An example alone, trained once."""
    known: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        missing = [module for module in TABLE[name].needs if importlib.util.find_spec(module) is None]
        if missing:
            pytest.skip(f"examples/{name}.py needs {', '.join(missing)}: pip install '.[examples]'")
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            (folder / "data").mkdir()
            arguments = TABLE[name].data(folder / "data", random.Random(name))
            reference, printed = alone(EXAMPLES / f"{name}.py", arguments, folder / "alone", limit_s=LIMIT_S)
            known[name] = Trained(arguments, reference, printed)
        return known[name]

    return train


NAMES = [
    pytest.param(name, marks=[pytest.mark.examples, *([pytest.mark.long] if name == FROZEN_AT_FIRST else [])])
    for name in TABLE
]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_and_reports(name: str, trained: Callable[[str], Trained]) -> None:
    example, printed = TABLE[name], trained(name).printed
    figures = [float(figure) for figure in re.findall(example.says, printed)]
    assert figures, printed
    assert all(example.least <= figure <= example.most for figure in figures), printed


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_under_joins_leaves_and_kills(
    name: str, trained: Callable[[str], Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained(name)
    plan = history(TABLE[name].seed, workers=2, blows=3, every_s=0.7)
    told, blows = struck(
        EXAMPLES / f"{name}.py", before.arguments, plan, tmp_path / "struck", before.reference,
        pace_s=1.0, limit_s=LIMIT_S,
    )  # fmt: skip
    assert not told.complaints, capsys.readouterr().out
    assert told.faults.total() >= 2, f"too little has happened to it:\n{blows}"
    assert told.views >= 3, blows
