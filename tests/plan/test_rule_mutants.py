"""A bug planted in a rule is caught by the reference: the shipped source with one place changed, run in a module of its
own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from farandole.plan import rules
from tests.support.rule_reference import wrong

SOURCE = Path(rules.__file__).read_text()
MUTANTS = [  # a place in plan/batch.py, what is put there
    ("return facts.k, memory", "return math.sqrt(facts.k), memory"),
    ("return math.sqrt(k), memory", "return k, memory"),
    ("return math.sqrt(k), memory", "return math.sqrt(facts.k), memory"),
    ('"origin": 1.0, "target": 1.0', '"origin": 1.0, "target": 0.0'),
    ('if k != memory["target"]:', 'if k > memory["target"]:'),
    ("origin = min(self._at(memory), k)", "origin = self._at(memory)"),
    ("origin = min(self._at(memory), k)", "origin = min(memory['target'], k)"),
    ("origin = min(self._at(memory), k)", "origin = 1.0"),
    ("0.8 / max(1 - facts.momentum, 1e-3)", "8"),
    ("0.8 / max(1 - facts.momentum, 1e-3)", "1 / max(1 - facts.momentum, 1e-3)"),
    ("steps * k / origin", "steps * k"),
    ("steps * k / origin", "steps"),
    ('memory["since"] + 1', 'memory["since"] + 2'),
    ("if since < period else target", "if since <= period else origin"),
    ("since / period * (target - origin)", "since / period * target"),
    ("noise.square - noise.variance / noise.samples", "noise.square"),
    ("math.isfinite(noise.variance + noise.square)", "not math.isnan(noise.variance + noise.square)"),
    ("math.isfinite(noise.variance + noise.square)", "not math.isinf(noise.variance + noise.square)"),
    ("if below > 0 else 1.0", "if below > 0 else k"),
    ('memory["variance"] / facts.base', 'memory["variance"]'),
    ('max(memory["square"], 0.0)', 'memory["square"]'),
    ("below = variance / k + square", "below = variance + square"),
    ("(variance + square) / below", "variance / below"),
    ('1 / (memory["measured"] + 1)', "1.0"),
    ('1 / (memory["measured"] + 1)', "0.0"),
    ('1 / (memory["measured"] + 1)', '1 / (memory["measured"] + 2)'),
    ("max(1 / (memory", "min(1 / (memory"),
    ("k / self.memory_steps), 1.0)", "1 / self.memory_steps), 1.0)"),
    ("k / self.memory_steps), 1.0)", "k / self.memory_steps), 2.0)"),
    ('new * (square - memory["square"])', "new * square"),
    ("max(squares - samples * square, 0.0) / (shards - 1)", "max(squares - samples * square, 0.0) / shards"),
    ("max(squares - samples * square, 0.0)", "(squares - samples * square)"),
    ("squares - samples * square", "squares - square"),
]


def changed(place: str, by: str) -> ModuleType:
    assert SOURCE.count(place) >= 1, f"{place!r} is no longer in plan/rules.py: plant another bug"
    module = ModuleType("planted_rules")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(SOURCE.replace(place, by, 1), rules.__file__, "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(("place", "by"), MUTANTS)
def test_a_planted_bug_is_caught(place: str, by: str) -> None:
    assert wrong(changed(place, by)), "no row of the reference tells it from the rule"


def test_without_one_all_is_well() -> None:
    assert wrong(changed("return facts.k, memory", "return facts.k, memory")) == []
