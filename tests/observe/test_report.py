"""The report's page: everything is in it, it asks for nothing, and what others have called themselves is text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import msgspec
import pytest

from farandole.control.run_folder import METRICS, SETTINGS, Tail
from farandole.errors import UsageError
from farandole.observe import report as page
from farandole.observe.report import draw, names, report, run_content
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.cost import Prices
from tests.support.told_run import MARKUP, RUN, written


def folder(tmp_path: Path, lines: list[bytes], **settings: object) -> Path:
    place = tmp_path / "digits"
    place.mkdir(mode=0o700)
    (place / METRICS).write_bytes(b"".join(lines))
    (place / SETTINGS).write_bytes(msgspec.json.encode(RunSettings(run="digits", **settings)))  # type: ignore[arg-type]
    return place


def content(html: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def test_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    place = folder(tmp_path, written(RUN), command=("train.py", "--lr", "0.1"), commit="abc, with changes", seed=7)
    html = report([run_content(place, 300.0, None, live=False)])
    [run] = content(html)
    about = dict(run["about"])  # type: ignore[call-overload]
    assert (about["command"], about["commit"], about["seed"]) == ("train.py --lr 0.1", "abc, with changes", "7")
    assert run["tick"]["head"]["step"] == 20  # type: ignore[index]
    ours = html.replace("https://github.com/leeoniya/uPlot", "")  # in a comment
    assert not re.search(r"(src|href)=|https?://|url\(", ours.replace("http-equiv", "")), "it asks for nothing"


def test_its_own_scripts_and_styles_are_all_that_its_policy_lets_in(tmp_path: Path) -> None:
    html = report([run_content(folder(tmp_path, written(RUN)), 300.0, None, live=False)])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    parts = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, re.S)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts}
    assert len(parts) == len(page.STYLES) + len(page.FROZEN)
    assert set(re.findall(r"'sha256-[^']*'", policy[1])) == hashes


def test_names_with_markup_in_them_end_no_script(tmp_path: Path) -> None:
    nasty = [
        {"event": "starting", "worker": MARKUP, "host": MARKUP, "time": 100.0},
        {"event": "view", "members": (MARKUP,), "time": 101.0, "cause": MARKUP, "step": 0},
        {"event": "lost", "worker": MARKUP, "host": MARKUP, "time": 112.5, "reason": MARKUP},
        {"event": "log", "step": 9, MARKUP: 0.75, "note": MARKUP},
    ]
    place = folder(tmp_path, written([*RUN, *nasty]), command=(MARKUP,))
    html = report([run_content(place, 300.0, None, live=False)])
    assert "owned'</script>" not in html
    assert "<img" not in html
    [run] = content(html)
    assert run["tick"]["head"]["last_gone"]["why"] == MARKUP  # type: ignore[index]


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [folder(tmp_path / name, written(RUN)) for name in ("a", "b")]
    found = [run_content(run, 300.0, Prices(date="2026-11-01", pools={"local": 1.0}), live=False) for run in runs]
    assert len(content(report(found))) == 2
    assert {"spans-0", "workers-1", "step/loss", "accuracy"} <= set(names(found))


def test_settings_of_another_version_and_none_at_all(tmp_path: Path) -> None:
    place = folder(tmp_path, written(RUN))
    (place / SETTINGS).write_text('{"seed": 3, "prices": {"x": []}, "new": {"a": 1}}')
    assert ("seed", "3") in run_content(place, 300.0, None, live=False).about
    (place / SETTINGS).unlink()
    assert run_content(place, 300.0, None, live=False).tick.head


def test_a_run_without_a_line_is_an_error(tmp_path: Path) -> None:
    place = folder(tmp_path, [])
    with pytest.raises(UsageError, match=re.escape(str(place))):
        run_content(place, 300.0, None, live=False)


def test_without_a_browser_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="apt install chromium"):
        next(draw(tmp_path / "report.html", tmp_path / "png", []))


def test_lines_come_whole_and_a_file_that_shrinks_is_read_on_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntwo\ntor")
    assert tail.lines() == [b"one\n", b"two\n"]
    with path.open("ab") as file:
        file.write(b"n\nfour\n")
    assert tail.lines() == [b"torn\n", b"four\n"]
    path.write_bytes(b"x\n")
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b"y\n")
    assert tail.lines() == [b"y\n"]
