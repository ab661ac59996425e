"""`farandole account` on run folders of every kind, and the files of prices that it takes or refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from farandole import cli
from farandole.cli.options import read
from farandole.errors import UsageError
from farandole.protocol import events
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.cost import Prices
from farandole.protocol.events import SentBytes, WorkerTime
from farandole.protocol.metrics import as_written

TOLD = events.TimeSpentEvent(
    workers={"w1": WorkerTime(host="box", pool="local", step=3, seconds={"start": 900.0, "compute": 2700.0})},
    ended=("w1",), time=5000.0,
)  # fmt: skip
TOML = "date = 2026-11-01\n[pools]\nlocal = 0.4\n[hosts]\nbox = 1\n"


@pytest.fixture
def farandole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str]]:
    """`farandole ARGUMENTS`: its exit code, and what it says."""

    def call(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return call


def folder_of(path: Path, *lines: bytes, settings: bytes | None = None) -> Path:
    path.mkdir(mode=0o700)
    path.joinpath("metrics.jsonl").write_bytes(b"".join(lines))
    if settings is not None:
        path.joinpath("settings.json").write_bytes(settings)
    for file in path.iterdir():
        file.chmod(0o600)
    return path


def test_of_a_run_that_was_killed(tmp_path: Path, farandole: Callable[..., tuple[object, str]]) -> None:
    """Its last line is torn."""
    place = folder_of(tmp_path / "run", as_written(TOLD), as_written(TOLD)[:40])
    code, said = farandole("account", "--run", str(place), "--workers")
    assert code == 0
    assert "75.0 %" in said
    assert "--prices" in said
    assert "w1" in said
    _, said = farandole("account", "--run", str(place), "--json")
    assert json.loads(said)["over"] is False


def test_prices_are_the_runs_own_or_those_that_are_named(
    tmp_path: Path, farandole: Callable[..., tuple[object, str]]
) -> None:
    settings = msgspec.json.encode(RunSettings(run="r", prices=Prices(date="2026-10-01", pools={"local": 2.0})))
    place = folder_of(tmp_path / "run", as_written(TOLD), settings=settings)
    _, said = farandole("account", "--run", str(place), "--json")
    assert json.loads(said)["dollars"] == 2.0
    named = tmp_path / "prices.toml"
    named.write_text(TOML)
    _, said = farandole("account", "--run", str(place), "--json", "--prices", str(named))
    assert (json.loads(said)["dollars"], json.loads(said)["cost"]["date"]) == (1.0, "2026-11-01")


def test_the_price_of_traffic_is_the_runs_own_or_the_one_that_is_given(
    tmp_path: Path, farandole: Callable[..., tuple[object, str]]
) -> None:
    sent = msgspec.structs.replace(TOLD.workers["w1"], sent={"far": SentBytes(exchange=3 * 10**9, state=10**9)})
    line = as_written(msgspec.structs.replace(TOLD, workers={"w1": sent}))
    settings = msgspec.json.encode(RunSettings(run="r", prices=Prices(traffic_price=0.5)))
    place = folder_of(tmp_path / "run", line, settings=settings)
    named = tmp_path / "prices.json"
    for content, arguments, dollars in (
        ({}, (), 2.0),
        ({}, ("--traffic-price", "0.25"), 1.0),
        ({"date": "2026-11-01"}, ("--prices", str(named)), 2.0),
        ({"date": "2026-11-01", "traffic_price": 0.1}, ("--prices", str(named)), 0.4),
        ({"date": "2026-11-01", "traffic_price": 0.1}, ("--prices", str(named), "--traffic-price", "0"), 0.0),
    ):
        named.write_text(json.dumps(content))
        _, said = farandole("account", "--run", str(place), "--json", *arguments)
        assert json.loads(said)["traffic"]["dollars"] == pytest.approx(dollars), arguments
    code, said = farandole("account", "--run", str(place), "--traffic-price", "-1")
    assert code == 2
    assert "--traffic-price -1" in said


@pytest.mark.parametrize("settings", [b"", b"{}", b"[]", b'{"prices": 3}', b'{"prices": {"pools": {"local": -1}}}'])
def test_settings_of_another_version_have_no_prices(
    tmp_path: Path, farandole: Callable[..., tuple[object, str]], settings: bytes
) -> None:
    place = folder_of(tmp_path / "run", as_written(TOLD), settings=settings)
    code, said = farandole("account", "--run", str(place), "--json")
    assert code == 0
    assert json.loads(said)["dollars"] is None


def test_where_there_is_no_run(tmp_path: Path, farandole: Callable[..., tuple[object, str]]) -> None:
    code, said = farandole("account", "--run", str(tmp_path))
    assert code == 2
    assert f"--run {tmp_path}" in said


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "p.toml", tmp_path / "p.json"
    toml.write_text(TOML)
    as_json.write_text('{"date": "2026-11-01", "pools": {"local": 0.4}, "hosts": {"box": 1}}')
    assert read(toml) == read(as_json)
    assert read(as_json) == Prices(date="2026-11-01", pools={"local": 0.4}, hosts={"box": 1.0})


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.json", "{", "JSON"),
        ("p.json", "[]", "date"),
        ("p.json", '{"pools": {}}', "date = ''"),
        ("p.json", '{"date": "yesterday"}', "date = 'yesterday'"),
        ("p.json", '{"date": "2026-11-01", "pool": {}}', "pool"),
        ("p.json", '{"date": "2026-11-01", "pools": {"local": "1"}}', r"\$.pools"),
        ("p.json", '{"date": "2026-11-01", "pools": {"local": 0}}', r"pools\.local = 0\b"),
        ("p.json", '{"date": "2026-11-01", "hosts": {"box": -1}}', r"hosts\.box = -1\b"),
        ("p.json", '{"date": "2026-11-01", "traffic_price": -1}', r"traffic-price -1"),
        ("p.toml", "date = ", "TOML"),
        ("p.toml", "date = 2026-11-01T10:00:00", "date"),
        ("p.toml", "date = 2026-11-01\n[pools]\nlocal = nan", r"pools\.local = nan\b"),
        ("p.csv", "", r"\.toml\b.*\.json\b"),
        ("none/p.toml", None, r"none/p\.toml"),
    ],
)
def test_a_file_that_is_none_is_named_with_the_remedy(
    tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=says) as refused:
        read(path)
    assert str(refused.value).startswith(f"prices {path}: ")
