"""The commands and scripts that the pages show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for place in ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/*.md") for page in ROOT.glob(place)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str | None = None) -> list[str]:
    """The blocks of code in the text of a page, in their order. `language`: only those of this one; "" for commands."""
    return [text for of, text in BLOCK.findall(page) if language in (None, of)]


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command in the page's blocks, without `farandole` itself."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.search(r"(?:^|\s)farandole ([a-z].*)", line):
                words = shlex.split(command[1], comments=True)
                yield [word for word in words if word not in ("&", "\\")]


def block_with(page: Path, words: str, language: str | None = None) -> str:
    """The one block of a page with these words."""
    [found] = [text for text in blocks(page.read_text(), language) if words in text]
    return found


def changed(text: str, changes: Mapping[str, str]) -> str:
    """The text with each key replaced by its value. Each key must be there."""
    for old, new in changes.items():
        assert old in text, f"{old} is not in {text}"
        text = text.replace(old, new)
    return text


def readme_script() -> str:
    """The complete script of the README."""
    return block_with(ROOT / "README.md", "farandole.join()", "python")
