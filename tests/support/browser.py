"""A real Chromium, the one that is installed, as a test drives it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from farandole.observe.report import AS_ROOT, BROWSERS, QUIET

INSTALLED = next(filter(None, map(shutil.which, BROWSERS)), None)
WHY_NOT = f"needs a browser: none of {', '.join(BROWSERS)} is on the PATH"


@contextmanager
def opened(
    width: int = 1300, height: int = 1000, *, refused: bool = False, **options: Any
) -> Generator[Any, None, None]:
    """A page of a new browser. An error of its scripts, or on its console, is the test's, and there has
    to be one where it is to be `refused` something.
    """
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    arguments = [*QUIET, *(AS_ROOT if os.geteuid() == 0 else ())]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=INSTALLED, args=arguments)
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        try:
            yield page
            if refused and not wrong:  # the console hears of an answer after the page does
                page.wait_for_event("console", lambda said: said.type == "error")
        finally:
            browser.close()
    assert bool(wrong) == refused, wrong


def painted(page: Any, picture: str) -> int:
    """How many colours a picture has once it is in sight: with one, nothing is drawn."""
    place = page.locator(f'[data-picture="{picture}"]')
    place.scroll_into_view_if_needed()
    place.locator("canvas").wait_for()
    return page.evaluate(
        """(name) => {
            const canvas = document.querySelector(`[data-picture="${name}"] canvas`);
            if (!canvas) return 0;
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const colours = new Set();
            for (let i = 0; i < data.length; i += 4) {
                if (data[i + 3]) colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
            }
            return colours.size;
        }""",
        picture,
    )
