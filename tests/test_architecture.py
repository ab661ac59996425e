"""The house as a test: imports point down, the pure parts are pure, what needs no torch has none, what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole
from tests.support.every import every
from tests.support.imports import PACKAGE, circle, imports

FILES = sorted(PACKAGE.rglob("*.py"))

# From the top down. A room may import from itself and from those below it.
LEVELS = [
    {"cli", "bench", "check", "integrations", "__main__"},
    {"simulate", "market"},
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
    {"numerics"},
    {"protocol"},
    {"plan"},
    {"code"},
    {"settings"},
    {"run_options"},
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


# A coordinator's host, or that of who only looks at a run, may have none of HEAVY.
WITHOUT_TORCH = {
    *("cli", "integrations", "simulate", "observe", "pool", "coordinator", "control", "protocol", "plan", "platform"),
}
HEAVY = {"torch", "numpy", "torchmetrics"}

# The Trainer of transformers and the strategy of Lightning are classes of a training script: they need torch.
OF_SCRIPTS = {"integrations/transformers.py", "integrations/lightning.py"}

# Who starts a process by the public command, as a person may: its interface is words, not names.
STARTS_BY_COMMAND = {
    "pool/local.py",
    "pool/ssh.py",
    "pool/agent.py",
    "pool/ec2.py",
    "integrations/ray.py",
}


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def package(path: Path) -> str:
    return ".".join(("farandole", *path.relative_to(PACKAGE).parts[:-1]))


def imported(path: Path) -> Iterator[str]:
    return (found.module for found in imports(path.read_text(), package(path)))


def upward(source: str, path: Path) -> Iterator[str]:
    """What the text `source` of the module at `path` has of the packages above it."""
    mine = part(path)
    assert mine in LEVEL, f"{mine} has no level: add it to CONTRIBUTING.md and here"
    for found in imports(source, package(path)):
        if not found.module.startswith("farandole."):
            continue
        other = found.module.split(".")[1]
        assert other in LEVEL, f"{found.module}: {other} has no place in the house"
        if LEVEL[other] < LEVEL[mine] and not (other == "__main__" and name(path) in STARTS_BY_COMMAND):
            yield f"{name(path)}, line {found.line}: {found.module} lies above {mine}"


@every(FILES)
def test_imports_point_down(path: Path) -> None:
    if path != PACKAGE / "__init__.py":  # the public surface names its homes
        assert not [*upward(path.read_text(), path)]


FORMS = [
    "import farandole.run",
    "import farandole.run as face",
    "from farandole.run import Run",
    "from farandole import run",
    "from farandole import Run",
    "from farandole import *",
    "import farandole; farandole.Run",
    "import farandole; farandole.run.Run",
    "from .. import run",
    "from ..run import Run",
    "def late():\n    from farandole.run import Run",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from farandole.run import Run",
    "import typing\nif typing.TYPE_CHECKING:\n    from farandole.run import Run",
    "try:\n    from farandole.run import Run\nexcept ImportError:\n    pass",
    "import importlib\nimportlib.import_module('farandole.run')",
    "from importlib import import_module\nimport_module('..run', 'farandole.control')",
    "from importlib import import_module\nimport_module('..run', package='farandole.control')",
    "__import__('farandole.run')",
    "import runpy\nrunpy.run_module('farandole.run')",
    "[sys.executable, '-m', 'farandole.run']",
    "f'{sys.executable} -m farandole.run'",
    "subprocess.run('python', '-m', 'farandole')",
    "subprocess.run([sys.executable, '-m', 'farandole', 'status'])",
    "command = 'python -m farandole status'",
    "[sys.executable, '-c', 'import farandole.run; farandole.run.Run()']",
    "sys.modules['farandole.run']",
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_import_is_seen(form: str) -> None:
    path = PACKAGE / "control" / "planted.py"
    (found,) = {*upward(form, path)} if "*" not in form else {next(upward(form, path))}
    assert "farandole.run lies above" in found or "farandole.__main__ lies above" in found or "*" in form
    assert not [*upward(form, PACKAGE / "cli" / "planted.py")], "from the top everything is below"


@pytest.mark.parametrize("form", ["importlib.import_module(name)", "__import__(f'farandole.{name}')"])
def test_what_is_loaded_can_be_read(form: str) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        [*upward(form, PACKAGE / "control" / "planted.py")]


def test_what_is_no_import_is_none() -> None:
    for text in ('"""See farandole.run."""', "'call farandole.join() first'", "logging.getLogger(__name__)", "'-m'"):
        assert not [*upward(text, PACKAGE / "control" / "planted.py")], text


def test_there_is_no_import_circle() -> None:
    graph = {
        "farandole." + name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): {
            found.module for found in imports(path.read_text(), package(path)) if found.executed
        }
        for path in FILES
        if path != PACKAGE / "__init__.py"
    }
    assert not circle(graph)
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == "b -> d -> b"


@every(p for p in FILES if part(p) in ("protocol", "plan"))
def test_the_pure_parts_have_no_torch_clock_thread_or_io(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported(path)} & IMPURE
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"open", "print", "input"}


LIGHT = [path for path in FILES if part(path) in WITHOUT_TORCH and name(path) not in OF_SCRIPTS]

# The interpreter of a host on which none of `sys.argv[1]` is installed imports all other arguments.
BARE = """
import importlib, sys
missing = set(sys.argv[1].split(","))
class Missing:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
sys.meta_path.insert(0, Missing())
for module in sys.argv[2:]:
    importlib.import_module(module)
    print(module)
"""


def bare(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, ",".join(sorted(HEAVY)), *modules]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@every(LIGHT)
def test_these_rooms_do_not_name_torch(path: Path) -> None:
    """Nor late, within a function: what they need of it they get from the room below whose matter it is."""
    assert not {module.split(".")[0] for module in imported(path)} & HEAVY


def test_these_rooms_are_imported_without_torch_installed() -> None:
    modules = [
        ".".join(("farandole", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in LIGHT
        if path.stem != "__main__"
    ]
    done = bare(*modules)
    assert done.stdout.split() == modules, done.stderr
    assert done.returncode == 0
    assert "No module named 'torch'" in bare("farandole.run").stderr, "there is none in that interpreter"


def test_a_public_class_name_stands_for_one_thing() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    named = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in named.items() if times > 1] == []


def test_the_public_surface() -> None:
    assert set(farandole.__all__) == {
        "AdaScale", "FarandoleError", "GlobalBatch", "LinearScaling", "MDS", "MomentumCompensation",
        "Normalize", "PerWorkerBatch", "RandomResizedCrop", "RateInBuffer", "Resize", "Run", "ShardedImages",
        "SquareRoot", "Step", "Synthetic", "Table", "Tokens", "WebDataset", "__version__", "join",
    }  # fmt: skip
    for public in farandole.__all__:
        assert getattr(farandole, public) is not None
    with pytest.raises(AttributeError, match="Joint"):
        _ = farandole.Joint


@every(p for p in FILES if part(p) != "settings")
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
        ("farandole.cli.commands", {"torch", "numpy", "aiohttp"}),
        ("farandole.code.snapshot", {"torch", "numpy", "aiohttp"}),
        ("farandole.coordinator.process", {"torch", "numpy"}),
        ("farandole.protocol.coordinator.coordinator", {"torch", "numpy", "aiohttp"}),
        ("farandole.run", {"torchmetrics"}),
    ],
)
def test_what_need_not_wait_for_torch_does_not(module: str, heavy: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(loaded)
