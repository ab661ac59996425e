"""The page that describes the house draws all of it: each module of each room, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import farandole

PACKAGE = Path(farandole.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "design.md"


def drawn(page: str) -> dict[str, set[str]]:
    """The words that the drawing has beside each room's name."""
    [drawing] = re.findall(r"## The house.*?```\n(.*?)```", page, re.DOTALL)
    rooms: dict[str, set[str]] = {}
    room = ""
    for line in drawing.splitlines():
        if begins := re.match(r"(\w+)(/?)", line):
            room = begins[1] if begins[2] else ""
        if room:
            rooms.setdefault(room, set()).update(re.findall(r"\w+", line))
    return rooms


def built() -> dict[str, set[str]]:
    """The modules and packages in each room."""
    rooms = [folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]
    return {
        room.name: {path.stem for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        - {"__init__"}
        for room in rooms
    }


def test_the_page_draws_the_house_as_it_is() -> None:
    page = drawn(PAGE.read_text())
    assert set(page) == set(built())
    for room, modules in built().items():
        assert modules <= page[room], f"docs/design.md does not draw {sorted(modules - page[room])} in {room}/"


def test_a_module_that_is_not_drawn_is_missed() -> None:
    page = "## The house\n```\nplan/   tree, batch\n        rules\nrun.py  the face\n```\n"
    assert drawn(page) == {"plan": {"plan", "tree", "batch", "rules"}}
