"""The pictures of docs/ and the README, from a real run: `make demo` while a real Chromium looks at its dashboard.

    python docs/screens.py            docs/images/*.png, and demo.gif, which plays the demo
    python docs/screens.py lending    docs/images/lending.gif, which plays `make lending`

Each takes a minute or two, Chromium (apt install chromium) and what `.[dev]` has.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from farandole.observe.report import AS_ROOT, BROWSERS, QUIET
from tests.support.browser import INSTALLED

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RUNS = ROOT / "runs"
FRAME_S = 0.3
WITHOUT = """(root) => {  // where this checkout lies is nobody's business
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "~");
}"""
GIF_WIDTH = 760
COLOURS = 96


def begun(pattern: str, before: set[Path]) -> Path:
    """Wait for a new run folder that matches `pattern` and has its first lines."""
    while True:
        for folder in {*RUNS.glob(pattern)} - before:
            if (folder / "metrics.jsonl").exists():
                return folder
        time.sleep(0.1)


@contextlib.contextmanager
def dashboard(folder: Path) -> Generator[Any]:
    """The dashboard of a run, as a page of a real Chromium."""
    command = [sys.executable, "-m", "farandole", "dashboard", "--run", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        link = server.stdout.readline().split()[-1]
        browser = playwright.chromium.launch(
            executable_path=INSTALLED, args=[*(a for a in QUIET if "scale-factor" not in a), *AS_ROOT]
        )
        page = browser.new_context(viewport={"width": 1000, "height": 700}).new_page()
        page.goto(link)
        page.locator("body[data-drawn]").wait_for()
        yield page
        browser.close()
        server.terminate()


def film(page: Any, run: subprocess.Popen[bytes], frame_s: float) -> list[Image.Image]:
    """What is on the screen, every `frame_s` seconds, until the run is over."""
    frames: list[Image.Image] = []
    while run.poll() is None and page.locator("#state").inner_text() != "finished":
        page.evaluate(WITHOUT, str(ROOT))
        picture = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": 1000, "height": 640})))
        height = round(picture.height * GIF_WIDTH / picture.width)
        frames.append(picture.convert("RGB").resize((GIF_WIDTH, height), Image.Resampling.LANCZOS))
        time.sleep(frame_s)
    return frames


def save_gif(frames: list[Image.Image], path: Path) -> None:
    first, *others = [
        frame.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in frames
    ]
    lasts = [int(1000 * FRAME_S)] * len(others) + [4000]
    first.save(path, save_all=True, append_images=others, duration=lasts, loop=0, optimize=True)


def pictures(page: Any, name: str) -> None:
    """The page on a wide screen and on a phone, light and dark; whole where it is wide and light."""
    for width, height in ((1280, 2800), (390, 844)):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": height})  # what is not in sight is not drawn
            time.sleep(1)
            page.evaluate(WITHOUT, str(ROOT))
            is_whole = (width, scheme) == (1280, "light")
            if not is_whole:
                page.set_viewport_size({"width": width, "height": min(height, 844)})
            page.screenshot(path=IMAGES / f"{name}-{width}-{scheme}.png", full_page=is_whole)


def demo() -> None:
    """The demo, and what its dashboard and its report show at the end."""
    before = {*RUNS.glob("demo-*")}
    command = [sys.executable, "examples/demo.py"]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as run,
        dashboard(begun("demo-*", before)) as page,
    ):
        save_gif(film(page, run, FRAME_S), IMAGES / "demo.gif")
        time.sleep(2)
        pictures(page, "dashboard")
        folder = begun("demo-*", before)
        report = [sys.executable, "-m", "farandole", "report", str(folder)]
        subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
        page.goto(f"file://{folder}/report.html")
        pictures(page, "report")
    for path in IMAGES.glob("*.png"):
        Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def lending() -> None:
    """A training that lends its nodes on a real Slurm, at six times its speed. Its table goes to standard output."""
    folder = RUNS / time.strftime("lending-%Y%m%d-%H%M%S")
    command = [sys.executable, "-m", "benchmarks.lending", "--folder", str(folder)]
    with subprocess.Popen(command, cwd=ROOT) as run, dashboard(begun(folder.name, set())) as page:
        save_gif(film(page, run, 6 * FRAME_S), IMAGES / "lending.gif")


def main() -> None:
    if INSTALLED is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the PATH: apt install chromium")
    IMAGES.mkdir(exist_ok=True)
    recordings = {"demo": demo, "lending": lending}
    for name in sys.argv[1:] or ["demo"]:
        recordings[name]()
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
