"""Pointers between docs/protocol.md, docs/internals.md with its drawings, and the code: each names what exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import farandole
from docs import drawings

SRC = Path(farandole.__file__).parent
REPOSITORY = Path(__file__).parent.parent
PROTOCOL = (REPOSITORY / "docs" / "protocol.md").read_text()
INTERNALS = (REPOSITORY / "docs" / "internals.md").read_text()
SOURCES = sorted(SRC.rglob("*.py"))
TESTS = sorted(path for path in (REPOSITORY / "tests").rglob("*.py") if path != Path(__file__))
TEXTS = [*SOURCES, *TESTS, *sorted((REPOSITORY / "docs").glob("*.md"))]
FOREIGN = {"optimizer", "step", "farandole", "ProcessGroup"}  # of torch, the user's script and the shell

# --- names ------------------------------------------------------------------------------------------------------------


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _defined(body: list[ast.stmt]) -> set[str]:
    """Names that a module or class body defines itself."""
    names = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return names | {target.id for node in body for target in _targets(node) if isinstance(target, ast.Name)}


def _set_by_methods(node: ast.ClassDef) -> set[str]:
    """Attributes that methods of a class assign to `self`."""
    targets = (target for each in ast.walk(node) if isinstance(each, ast.stmt) for target in _targets(each))
    return {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}


@cache
def names_of(path: Path) -> frozenset[str]:
    """What a file defines: `name`, `Class.attribute`."""
    names = _defined(_tree(path).body)
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each}" for each in _defined(node.body) | _set_by_methods(node)}
    return frozenset(names)


@cache
def _bases() -> dict[str, set[str]]:
    """Names of base classes, by class name."""
    found = defaultdict[str, set[str]](set)
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= {ast.unparse(base) for base in node.bases}
    return found


@cache
def _everywhere() -> frozenset[str]:
    """What any file defines; functions of a module also as `module.function`."""
    names = {name for path in SOURCES for name in names_of(path)}
    return frozenset(names | {f"{path.stem}.{name}" for path in SOURCES for name in names_of(path)})


@cache
def _parts() -> frozenset[str]:
    return frozenset(part for name in _everywhere() for part in name.split("."))


def is_defined(name: str) -> bool:
    """Some file defines `name`: a name, an attribute of a class or its bases, or `module.name`."""
    if name in _everywhere():
        return True
    owner, _, attribute = name.rpartition(".")
    return bool(owner) and any(is_defined(f"{base}.{attribute}") for base in _bases().get(owner, ()))


# --- files and names in the page --------------------------------------------------------------------------------------

QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w/]+\.(?:py|md)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
CODE = re.compile(r"^Code:.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def prose(page: str) -> str:
    """The page without its drawings."""
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL)


def dead_files(page: str) -> list[str]:
    """Quoted files that do not exist: code from `src/farandole/`, tests from the repository, pages in `docs/`."""
    files = [quoted for quoted in QUOTED.findall(page) if FILE.fullmatch(quoted)]
    roots = (SRC, REPOSITORY, REPOSITORY / "docs")
    return [file for file in files if not any((root / file).is_file() for root in roots)]


def dead_names(page: str) -> list[str]:
    """Quoted names that no file defines: `Class`, `Class.attribute`, `module.function`, `a_name`, `A_CONSTANT`."""
    dead: list[str] = []
    for quoted in QUOTED.findall(page):
        name = re.sub(r"\(.*\)$", "", quoted)
        if FILE.fullmatch(name) or not NAME.fullmatch(name) or name.partition(".")[0] in FOREIGN:
            continue
        if "." in name or name[0].isupper():
            dead += [name] if not is_defined(name) else []
        elif "_" in name:
            dead += [name] if name not in _parts() else []
    return dead


def dead_in_code_lines(page: str) -> list[str]:
    """Names in a line `Code: file (name, name)` that this file does not define."""
    dead: list[str] = []
    for line in CODE.findall(page + "\n\n"):
        for file, inside in re.findall(r"`([\w/]+\.py)`\s*\(([^)]*)\)", line):
            path = SRC / file
            dead += [f"{file}: {n}" for n in QUOTED.findall(inside) if path.is_file() and n not in names_of(path)]
    return dead


def test_the_pages_name_files_that_exist() -> None:
    assert not dead_files(PROTOCOL)
    assert not dead_files(INTERNALS)


def test_the_pages_name_what_the_code_defines() -> None:
    assert not dead_names(prose(PROTOCOL))
    assert not dead_names(prose(INTERNALS))


def test_names_of_code_lines_are_in_the_file_beside_them() -> None:
    assert not dead_in_code_lines(PROTOCOL)


def test_dead_files_and_names_of_the_page_are_seen() -> None:
    assert dead_files("`view.py`, `protocol/view.py`, `design.md`, `x.md`") == ["view.py", "x.md"]
    names = (
        "`Session.word`, `Session.end_round`, `plan.checks`, `Gone`, `Stop`, `gone_by`, `become_synced`, `Session.go()`"
    )
    assert dead_names(names) == ["Session.word", "plan.checks", "Gone", "gone_by", "Session.go"]
    assert not dead_names("`Coordinator.record`, `optimizer.step()`, `recovery.decide`")  # of a base; of torch
    line = "Code: `protocol/view.py` (`agreed_switch`, `decide`), `protocol/kept_lines.py`\n(`View`)."
    assert dead_in_code_lines(line) == ["protocol/view.py: decide", "protocol/kept_lines.py: View"]


# --- drawings ---------------------------------------------------------------------------------------------------------


def dead_boxes(drawing: drawings.Drawing) -> list[str]:
    """Boxes whose file does not exist, or does not define the name."""
    return [
        f"{box.file}: {box.name}"
        for box in drawing.boxes
        if not (SRC / box.file).is_file() or box.name not in names_of(SRC / box.file)
    ]


def test_each_box_of_a_drawing_names_a_file_and_what_it_defines() -> None:
    assert [drawing.name for drawing in drawings.DRAWINGS] == ["architecture", "step", "join", "leave", "crash"]
    assert not [dead for drawing in drawings.DRAWINGS for dead in dead_boxes(drawing)]


def test_the_pictures_are_those_of_the_drawings_and_stand_in_the_page() -> None:
    for drawing in drawings.DRAWINGS:
        picture = drawings.svg(drawing)
        assert (drawings.IMAGES / f"{drawing.name}.svg").read_text() == picture, "run python docs/drawings.py"
        assert all(f">{text}</text>" in picture for box in drawing.boxes for text in (box.file, box.name))
        assert f"(images/{drawing.name}.svg)" in INTERNALS


def test_dead_boxes_are_seen() -> None:
    boxes = tuple(
        drawings.Box(column=0, text="", file=file, name=name)
        for file, name in (("run.py", "Run.steps"), ("run.py", "Run.rounds"), ("runs.py", "Run"), ("run.py", "Step"))
    )
    dead = dead_boxes(drawings.Drawing(name="d", columns=("c",), boxes=boxes))
    assert dead == ["run.py: Run.rounds", "runs.py: Run", "run.py: Step"]


# --- sections ---------------------------------------------------------------------------------------------------------


def _sections(page: str) -> dict[str, set[str]]:
    """The numbers of each section: those of its list, and rules such as R1."""
    blocks = re.split(r"(?m)^#{2,3} ", page)[1:]
    found = {block.partition("\n")[0]: block.partition("\n")[2] for block in blocks}
    return {
        heading: set(re.findall(r"(?m)^(\d+)\. ", body)) | set(re.findall(r"(?m)^- \*\*(R\d)", body))
        for heading, body in found.items()
    }


SECTIONS = _sections(PROTOCOL)
HEADING = re.compile("|".join(sorted(map(re.escape, SECTIONS), key=len, reverse=True)))
NUMBER = re.compile(r" (R?\d+)(?:(-| to |, | and )(R?\d+)\b(?! of))?")
BETWEEN = re.compile(r",? and |, ")
POINTER = re.compile(r"protocol\.md[`)]?[,:] (?=[A-Z])")


def flowing(text: str) -> str:
    """The text without line breaks, and without the signs of comments."""
    return re.sub(r"\s*\n\s*(?:#+ )?\s*", " ", text)


def _dead_numbers(heading: str, numbers: re.Match[str] | None) -> list[str]:
    if numbers is None:
        return []
    first, between, last = numbers.groups()
    named = {first, last or first}
    if between in ("-", " to "):
        named = {re.sub(r"\d+", str(n), first) for n in range(int(first.strip("R")), int(last.strip("R")) + 1)}
    return [f"{heading} {number}" for number in sorted(named - SECTIONS[heading])]


def dead_sections(text: str) -> list[str]:
    """Sections and numbers that `text` gives for docs/protocol.md and that are not there."""
    text, dead = flowing(text), list[str]()
    for pointer in POINTER.finditer(text):
        heading = HEADING.match(text, pointer.end())
        if heading is None:
            dead.append(text[pointer.end() : pointer.end() + 30])
        while heading is not None:
            numbers = NUMBER.match(text, heading.end())
            dead += _dead_numbers(heading.group(), numbers)
            between = BETWEEN.match(text, (numbers or heading).end())
            heading = HEADING.match(text, between.end()) if between else None
    return dead


def dead_sections_within(page: str) -> list[str]:
    """Numbered sections that the page itself refers to and that it does not have."""
    text = flowing(prose(page))
    return [
        dead
        for heading in HEADING.finditer(text)
        if text[heading.start() - 2 : heading.start()] != "# "
        for dead in _dead_numbers(heading.group(), NUMBER.match(text, heading.end()))
    ]


def test_sections_that_are_pointed_to_exist() -> None:
    dead = {str(path.relative_to(REPOSITORY)): dead_sections(path.read_text()) for path in TEXTS}
    assert not {path: sections for path, sections in dead.items() if sections}


def test_the_page_points_to_sections_of_its_own() -> None:
    assert not dead_sections_within(PROTOCOL)


def test_dead_sections_are_seen() -> None:
    assert dead_sections("See docs/protocol.md, Gone 1.")
    assert dead_sections("# See docs/protocol.md, Reconnection\n# and the lease 99") == [
        "Reconnection and the lease 99"
    ]
    assert dead_sections("docs/protocol.md: Rules R1-R4, Drift 7, and Gone.") == ["Rules R4", "Drift 7"]
    assert dead_sections("[protocol.md](protocol.md), Accusations 2 and 77; `protocol.md`, Admission 1")
    assert not dead_sections("See docs/protocol.md, Recovery 1-5, and docs/protocol.md: Session 1 to 7, and Pools.")
    assert dead_sections_within("as (Recovery 2 and 88)") == ["Recovery 88"]


# --- files that comments name -----------------------------------------------------------------------------------------


def dead_comments(text: str, folder: Path) -> list[str]:
    """Quoted files that do not exist: a name alone is in `folder` or `SRC`, a path begins there or in the repository.

    Also numbers of files, which have none.
    """
    dead: list[str] = []
    for file in re.findall(r"`([\w/]+\.py)`", text):
        roots = (SRC, REPOSITORY) if "/" in file else (folder, SRC)
        dead += [] if any((root / file).is_file() for root in roots) else [file]
    return dead + re.findall(r"`[\w/]+\.py`, \d", text)


def test_files_that_the_code_names_exist() -> None:
    dead = {str(path.relative_to(SRC)): dead_comments(path.read_text(), path.parent) for path in SOURCES}
    assert not {path: files for path, files in dead.items() if files}


def test_dead_files_of_comments_are_seen() -> None:
    here = SRC / "protocol" / "coordinator"
    names = "`failure_detector.py`, `coordinator/state.py`, `state.py`"
    assert dead_comments(names, here) == ["failure_detector.py", "coordinator/state.py"]
    assert dead_comments("`coordinator/state.py`", here.parent) == ["coordinator/state.py"]
    assert dead_comments("see `recovery.py`, 3", here) == ["`recovery.py`, 3"]
    assert not dead_comments("`recovery.py`, `protocol/view.py`, `tests/test_pointers.py`", here)
