"""Dashboard and report in a real Chromium, of real runs."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from farandole.control.run_folder import METRICS, SETTINGS
from tests.support.browser import INSTALLED, WHY_NOT, opened, painted
from tests.support.harness import ENVIRON, FARANDOLE, Elastic
from tests.support.mentioned import mentions
from tests.support.small_job import SCRIPT
from tests.support.told_run import MARKUP, RUN, written

pytestmark = [
    pytest.mark.world,
    pytest.mark.skipif(INSTALLED is None, reason=WHY_NOT),
]
SOON = 30_000  # ms


@contextmanager
def dashboard(folder: Path) -> Generator[str, None, None]:
    """The link that it prints; in the end it is stopped by Ctrl-C, and ends well."""
    command = [*FARANDOLE, "dashboard", "--run", str(folder)]
    with subprocess.Popen(command, env=ENVIRON, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
            process.send_signal(signal.SIGINT)
            assert process.wait(200) == 0
        finally:
            process.kill()


def job(tmp_path: Path, *more: str) -> tuple[str, ...]:
    (tmp_path / "pace").write_text("0.2")
    return (str(tmp_path / "out"), "--pace", str(tmp_path / "pace"), "--epochs", "1000", *more)


def test_a_live_run_is_seen_and_steered(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", SCRIPT, *job(tmp_path), workers=2, options=[], deadline_s=200) as run:
        run.until_members(2)
        with dashboard(run.folder) as link, opened() as page:
            page.goto(link)
            assert "once=" not in page.url
            page.locator("#cards", has_text="2 of 2").wait_for(timeout=SOON)
            page.locator("#state", has_text="training").wait_for(timeout=SOON)
            for picture in ("spans-0", "workers-0", "step/loss"):
                assert painted(page, picture) > 3, picture

            page.get_by_role("button", name="Scale ...").click()
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Scale ...").click()
            page.get_by_role("spinbutton", name="Workers").fill("3")
            page.keyboard.press("Enter")
            run.until_members(3)
            page.locator("#cards", has_text="3 of 3").wait_for(timeout=SOON)
            page.get_by_role("button", name="Stop ...").click()
            page.keyboard.press("Escape")  # no answer, whatever was answered before

            victim = run.members[0]
            run.signal(victim, signal.SIGKILL)
            page.locator("#cards", has_text=f"{victim} was lost").wait_for(timeout=SOON)
            page.locator(".events", has_text=f"{victim} is lost").wait_for(timeout=SOON)
            run.until_members(3, without=(victim,))

            leaving_worker = run.members[1]
            page.locator("tr", has_text=leaving_worker).get_by_role("button", name="Release ...").first.click()
            page.get_by_role("button", name="Cancel").click()
            page.locator("tr", has_text=leaving_worker).get_by_role("button", name="Release ...").first.click()
            page.locator("#yes").click()
            page.locator("#cards", has_text=f"{leaving_worker} left").wait_for(timeout=SOON)
            assert leaving_worker not in run.members

            page.locator("tr", has_text=run.members[0]).get_by_role("button", name="Log").first.click()
            page.locator("#log[open]").wait_for()
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Stop ...").click()
            red = page.evaluate("getComputedStyle(document.querySelector('#yes')).backgroundColor")
            assert red == "rgb(192, 57, 43)"
            page.locator("#yes").click()
            page.locator("#state", has_text="stopped").wait_for(timeout=SOON)
            page.locator("#actions").wait_for(state="hidden")
            assert painted(page, "spans-0") > 4
        run.finish()
        report_of_it(run, tmp_path)


def report_of_it(run: Elastic, tmp_path: Path) -> None:
    """The same run, over, as a page and as pictures."""
    command = [*FARANDOLE, "report", str(run.folder), "--png", str(tmp_path / "png")]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    pictures = sorted(path.name for path in (tmp_path / "png").iterdir())
    assert {"spans-0.png", "workers-0.png", "step-loss.png"} <= set(pictures)
    assert all((tmp_path / "png" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    with opened() as page:
        page.goto(f"file://{run.folder}/report.html")
        assert page.locator("#state").inner_text() == "stopped"
        assert page.locator("#actions").is_hidden()
        for picture in ("spans-0", "workers-0", "step/loss"):
            assert painted(page, picture) > 3, picture
        before = page.evaluate("pictures['step/loss'].plot.scales.y.distr")
        page.locator("#log-scale").click()
        page.locator("#smoothing").fill("8")
        assert page.evaluate("pictures['step/loss'].plot.scales.y.distr") == 3 != before
        assert page.evaluate("pictures['step/loss'].plot.data.length") == 3, "steps, the mean, and the values"
        assert page.evaluate("pictures['step/loss'].changes[0].length") > 1
        assert painted(page, "step/loss") > 3


def test_runs_side_by_side_have_a_legend_and_say_whether_the_bits_are_the_same(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    finished = {"event": "finished", "time": 115.0, "fingerprint": "0a1b2c3d", "equal": True}
    one, other = (folder(tmp_path / name, *NAMED[3:4], finished) for name in "ab")
    command = [*FARANDOLE, "report", str(one), "--against", str(other), "--output", str(tmp_path / "both.html")]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    with opened() as page:
        page.goto(f"file://{tmp_path}/both.html")
        assert page.locator("#key > span").count() == 2
        assert mentions(page.locator("#foot").inner_text(), "0a1b2c3d")
        assert page.locator("#compared tr", has_text="same bits").locator("td").all_inner_texts() == ["", "yes"]
        assert page.evaluate("runs[0].timeline.times([runs[0].timeline.from + 75])") == ["1:15"]
        assert page.evaluate("pictures['step/loss'].names.length") == 2


def folder(tmp_path: Path, *lines: dict[str, Any]) -> Path:
    place = tmp_path / "told"
    place.mkdir(mode=0o700)
    (place / METRICS).write_bytes(b"".join(written([*RUN, *lines])))
    (place / SETTINGS).write_text("{}")
    return place


NAMED = [
    {"event": "starting", "worker": MARKUP, "host": MARKUP, "time": 113.0},
    {"event": "view", "members": ("w1", MARKUP), "time": 113.5, "cause": MARKUP, "step": 20, "view": 3},
    {"event": "lost", "worker": MARKUP, "host": MARKUP, "time": 114.0, "reason": MARKUP},
    {"event": "not finite", "worker": "w1", "step": 15, "loss": "nan", "time": 114.5},
    {"event": "log", "step": 19, MARKUP: 0.75, "note": MARKUP},
    {"event": "log", "step": 20, MARKUP: 0.25, "note": MARKUP},
]


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_markup_in_names_is_text_on_any_screen(tmp_path: Path, width: int, scheme: str) -> None:
    place = folder(tmp_path, *NAMED)
    with dashboard(place) as link, opened(width=width, color_scheme=scheme) as page:
        page.goto(link)
        page.locator("body[data-drawn]").wait_for(timeout=SOON)
        assert page.locator("#state").inner_text() == "cut off"
        assert MARKUP in page.locator("#cards").inner_text()
        assert page.locator("img").count() == 0
        assert page.title() == "cut off told"
        assert painted(page, "spans-0") > 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(20, 20, 20)") == (scheme == "dark")


OUTSIDE = """width => [...document.querySelectorAll("main td, main th, main button")].filter((each) => {
    const {left, right} = each.getBoundingClientRect();
    return each.offsetParent && (left < 0 || right > width + 0.5 || each.scrollWidth > each.clientWidth + 1);
}).map((each) => each.textContent)"""


def test_on_a_phone_no_column_and_no_button_is_out_of_sight(tmp_path: Path) -> None:
    with Elastic(tmp_path / "run", SCRIPT, *job(tmp_path), workers=2, options=[], deadline_s=200) as run:
        run.until_members(2)
        with dashboard(run.folder) as link, opened(width=390, height=844) as page:
            page.goto(link)
            release = page.get_by_role("button", name="Release ...")
            release.first.wait_for(timeout=SOON)
            page.locator(".share > div").first.wait_for(state="attached", timeout=SOON)  # the account, after 10 s
            assert page.evaluate(OUTSIDE, 390) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert release.count() == 2
            leaving_worker = run.members[1]
            page.locator("tr", has_text=leaving_worker).get_by_role("button", name="Release ...").first.click()
            page.locator("#yes").click()
            page.locator("#cards", has_text=f"{leaving_worker} left").wait_for(timeout=SOON)


def test_who_has_not_logged_in_and_who_comes_by_a_used_link(tmp_path: Path) -> None:
    with dashboard(folder(tmp_path)) as link:
        with opened() as page:
            page.goto(link)
            page.locator("body[data-drawn]").wait_for(timeout=SOON)
            page.goto(link)
            page.locator("body[data-drawn]").wait_for(timeout=SOON)  # it is in already
        for address in (link, link.partition("/login")[0]):
            with opened(refused=True) as page:
                answered = page.goto(address)
                assert answered.status == 401


def test_a_form_of_another_site_does_nothing(tmp_path: Path) -> None:
    """A page of another origin in the browser that is logged in."""
    with dashboard(folder(tmp_path)) as link, opened(refused=True) as page:
        page.goto(link)
        page.locator("body[data-drawn]").wait_for(timeout=SOON)
        here = link.partition("/login")[0]
        page.goto(
            f"data:text/html,<form action={here}/act method=post enctype=text/plain>"
            """<input name='{"do":"stop","name":"' value='"}'><button>A prize</button></form>"""
        )
        with page.expect_response(f"{here}/act") as answered:
            page.get_by_role("button").click()
        assert answered.value.status == 401, "the cookie was not sent from there"
