"""Every event: written somewhere, read back as it was, and told in words."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import farandole
from farandole.observe.text import describe
from farandole.protocol import events
from farandole.protocol.events import Recorded
from farandole.protocol.metrics import as_written, parse_line
from tests.support.metric_lines import KINDS, PLAUSIBLE, an

SOURCES = [path for path in Path(farandole.__file__).parent.rglob("*.py") if path.parent.name != "events"]
EVERY = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def everything(kind: type[Recorded]) -> Recorded:
    """With each field, also those that are rare."""
    rare = {f.name: not f.default if isinstance(f.default, bool) else 2.5 if isinstance(f.default, float)
            else 2 if isinstance(f.default, int) else ("w3",) if isinstance(f.default, tuple)
            else "redo" if f.name == "outcome" else "why"
            for f in msgspec.structs.fields(kind) if not f.required and f.name != "time"}  # fmt: skip
    return an(kind, **rare)


def test_there_are_no_others() -> None:
    assert set(get_args(events.Event)) == set(Recorded.__subclasses__())
    assert len(KINDS) == len(get_args(events.Event)) > 50, "each has a name of its own"


@EVERY
def test_what_is_written_is_read_back(kind: type[Recorded]) -> None:
    for event in (an(kind), everything(kind)):
        line = as_written(event)  # type: ignore[arg-type]
        assert parse_line(line) == event
        assert type(parse_line(line)) is kind
        told = json.loads(line)
        assert list(told) == ["event", "time", *events.fields_of(event)], "who it is and when come first"
        assert events.restored(told) == event, "from the journal's row"


@EVERY
def test_each_field_says_something(kind: type[Recorded]) -> None:
    """A line without one of those that are always there is damaged, and so is one with more."""
    told = json.loads(as_written(an(kind)))  # type: ignore[arg-type]
    for name in told:
        fewer = {k: v for k, v in told.items() if k != name}
        assert parse_line(json.dumps(fewer).encode()) is None, name
    assert parse_line(json.dumps({**told, "another": 1}).encode()) is None


@EVERY
def test_an_event_is_built_by_names_and_stays_as_it_is(kind: type[Recorded]) -> None:
    event = an(kind)
    with pytest.raises(AttributeError):
        event.time = 5.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        kind(9.0, *(PLAUSIBLE[kind.__annotations__[f.name]] for f in msgspec.structs.fields(kind)[1:] if f.required))
    with pytest.raises(TypeError):
        kind(time=9.0)


@EVERY
def test_every_event_has_its_words(kind: type[Recorded]) -> None:
    """Not those of another: most of what it says of others is in them."""
    for event in (an(kind), everything(kind)):
        words = describe(event)  # type: ignore[arg-type]
        assert words, "it says something"
        assert words.isprintable()
    assert describe(an(kind)) not in [describe(an(other)) for other in KINDS.values() if other is not kind]


def made_by_name() -> set[str]:
    """The events that the package makes: `events.NAME(...)`, or NAME imported from there."""
    found: set[str] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                 and node.module == "farandole.protocol.events" for alias in node.names}  # fmt: skip
        patterns = {id(node.cls) for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and id(node.func) not in patterns:
                match node.func:
                    case ast.Attribute(value=ast.Name(id="events"), attr=name):
                        found.add(name)
                    case ast.Name(id=name) if name in names:
                        found.add(name)
                    case _:
                        pass
    return found


def test_every_event_is_written_somewhere() -> None:
    assert {kind.__name__ for kind in KINDS.values()} <= made_by_name()


WRITERS = ("record", "_record", "_event", "_once")


def test_no_event_is_written_or_read_by_its_name() -> None:
    """Names are for files and people: nobody writes one down, and nobody looks at a line's key `event`."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            strings: list[ast.expr] = []
            match node:
                case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in WRITERS:
                    strings = [each for each in node.args if isinstance(each, ast.Constant | ast.JoinedStr)]
                case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]) | ast.Subscript(slice=key):
                    strings = [key] if isinstance(key, ast.Constant) and key.value == "event" else []
                case ast.MatchMapping():
                    strings = [key for key in node.keys if isinstance(key, ast.Constant) and key.value == "event"]
                case _:
                    pass
            assert not strings, f"{path.name}, line {strings[0].lineno}: {ast.unparse(strings[0])}"
