"""The design's section 4 as a test: imports point down, the pure parts are pure, the public surface is what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole

PACKAGE = Path(farandole.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 350

# From the top down. A room may import from itself and from those below it.
LEVELS = [
    {"cli", "__main__"},
    {"simulate"},
    {"observe"},
    {"pool"},
    {"script"},
    {"joining"},
    {"run"},
    {"evaluation"},
    {"training"},
    {"worker"},
    {"coordinator"},
    {"control"},
    {"checkpoint"},
    {"data"},
    {"collective"},
    {"membership"},
    {"plan"},
    {"code"},
    {"settings"},
    {"platform"},
    {"errors"},
]
LEVEL = {part: depth for depth, parts in enumerate(LEVELS) for part in parts}

IMPURE = {
    "torch",
    "time",
    "threading",
    "asyncio",
    "socket",
    "os",
    "random",
    "datetime",
    "multiprocessing",
    "subprocess",
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, *, runtime_only: bool = False) -> Iterator[str]:
    """Full names of the modules that a file imports, wherever in it."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if runtime_only and id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else str(node.module)


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent / dotted.replace(".", "/")
    return dotted.startswith("farandole.") and (path.is_dir() or path.with_suffix(".py").exists())


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_down(path: Path) -> None:
    mine = part(path)
    if mine == "__init__":
        return  # the public surface names its homes
    assert mine in LEVEL, f"{mine} has no place in the house: add it to the design's section 4 and here"
    for module in imported(path):
        if not module.startswith("farandole."):
            continue
        other = module.split(".")[1]
        assert other in LEVEL, f"{module}: {other} has no place in the house"
        assert LEVEL[other] >= LEVEL[mine], f"{name(path)} imports {module}, which lies above {mine}"


def test_there_is_no_import_cycle() -> None:
    graph = {
        "farandole." + name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): {
            module for module in imported(path, runtime_only=True) if module.startswith("farandole.")
        }
        for path in FILES
        if path != PACKAGE / "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for inner in sorted(graph.get(module, ())):
                visit(inner, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in ("membership", "plan")], ids=name)
def test_the_pure_parts_have_no_torch_clock_thread_or_io(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported(path)} & IMPURE
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input"}


def test_the_public_surface() -> None:
    assert set(farandole.__all__) == {
        "AdaScale",
        "FarandoleError",
        "GlobalBatch",
        "LinearScaling",
        "MomentumCompensation",
        "PerWorkerBatch",
        "RateInBuffer",
        "Run",
        "ShardedImages",
        "SquareRoot",
        "Step",
        "Synthetic",
        "__version__",
        "join",
    }
    for public in farandole.__all__:
        assert getattr(farandole, public) is not None
    with pytest.raises(AttributeError, match="no attribute 'Joint'"):
        _ = farandole.Joint


@pytest.mark.parametrize("path", [p for p in FILES if part(p) != "settings"], ids=name)
def test_only_settings_reads_our_variables(path: Path) -> None:
    """Writing one for a child process, as pools do, is not reading."""
    for node in ast.walk(ast.parse(path.read_text())):
        reads = (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and isinstance(node.slice, ast.Constant)
            and str(node.slice.value).startswith("FARANDOLE_")
        )
        asks = isinstance(node, ast.Call) and any(
            isinstance(a, ast.Constant) and str(a.value).startswith("FARANDOLE_") for a in node.args
        )
        found = reads or asks
        assert not found, f"{name(path)}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("farandole", {"torch", "numpy", "aiohttp"}),
        ("farandole.cli", {"torch", "numpy", "aiohttp"}),
        ("farandole.coordinator.process", {"torch", "numpy"}),
        ("farandole.membership.coordinator", {"torch", "numpy", "aiohttp"}),
        ("farandole.run", {"torchmetrics"}),
    ],
)
def test_what_need_not_wait_for_torch_does_not(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(loaded)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_file_is_one_that_a_reader_dreads(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= LONGEST, f"{name(path)} has {lines} lines"


@pytest.mark.parametrize("path", [p for p in FILES if p.read_text().strip()], ids=name)
def test_every_module_opens_by_saying_what_it_does(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_files_and_folders_are_nouns_of_the_field() -> None:
    words = {word for path in FILES for word in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not words & {"utils", "util", "common", "helpers", "manager", "misc"}
