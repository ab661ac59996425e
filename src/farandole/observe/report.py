"""`farandole report`: one or several runs as one self-contained HTML page, from their lines."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from farandole import __version__
from farandole.control.run_folder import CHECKPOINTS, METRICS, SETTINGS, Tail
from farandole.errors import UsageError
from farandole.observe.story import About, Story, Tick, about, bill, first
from farandole.platform import files
from farandole.platform.files import decoded
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.cost import Prices
from farandole.protocol.messages import Checkpoints

# --- html -------------------------------------------------------------------------------------------------------------
#
# The page, assembled from its files: markup, styles, and scripts (including uPlot).

FILES = Path(__file__).parent / "page"
STYLES = ("uPlot.min.css", "page.css")
PICTURES = ("uPlot.iife.min.js", "charts.js")
LIVE = (*PICTURES, "page.js", "act.js")
FROZEN = (*PICTURES, "frozen.js", "page.js")


@cache
def part(name: str) -> str:
    """Returns one file of the page."""
    return (FILES / name).read_text(encoding="utf-8")


def live() -> str:
    """Returns the dashboard's page, which loads its parts by name."""
    styles = "".join(f'<link rel="stylesheet" href="{name}">\n' for name in STYLES)
    return _page(styles, "".join(f'<script src="{name}"></script>\n' for name in LIVE))


def frozen(content: str) -> str:
    """Returns a self-contained page. `content`: JSON, a list of {"tick", "about"}.

    Its content security policy allows only its own scripts, whatever the content holds, and no network access.
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
    before, _, remainder = part("page.html").partition("{{head}}")
    between, _, after = remainder.partition("{{body}}")
    return before + head + between + body + after


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- report -----------------------------------------------------------------------------------------------------------


class RunContent(msgspec.Struct, frozen=True, kw_only=True):
    """The complete content of one run."""

    tick: Tick
    about: About


def report(runs: list[RunContent]) -> str:
    """Returns the page of the runs. The figures of the first run are at its top."""
    return frozen(msgspec.json.encode(runs).decode())


def run_content(folder: Path, now: float, prices: Prices | None, *, live: bool) -> RunContent:
    """Returns the content of the run in `folder` at Unix time `now`. `prices`: None means the run's own prices.

    Raises:
        UsageError: the run has no line yet.
    """
    story = read(Tail(folder / METRICS), Story())
    if story.began is None:
        raise UsageError(f"{folder}: it has no {METRICS} yet, so there is nothing to show")
    settings = settings_of(folder)
    name = folder.resolve().name
    paid = bill(story.account.account(name, prices or prices_in(settings)), story)
    return RunContent(tick=first(name, story, now, account=paid, live=live), about=about(settings, story, __version__))


def read(tail: Tail, story: Story) -> Story:
    """Reads all present lines."""
    while lines := tail.lines():
        for line in lines:
            story.take(line)
    return story


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the valid settings in settings.json that this version knows; {} if the file can't be read."""
    try:
        stored = decoded(files.read(folder / SETTINGS), dict[str, Any])
    except (OSError, UsageError, msgspec.MsgspecError):
        return {}
    types = {field.name: field.type for field in msgspec.structs.fields(RunSettings)}
    return {name: value for name, value in stored.items() if name in types and _fits(value, types[name])}


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (UsageError, msgspec.MsgspecError):
        return False
    return True


def checkpoints_in(folder: Path, settings: dict[str, Any]) -> str:
    """Returns the place of the checkpoints of the run in `folder`."""
    try:
        return msgspec.convert(settings.get("checkpoints", {}), Checkpoints).url or str(folder / CHECKPOINTS)
    except msgspec.MsgspecError:
        return str(folder / CHECKPOINTS)


def prices_in(settings: dict[str, Any]) -> Prices:
    """Returns the prices that the run was started with; none if they are in the format of another version."""
    try:
        return msgspec.convert(settings.get("prices", {}), Prices)
    except (UsageError, msgspec.MsgspecError):
        return Prices()


# --- pictures ---------------------------------------------------------------------------------------------------------
#
# A report's pictures as PNG files, drawn by an installed Chromium with the code of the page.

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
QUIET = (
    "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=2",
)  # fmt: skip
AS_ROOT = ("--no-sandbox",)  # otherwise it does not start as root; the page is our own
LIMIT_S = 60.0
WIDE, HIGH = 900, 340


def draw(page: Path, folder: Path, runs: Sequence[RunContent]) -> Iterator[Path]:
    """Draws each picture of the report at `page` to a file in `folder`. Yields the paths, one after the other.

    Raises:
        UsageError: no browser is installed, or it fails.
    """
    browser = find_browser(f"--png {folder}", "save them from the report")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names(runs):
        path = (folder / f"{name.replace('/', '-')}.png").resolve()
        take_picture(browser, f"--png {folder}", page, path, f"only={quote(name, safe='')}")
        yield path


def find_browser(option: str, otherwise: str) -> str:
    """Returns the path of an installed browser. `option` and `otherwise`, what else the user may do, are for the error.

    Raises:
        UsageError: no browser is installed.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UsageError(
            f"{option}: Chromium or Chrome draws the pictures, but none of {', '.join(BROWSERS)} is on the PATH; "
            f"install one (apt install chromium), or {otherwise}"
        )
    return browser


def take_picture(browser: str, option: str, page: Path, path: Path, fragment: str = "") -> None:
    """Draws the page at `page`, or the part of it that `fragment` names, to the PNG file `path`, an absolute path.

    Raises:
        UsageError: the browser fails.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(browser, *QUIET, *(AS_ROOT if os.geteuid() == 0 else ()), f"--user-data-dir={profile}"),
            *(f"--window-size={WIDE},{HIGH}", f"--screenshot={path}"),
            f"file://{quote(str(page))}#{fragment}",
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"{option}: {browser} has not drawn {path.stem}: {error}") from None


def names(runs: Sequence[RunContent]) -> list[str]:
    """Returns the names of all pictures of the report, in the order of its page."""
    series = dict.fromkeys(name for run in runs for name, patch in run.tick.series.items() if patch.x)
    workers = [f"{kind}-{n}" for n, run in enumerate(runs) if run.tick.stays for kind in ("spans", "workers")]
    return [*workers, *series]
