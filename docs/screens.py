"""The pictures of docs/ and the README, from a real run: `make demo` while a real Chromium looks at its dashboard.

    python docs/screens.py            docs/images/*.png, and demo.gif, which plays the demo

It takes about a minute, Chromium (apt install chromium) and what `.[dev]` has.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from farandole.observe.report import AS_ROOT, BROWSERS, QUIET
from tests.support.browser import INSTALLED

HERE = Path(__file__).parent
IMAGES = HERE / "images"
RUNS = HERE.parent / "runs"
FRAME_S = 0.3
WITHOUT = """(root) => {  // where this checkout lies is nobody's business
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(root, "~");
}"""
GIF_WIDTH = 760
COLOURS = 96


def newest(before: set[Path]) -> Path:
    """The run folder that the demo has made, once something is in it."""
    while True:
        for folder in {*RUNS.glob("demo-*")} - before:
            if (folder / "metrics.jsonl").exists():
                return folder
        time.sleep(0.1)


def film(page: Any, demo: subprocess.Popen[bytes]) -> list[Image.Image]:
    """What is on the screen, some times a second, until the run is over."""
    frames: list[Image.Image] = []
    while demo.poll() is None and page.locator("#state").inner_text() != "finished":
        picture = Image.open(io.BytesIO(page.screenshot(clip={"x": 0, "y": 0, "width": 1000, "height": 640})))
        height = round(picture.height * GIF_WIDTH / picture.width)
        frames.append(picture.convert("RGB").resize((GIF_WIDTH, height), Image.Resampling.LANCZOS))
        time.sleep(FRAME_S)
    return frames


def save_gif(frames: list[Image.Image], path: Path) -> None:
    first, *others = [
        frame.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in frames
    ]
    lasts = [int(1000 * FRAME_S)] * len(others) + [4000]
    first.save(path, save_all=True, append_images=others, duration=lasts, loop=0, optimize=True)


def main() -> None:
    if INSTALLED is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is on the PATH: apt install chromium")
    IMAGES.mkdir(exist_ok=True)
    before = {*RUNS.glob("demo-*")}
    demo = subprocess.Popen([sys.executable, "examples/demo.py"], cwd=HERE.parent, stdout=subprocess.DEVNULL)
    folder = newest(before)
    dashboard = subprocess.Popen(
        [sys.executable, "-m", "farandole", "dashboard", "--run", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert dashboard.stdout is not None
    link = dashboard.stdout.readline().split()[-1]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=INSTALLED, args=[*(a for a in QUIET if "scale-factor" not in a), *AS_ROOT]
        )
        context = browser.new_context(viewport={"width": 1000, "height": 700})
        page = context.new_page()
        page.goto(link)
        page.locator("body[data-drawn]").wait_for()
        frames = film(page, demo)
        page.set_viewport_size({"width": 1300, "height": 2790})  # what is not in sight is not drawn anew
        time.sleep(2)
        page.evaluate(WITHOUT, str(HERE.parent))
        page.screenshot(path=IMAGES / "dashboard.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size({"width": 420, "height": 900})
        time.sleep(1)
        page.screenshot(path=IMAGES / "dashboard-dark.png")
        browser.close()
    save_gif(frames, IMAGES / "demo.gif")
    for path in IMAGES.glob("*.png"):
        Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    dashboard.terminate()
    dashboard.wait()
    demo.wait()
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
