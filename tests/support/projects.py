"""Projects to be packed, for the tests of `farandole.code`."""

from __future__ import annotations

import gzip
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

from farandole.code import pack
from farandole.code.pack import Pack


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


def project(place: Path) -> Path:
    return put(place / "project", {"train.py": "import lib.a\n", "lib/a.py": "A = 1\n", "data/big": "1" * 50})


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def packed(folder: Path, listed: Path | None = None) -> Pack:
    return pack.pack(folder, str(folder / "train.py"), listed)


def entries(content: bytes) -> dict[str, tarfile.TarInfo]:
    """What is in a pack."""
    with tarfile.open(fileobj=BytesIO(gzip.decompress(content))) as archive:
        return {entry.name: entry for entry in archive}
