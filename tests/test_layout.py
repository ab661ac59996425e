"""How the tests lie: in folders that mirror the package's rooms; and what two of them share lies in `tests/support/`.

A test file that imports another one can't be moved, split or run by itself without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole

TESTS = Path(__file__).parent
ROOMS = {path.name for path in Path(farandole.__file__).parent.iterdir() if path.is_dir()}
OF_THEIR_OWN = {"system", "support", "jobs", "fuzz", "experiments", "cuda", "docker"}
FILES = sorted(TESTS.rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Full names of all that a file imports, wherever in it; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_tests(source: str) -> set[str]:
    """Test files that a file imports; a function that is called test_ is no file."""
    return {
        module
        for module in imported(source)
        if (TESTS.parent / module.replace(".", "/")).with_suffix(".py").exists()
        and module.rpartition(".")[2].startswith("test_")
    }


def test_no_file_imports_a_test_file() -> None:
    found = {str(path.relative_to(TESTS)): imported_tests(path.read_text()) for path in FILES}
    assert not {path: tests for path, tests in found.items() if tests}, "what two tests share lies in tests/support/"


@pytest.mark.parametrize(
    "line",
    ["from tests.data.test_loader import keys", "from tests.data import test_loader", "import tests.data.test_loader"],
)
def test_an_import_of_a_test_file_would_be_seen(line: str) -> None:
    assert imported_tests(f"def f():\n    {line}") == {"tests.data.test_loader"}


def test_every_folder_is_a_room_of_the_package_or_says_what_it_is() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in FILES if path.parent != TESTS}
    assert folders <= ROOMS | OF_THEIR_OWN


def without_gpu_mark(source: str) -> list[str]:
    """Tests that neither the module's mark nor their own make depend on a GPU."""

    def marked(*expressions: ast.expr) -> bool:
        names = {node.id for each in expressions for node in ast.walk(each) if isinstance(node, ast.Name)}
        return not names.isdisjoint({"NEEDS_GPU", "ON_EACH"})

    body = ast.parse(source).body
    if any(
        isinstance(node, ast.Assign) and ast.unparse(node).startswith("pytestmark") and marked(node.value)
        for node in body
    ):
        return []
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [test.name for test in tests if not marked(*test.decorator_list)]


def test_all_that_needs_a_gpu_says_so_in_the_same_way() -> None:
    files = sorted((TESTS / "cuda").glob("test_*.py"))
    assert files
    assert not {path.name: tests for path in files if (tests := without_gpu_mark(path.read_text()))}
    assert without_gpu_mark("@ON_EACH\ndef test_a(): pass\n@pytest.mark.slow\ndef test_b(): pass") == ["test_b"]
