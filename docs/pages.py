"""Hook of mkdocs (`mkdocs.yml`): pages of the site that are not files of docs/.

- README.md is the first page. Other files of the repository that a page links to (CONTRIBUTING.md, examples/port.md,
  pictures of experiments) come along at their own place, so links in the pages are those of the repository.
- Pages of the reference are made from the code by `docs/reference.py`.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {
    "reference/api.md": "api",
    "reference/commands.md": "command_line",
    "reference/events.md": "event_table",
    "reference/failures.md": "failure_table",
}
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def address(path: str) -> str:
    """The place in the site of a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def linked(text: str, path: str) -> set[str]:
    """The files of the repository that the page at `path` links to."""
    targets = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2])) for link in LINK.finditer(text)}
    return {target for target in targets if (ROOT / target).is_file()}


def moved(text: str, path: str) -> str:
    """The page at `path` of the repository, with its links as the site has them."""

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2]))
        if not (ROOT / target).is_file():
            return link[0]
        here = posixpath.dirname(address(path)) or "."
        return link[1] + posixpath.relpath(address(target), here) + link[3]

    return LINK.sub(replace, text)


def on_files(files: Files, config: Any) -> Files:
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    from docs import reference

    for place, maker in GENERATED.items():
        files.append(File.generated(config, place, content=getattr(reference, maker)()))
    waiting = [*ALWAYS, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None)]
    known = {*waiting}
    for path in waiting:
        found = linked((ROOT / path).read_text(), path) - known if path.endswith(".md") else set[str]()
        waiting += sorted(found)
        known |= found
        if not path.startswith("docs/"):
            files.append(File.generated(config, address(path), abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    if place in GENERATED:
        return markdown
    outside = page.file.generated_by is not None
    return moved(markdown, "README.md" if place == "index.md" else place if outside else f"docs/{place}")
