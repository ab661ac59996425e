"""The page, put together of its files: markup, styles, and scripts (uPlot among them)."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

FILES = Path(__file__).parent
STYLES = ("uPlot.min.css", "page.css")
PICTURES = ("uPlot.iife.min.js", "charts.js")
LIVE = (*PICTURES, "page.js", "act.js")
FROZEN = (*PICTURES, "frozen.js", "page.js")


@cache
def part(name: str) -> str:
    """One of the page's files."""
    return (FILES / name).read_text(encoding="utf-8")


def live() -> str:
    """The dashboard's page, which asks for its parts by their names."""
    styles = "".join(f'<link rel="stylesheet" href="{name}">\n' for name in STYLES)
    return _page(styles, "".join(f'<script src="{name}"></script>\n' for name in LIVE))


def frozen(content: str) -> str:
    """A page with everything in it, that asks for nothing. `content`: JSON, a list of {"tick", "about"}.

    No script but its own is executed, whatever the content holds, and no address is asked: its policy says so.
    """
    styles = [part(name) for name in STYLES]
    scripts = [part(name) for name in FROZEN]
    policy = f"default-src 'none'; style-src {' '.join(map(_hash, styles))}; script-src {' '.join(map(_hash, scripts))}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head += "".join(f"<style>{style}</style>\n" for style in styles)
    safe = content.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    body = f'<script type="application/json" id="content">{safe}</script>\n'
    return _page(head, body + "".join(f"<script>{script}</script>\n" for script in scripts))


def _page(head: str, body: str) -> str:
    before, _, rest = part("page.html").partition("{{head}}")
    between, _, after = rest.partition("{{body}}")
    return before + head + between + body + after


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
