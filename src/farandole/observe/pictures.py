"""A report's pictures as PNG files, drawn by a Chromium that is installed here: the same code that draws the page."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from farandole.errors import UsageError
from farandole.observe.report import Told

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
QUIET = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=2",
)  # fmt: skip
AS_ROOT = ("--no-sandbox",)  # it does not start else; the page is our own
LIMIT_S = 60.0
WIDE, HIGH = 900, 340


def draw(page: Path, folder: Path, runs: Sequence[Told]) -> Iterator[Path]:
    """Each picture of the report at `page`, in `folder`, one after the other.

    Raises:
        UsageError: there is no browser that can, or it fails.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UsageError(
            f"--png {folder}: Chromium or Chrome draws the pictures, and none of {', '.join(BROWSERS)} is on the PATH; "
            f"install one (apt install chromium), or save them from the report"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names(runs):
        path = (folder / f"{name.replace('/', '-')}.png").resolve()
        with tempfile.TemporaryDirectory() as profile:
            command = [
                *(browser, *QUIET, *(AS_ROOT if os.geteuid() == 0 else ()), f"--user-data-dir={profile}"),
                *(f"--window-size={WIDE},{HIGH}", f"--screenshot={path}"),
                f"file://{quote(str(page))}#only={quote(name, safe='')}",
            ]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
            except (OSError, subprocess.SubprocessError) as error:
                raise UsageError(f"--png {folder}: {browser} has not drawn {name}: {error}") from None
        yield path


def names(runs: Sequence[Told]) -> list[str]:
    """Of all pictures of the report, as its page has them."""
    series = dict.fromkeys(name for run in runs for name, patch in run.tick.series.items() if patch.x)
    dances = [f"{kind}-{n}" for n, run in enumerate(runs) if run.tick.stays for kind in ("dance", "workers")]
    return [*dances, *series]
