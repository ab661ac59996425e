"""Writes all texts that a user may read into one file, to read them in one go: help, errors, events.

    python docs/texts.py [FILE]      # texts.txt

Help is printed as a user sees it. Errors are read from the source, with the expressions in their braces. Events are the
sentences of `observe/text.py` for plausible values.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "farandole"
WIDTH = 120


def main() -> None:
    os.environ["COLUMNS"] = str(WIDTH)
    sys.path.insert(0, str(ROOT))
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "texts.txt")
    parts = {"Help": help_texts(), "Errors": errors(), "Events": events()}
    text = "".join(
        f"{'=' * WIDTH}\n{title}\n{'=' * WIDTH}\n\n{chr(10).join(lines)}\n\n" for title, lines in parts.items()
    )
    place.write_text(text)
    print(f"{place}: {len(text.splitlines())} lines")


def help_texts() -> Iterator[str]:
    from farandole.cli.commands import command

    waiting: list[list[str]] = [[]]
    while waiting:
        words = waiting.pop(0)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            command([*words, "--help"], prog_name="farandole")
        yield output.getvalue()
        found: object = command
        for word in words:
            found = getattr(found, "commands", {})[word]
        waiting += [[*words, name] for name in getattr(found, "commands", {})]


def errors() -> Iterator[str]:
    """What is raised with a text, by file and line."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = text_of(node.exc.args[0])
                if text:
                    kind = ast.unparse(node.exc.func)
                    yield f"{path.relative_to(SOURCE)}:{node.lineno} {kind}\n    {text}"


def text_of(node: ast.expr) -> str:
    """A literal's text, with `{expression}` where a value stands; "" for what is no text."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else inner(part)
                for part in values
            )
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
        case _:
            return ""


def inner(part: ast.expr) -> str:
    return "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else ""


def events() -> Iterator[str]:
    from farandole.observe.text import describe
    from tests.support.metric_lines import KINDS, an

    for name, kind in sorted(KINDS.items()):
        yield f"{name}\n    {describe(an(kind))}"


if __name__ == "__main__":
    main()
