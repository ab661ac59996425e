"""What a module of farandole brings in, in whatever form: read from its syntax tree, never executed.

    import a.b                          from a import b                     from . import b
    import farandole; farandole.a.b     from farandole import join          importlib.import_module("a.b"), __import__
    [sys.executable, "-m", "a.b"]       "-c" and a program that names a.b   anything else whose text names a module

Within functions and under TYPE_CHECKING as well. So each string is read but docstrings, whatever it is handed to. What
a loader is handed that is no constant text can't be read, and is an error. Loggers are to be named by `__name__`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import farandole

PACKAGE = Path(farandole.__file__).parent
HOMES: dict[str, str] = farandole._HOMES
_DOTTED = re.compile(r"\bfarandole(?:\.\w+)+")
_COMMAND = re.compile(r"-m farandole(?![.\w])")
_LOADERS = {"import_module", "__import__", "run_module", "resolve_name"}
TOLD = {
    "importlib.import_module(module)",  # the fork server's command line says what; `pool/local.py` names it
    "importlib.import_module(package)",  # a package of the user's script; `code/snapshot.py`
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """`module` is brought in, `module` being its full name. `executed`: by this module, when it runs.

    Not so under TYPE_CHECKING, nor where a text names it, which starts a process or asks for it by another way.
    """

    module: str
    line: int
    executed: bool = True


@functools.cache
def imports(source: str, package: str) -> tuple[Import, ...]:
    """All of the text `source` of a module in `package`, the full name of its room.

    Raises:
        ValueError: something is loaded whose name is not constant text.
    """
    return tuple(_imports(source, package))


def _imports(source: str, package: str) -> Iterator[Import]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        line, executed = getattr(node, "lineno", 0), id(node) not in typing_only
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name, line=line, executed=executed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for name in _from(node, package):
                yield Import(module=name, line=line, executed=executed)
        elif isinstance(node, ast.Attribute) and not isinstance(node.parent, ast.Attribute):
            if (name := _longest(ast.unparse(node), HOMES)) is not None:
                yield Import(module=name, line=line, executed=executed)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not _is_docstring(node):
            for found in _DOTTED.findall(node.value):
                if (name := _longest(found, {})) is not None:  # public names are talked of, in errors
                    yield Import(module=name, line=line, executed=_is_loaded(node))
            if _COMMAND.search(node.value) or (node.value == "farandole" and _follows_m(node)):
                yield Import(module="farandole.__main__", line=line, executed=False)
        elif isinstance(node, ast.Call) and _callee(node) in _LOADERS:
            if ast.unparse(node) in TOLD:
                continue
            if not node.args or not isinstance(node.args[0], ast.Constant):
                raise ValueError(f"line {line}: what {ast.unparse(node)} loads can't be read from it")
            anchor = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "package")]
            above = str(anchor[0].value) if anchor and isinstance(anchor[0], ast.Constant) else package
            yield Import(module=_absolute(str(node.args[0].value), above), line=line, executed=executed)


@functools.cache
def is_module(dotted: str) -> bool:
    """Whether `dotted` is a module or a room of the package."""
    path = PACKAGE.parent / dotted.replace(".", "/")
    return dotted.startswith("farandole.") and (path.is_dir() or path.with_suffix(".py").exists())


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = _absolute("." * node.level + (node.module or ""), package)
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        if base == "farandole" and alias.name == "*":
            yield from (f"farandole.{home}" for home in HOMES.values())
        elif base == "farandole" and alias.name in HOMES:
            yield f"farandole.{HOMES[alias.name]}"
        else:
            yield inner if is_module(inner) else base


def _absolute(name: str, package: str) -> str:
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    above = package.split(".")
    return ".".join([*above[: len(above) - level + 1], *filter(None, [name[level:]])])


def _longest(dotted: str, homes: dict[str, str]) -> str | None:
    """The module of farandole that `dotted` begins with, or which of `homes` its public name has."""
    parts = dotted.split(".")
    if parts[0] != "farandole":
        return None
    if len(parts) > 1 and parts[1] in homes:
        return f"farandole.{homes[parts[1]]}"
    for length in range(len(parts), 1, -1):
        if is_module(".".join(parts[:length])):
            return ".".join(parts[:length])
    return None


def _callee(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[-1]


def _is_loaded(node: ast.AST) -> bool:
    call = node.parent  # type: ignore[attr-defined]
    return isinstance(call, ast.Call) and _callee(call) in _LOADERS


def _follows_m(node: ast.Constant) -> bool:
    around = node.parent  # type: ignore[attr-defined]
    words = getattr(around, "elts", None) or getattr(around, "args", [])
    at = words.index(node) if node in words else 0
    return at > 0 and isinstance(words[at - 1], ast.Constant) and words[at - 1].value == "-m"


def _is_docstring(node: ast.Constant) -> bool:
    return isinstance(node.parent, ast.Expr)  # type: ignore[attr-defined]


def circle(graph: dict[str, set[str]]) -> str:
    """A circle of modules, if there is one: `a -> b -> a`."""
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> str:
        if module in above:
            return " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for inner in sorted(graph.get(module, ())):
                if found := visit(inner, (*above, module)):
                    return found
            done.add(module)
        return ""

    return next(filter(None, (visit(module, ()) for module in sorted(graph))), "")
