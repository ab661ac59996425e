"""The command that installs the packages of an extra of farandole ("s3", "images") in this environment.

farandole is on no package index: it is installed from a checkout or from a wheel, and pip records which.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from farandole.errors import UsageError


def compresses(codec: str) -> bool:
    """Return True if the `--codec` of this name compresses, always or where that saves time."""
    return codec.split("+")[-1] in ("zstd", "auto")


def require_zstd(codec: str) -> None:
    """Raise `UsageError` if `codec` compresses and the package for that is not installed here."""
    if compresses(codec) and importlib.util.find_spec("zstandard") is None:
        raise UsageError(f"--codec {codec} needs the package zstandard on every worker: {how_to_install('zstd')}")


def check_version(package: str, version: str, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Raise UsageError if `version` of `package` is not supported by farandole."""
    try:
        number = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        number = (0, 0)
    if not oldest <= number <= newest:
        first, last = (".".join(map(str, limit)) for limit in (oldest, newest))
        raise UsageError(
            f"{package} {version} is not supported, farandole takes {first} to {last}: {how_to_install(package)}"
        )


def how_to_install(extra: str, note: str | None = None, package: Path = Path(__file__).parents[1]) -> str:
    """The install command. `note`: pip's record of the installation (`direct_url.json`), by default that of this one;
    `package`: the folder of farandole's modules.
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
    """The URL from which farandole was installed, "" if unknown; and True if it is an editable installation."""
    try:
        record = json.loads(note)
        return str(record["url"]), bool(record.get("dir_info", {}).get("editable"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", False
