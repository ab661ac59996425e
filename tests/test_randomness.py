"""Python's own random generator is the script's: nothing of ours draws from it, on whatever thread, but a transform,
which makes a sample as one of the script's own would.
"""

from __future__ import annotations

import ast
from pathlib import Path

import farandole
from tests.support.every import every

PACKAGE = Path(farandole.__file__).parent
OF_ITS_OWN = {"Random", "SystemRandom"}
KEPT = {"getstate", "setstate"}
SEEDING = {  # the state of a sample, a shard, a step; what a store's client draws is taken back
    "check/loop.py": {"getstate"},
    "data/order.py": {*KEPT, "seed"},
    "data/cache.py": KEPT,
    "data/object_store.py": KEPT,
    "data/transforms.py": {"random", "randint", "uniform"},
}


def draws(source: str) -> set[str]:
    """What a file asks of Python's own generator."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    } - OF_ITS_OWN


@every(sorted(PACKAGE.rglob("*.py")))
def test_nothing_draws_from_the_scripts_generator(path: Path) -> None:
    assert draws(path.read_text()) <= SEEDING.get(str(path.relative_to(PACKAGE)), set())


def test_a_draw_is_found() -> None:
    assert draws("import random\nrandom.uniform(0, 1)\nrandom.SystemRandom()") == {"uniform"}
