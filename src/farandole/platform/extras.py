"""How to install what an extra of farandole needs ("s3", "images"), as a command that works here.

farandole is on no package index: it is installed from a checkout or from a wheel, and pip notes which.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit


def how_to_install(extra: str, note: str | None = None, package: Path = Path(__file__).parents[1]) -> str:
    """The command. `note`: what pip has written down of the installation (`direct_url.json`), by default of this one;
    `package`: where farandole's modules are.
    """
    url, editable = _origin(_note() if note is None else note)
    path = Path(unquote(urlsplit(url).path))
    checkout = package.parents[1]
    if not url and (checkout / "pyproject.toml").is_file():
        url, path, editable = "file:", checkout, True
    if url.startswith("file:") and path.exists():
        return f"""pip install {"-e " if editable else ""}"{path}[{extra}]\""""
    if url.startswith("http"):
        return f'pip install "farandole[{extra}] @ {url}"'
    return f'pip install "PATH[{extra}]", where PATH is your checkout of farandole or its wheel'


def _note() -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution("farandole").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return ""


def _origin(note: str) -> tuple[str, bool]:
    """Where farandole was installed from, "" if that is not known; and whether in place."""
    try:
        found = json.loads(note)
        return str(found["url"]), bool(found.get("dir_info", {}).get("editable"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", False
