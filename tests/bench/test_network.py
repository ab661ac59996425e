"""`farandole bench network`: the prediction, the recommendation, and a run of two hosts that are one machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from chaos.launched import ENVIRON, FARANDOLE
from farandole.bench.network import CodecCost, NetworkResult, codec_costs, predict, recommended
from farandole.bench.network_run import absolute
from farandole.collective.codec import CODECS

BF16 = CodecCost(codec="bf16", times_fewer_bytes=2.0, seconds=0.001)
ZSTD = CodecCost(codec="bf16+zstd", times_fewer_bytes=2.9, seconds=0.003)
INT4 = CodecCost(codec="int4", times_fewer_bytes=7.5, seconds=0.006)


def test_the_exchange_shrinks_with_the_bytes_and_grows_by_the_codecs_time() -> None:
    none, bf16, zstd = predict(100.0, 4, 10.0, [BF16, ZSTD], compute_s=2.0)
    assert [each.codec for each in (none, bf16, zstd)] == ["none", "bf16", "bf16+zstd"]
    assert (none.sent_mb, bf16.sent_mb) == (150.0, 75.0)  # 3 of 4 parts as sums of its own, and its part 3 times
    assert (none.exchange_ms, none.step_ms, none.times_faster) == (10_000.0, 12_000.0, 1.0)
    assert bf16.exchange_ms == pytest.approx(5_000 + 100)
    assert bf16.times_faster == pytest.approx(12.0 / 7.1)
    assert zstd.exchange_ms == pytest.approx(10_000 / 2.9 + 300)


@pytest.mark.parametrize(
    ("exchange_s", "compute_s", "wanted"),
    [
        (10.0, 0.0, "bf16+zstd"),
        (0.6, 0.0, "bf16"),  # compression takes longer than its bytes
        (0.1, 0.0, "none"),  # a codec would lose
        (1.0, 100.0, "none"),  # nobody would notice
    ],
)
def test_a_simpler_codec_is_recommended_unless_another_is_clearly_faster(
    exchange_s: float, compute_s: float, wanted: str
) -> None:
    predictions = predict(100.0, 2, exchange_s, [BF16, ZSTD, INT4], compute_s)
    assert recommended(predictions) == wanted


def test_each_codec_has_a_cost_and_the_ratio_of_its_format() -> None:
    costs = {cost.codec: cost for cost in codec_costs(CODECS)}
    assert list(costs) == list(CODECS)
    assert costs["bf16"].times_fewer_bytes == 2.0
    assert costs["int4"].times_fewer_bytes == pytest.approx(7.5, rel=0.01)
    assert 2.0 < costs["bf16+zstd"].times_fewer_bytes < 5.0
    assert all(cost.seconds >= 0 for cost in costs.values())


def test_paths_in_options_are_those_of_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").touch()
    assert absolute("hosts.toml") == str(tmp_path / "hosts.toml")
    assert absolute("ssh,hosts.toml,size=2") == f"ssh,{tmp_path}/hosts.toml,size=2"
    assert absolute("--pool=hosts.toml") == f"--pool={tmp_path}/hosts.toml"
    assert [absolute(each) for each in ("", "--workers", "1", "0.0.0.0")] == ["", "--workers", "1", "0.0.0.0"]


@pytest.mark.parametrize("wrong", [("--hosts", "1"), ("--mb", "0"), ("--mb", "nan"), ("--steps", "0")])
def test_a_number_that_means_nothing_is_named(wrong: tuple[str, str]) -> None:
    done = subprocess.run([*FARANDOLE, "bench", "network", *wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(word in done.stderr for word in wrong)


@pytest.mark.long
@pytest.mark.processes
def test_a_run_that_ends_by_itself_is_shown() -> None:
    command = [*FARANDOLE, "bench", "network", "--codec", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode not in (0, 2)
    assert "nothing" in done.stderr


def ticket_of(bench: subprocess.Popen[str]) -> Path:
    """The ticket in the line that the bench prints for other machines."""
    assert bench.stdout is not None
    return next(Path(line.split()[-1]) for line in bench.stdout if "farandole join" in line)


@pytest.mark.long
@pytest.mark.processes
def test_two_hosts(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--hosts", "2", "--mb", "2", "--steps", "3", "--workers", "1", "--max", "2", "--json", str(figures)]
    command = [*FARANDOLE, "bench", "network", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON) as bench:
        ticket = ticket_of(bench)
        try:
            assert ticket.exists(), "somebody may type the line at once"
            with subprocess.Popen([*FARANDOLE, "join", str(ticket)], env={**ENVIRON, "FARANDOLE_HOST": "there"}):
                bench.communicate()
        except BaseException:
            bench.terminate()
            raise
    assert bench.returncode == 0
    assert not ticket.parents[1].exists()
    result = msgspec.json.decode(figures.read_bytes(), type=NetworkResult)
    assert len(result.hosts) == 2
    assert "there" in result.hosts
    assert {(link.source, link.target) for link in result.links} == {result.hosts, result.hosts[::-1]}
    assert result.exchange_ms > 0
    assert {each.codec for each in result.predictions} == {codec.name for codec in CODECS.values() if not codec.adapts}
    assert result.recommended in CODECS


@pytest.mark.long
@pytest.mark.processes
def test_a_bench_that_is_terminated_leaves_no_run_and_no_folder() -> None:
    command = [*FARANDOLE, "bench", "network", "--mb", "1", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON) as bench:
        ticket = ticket_of(bench)
        bench.terminate()
    assert bench.returncode == 143
    assert not ticket.parents[1].exists()
