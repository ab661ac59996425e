"""The error tree as `errors.py` draws it is the tree that there is."""

from __future__ import annotations

import importlib
import pkgutil
import re

import farandole
from farandole import errors
from farandole.errors import FarandoleError
from tests.support.vision_operators import declare

DRAWN = re.compile(r"^    (?P<branch>[│ ├└─]*)(?P<name>[A-Z]\w+)(?: +(?P<what>\S.*))?$")


def drawn() -> dict[str, str]:
    """Each error's parent, by the drawing's indentation."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = DRAWN.match(line)
        if found:
            depth = len(found["branch"]) // 4
            assert found["what"] or depth == 0, f"{found['name']}: no word about it"
            del above[depth:]
            parents[found["name"]] = above[-1] if above else ""
            above.append(found["name"])
    return parents


def real() -> dict[str, str]:
    """Each error's parent, of those anywhere in the package."""
    declare()  # some of its modules import torchvision, if it is there
    for module in pkgutil.walk_packages(farandole.__path__, "farandole."):
        if not module.name.endswith(("__main__", "spawned")):  # those do something
            importlib.import_module(module.name)
    parents = {"FarandoleError": ""}
    to_visit: list[type[FarandoleError]] = [FarandoleError]
    while to_visit:
        parent = to_visit.pop()
        for error in parent.__subclasses__():
            if error.__module__.startswith("farandole."):
                parents[error.__name__] = parent.__name__
                to_visit.append(error)
    return parents


def test_the_drawing_is_the_tree() -> None:
    assert drawn() == real()
