"""A run that is exported while it runs: the same bits, each step once in TensorBoard through crashes and a resume, and
no harm from an export that fails, hangs or is killed; and a real Prometheus that reads it, over TLS too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.protocol.metrics import StepLine, parse_lines
from tests.jobs import small
from tests.support.fake_worker import gone, until
from tests.support.harness import read_lines
from tests.support.launched import farandole
from tests.support.lines import naming
from tests.support.small_job import OFTEN, Job, until_checkpoints

pytestmark = [pytest.mark.processes]
PROMETHEUS = shutil.which("prometheus")
TOKEN = "s3cret-0123456789abcdef"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def private_token(folder: Path) -> Path:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    return token


def children(pid: int, word: str) -> list[int]:
    """The processes that `pid` has started, in whose command line `word` stands."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and word in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except (OSError, ValueError, IndexError):
                continue
    return found


def counted(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses that count by metrics.jsonl: of each step the last."""
    found, _ = parse_lines((folder / "metrics.jsonl").read_bytes().splitlines())
    return sorted({line.step: round(line.loss or 0.0, 5) for line in found if isinstance(line, StepLine)}.items())


def shown(folder: Path) -> list[tuple[int, float]]:
    from tests.support.event_files import read

    return [(step, round(loss, 5)) for step, loss in read(folder)[0]["step/loss"]]


def test_through_kills_and_a_resume_each_step_is_in_tensorboard_once(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    job.pace.write_text("0.5")  # of faster steps some are left out; one of a single micro-batch takes a quarter
    with job.run(2, *OFTEN, "--tensorboard") as run:
        run.until(lambda: len(list((job.folder / "tensorboard").glob("events*"))) > 0, "event files")
        until_checkpoints(run, 1)
        exporter = children(run.process.pid, "farandole.observe.export_process")
        assert len(exporter) == 1
        os.kill(exporter[0], signal.SIGKILL)
        run.signal("w2", signal.SIGKILL)
        until_checkpoints(run, 2)
        run.until(lambda: children(run.process.pid, "farandole.observe.export_process"), "another exporter")
        run.process.kill()  # and all with it
        run.process.wait()
    with job.run(2, *OFTEN, "--tensorboard") as run:
        run.finish()
    assert job.out.read_text() == undisturbed
    lost = sum(line["lines"] for line in read_lines(job.folder) if line.get("event") == "lines lost")
    assert (
        len(counted(job.folder)) + lost == small.STEPS
    )  # a checkpoint may be saved before the lines of its last steps
    assert shown(job.folder / "tensorboard") == [
        (step, pytest.approx(loss, rel=1e-4)) for step, loss in counted(job.folder)
    ]


def test_an_export_that_can_not_be_written_is_told_once_and_the_run_ends_as_ever(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    job.quick()
    (job.folder.parent / "file").write_text("in the way")
    with job.run(2, "--tensorboard-dir", str(job.folder.parent / "file" / "below")) as run:
        run.finish()
    assert job.out.read_text() == undisturbed
    output = run.output.read_text()
    assert len(naming(output, "TensorBoard", "[Errno")) == 1


@pytest.mark.long
def test_one_that_hangs_is_ended_after_the_run(job: Job, undisturbed: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'farandole[tensorboard]'")
    with job.run(2, "--tensorboard") as run:
        run.until(lambda: len(list((job.folder / "tensorboard").glob("events*"))) > 0, "event files")
        [exporter] = children(run.process.pid, "farandole.observe.export_process")
        os.kill(exporter, signal.SIGSTOP)
        job.quick()
        run.finish()
    assert job.out.read_text() == undisturbed
    assert "exports" in run.output.read_text()
    until(lambda: gone(exporter))


def test_metrics_are_served_by_a_token_that_is_nowhere_to_be_seen(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    token = private_token(tmp_path)
    with job.run(2, "--metrics-token", str(token)) as run:
        run.until(lambda: any("loss" in line for line in read_lines(job.folder)), "steps")
        address = json.loads((job.folder / "coordinator.json").read_text())["address"]
        request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        deadline = time.monotonic() + 30
        page = ""
        while "farandole_steps_total" not in page or "farandole_loss " not in page:
            page = urllib.request.urlopen(request, timeout=200).read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert 'farandole_run_info{bits="same",run="run"' in page
        for pid in {run.process.pid, *children(run.process.pid, "farandole")}:
            assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            assert TOKEN not in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        job.quick()
        run.finish()
    for path in job.folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    assert TOKEN not in run.output.read_text()
    assert f"{address}/metrics" in run.output.read_text()


def test_a_token_that_others_can_read_starts_nothing(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o644)
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    done = farandole("run", "--metrics-token", "token", "--folder", "r", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "0644" in done.stderr or "prometheus_client" in done.stderr
    assert TOKEN not in done.stderr + done.stdout
    assert not (tmp_path / "r").exists()


WITHOUT = """
import importlib.util, sys
found, missing = importlib.util.find_spec, sys.argv[1].split(",")
importlib.util.find_spec = lambda name, package=None: None if name in missing else found(name, package)
sys.argv[:2] = ["farandole"]
from farandole.cli import main
main()
"""


@pytest.mark.parametrize(
    ("options", "extra"),
    [(["--tensorboard"], "tensorboard"), (["--wandb", "p"], "wandb"), (["--metrics-token", "token"], "prometheus")],
)
def test_a_package_that_is_missing_is_asked_for_by_name(tmp_path: Path, options: list[str], extra: str) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    missing = "tensorboard,wandb,prometheus_client"
    command = [sys.executable, "-c", WITHOUT, missing, "run", *options, "--folder", "r", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f'[{extra}]"' in done.stderr
    assert not (tmp_path / "r").exists()


# --- a real Prometheus, by its own configuration file -----------------------------------------------------------------


class Prometheus:
    """One that reads the address `target` every second, with the token in the file `token`."""

    def __init__(self, folder: Path, target: str, token: Path, certificate: Path | None) -> None:
        scrape: dict[str, Any] = {
            "job_name": "farandole",
            "scheme": urllib.parse.urlsplit(target).scheme,
            "authorization": {"credentials_file": str(token)},
            "static_configs": [{"targets": [urllib.parse.urlsplit(target).netloc]}],
        }
        if certificate:
            scrape["tls_config"] = {"ca_file": str(certificate), "server_name": "farandole"}
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self.address}",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> float | None:
        found = self.ask("query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def until(self, expression: str, least: float) -> float:
        deadline = time.monotonic() + 60
        while True:
            try:
                value = self.value(expression)
                if value is not None and value >= least:
                    return value
            except OSError:
                value = None
            assert time.monotonic() < deadline, f"{expression} is {value}\n{self.log.read_text()[-2000:]}"
            time.sleep(0.2)


@pytest.fixture
def started() -> Iterator[list[Prometheus]]:
    found: list[Prometheus] = []
    yield found
    for each in found:
        each.process.kill()
        each.process.wait()


@pytest.mark.world
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus")
@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_a_prometheus_reads_the_run_and_the_dashboards_queries_give_something(
    job: Job, tmp_path: Path, started: list[Prometheus], listen: str
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    token = private_token(tmp_path)
    with job.run(2, "--metrics-token", str(token), "--listen", listen, "--checkpoint-every", "5steps") as run:
        run.until_step(3)
        address = json.loads((job.folder / "coordinator.json").read_text())["address"]
        certificate = None
        if address.startswith("https"):
            certificate = tmp_path / "certificate.pem"
            text = (job.folder / "tls.pem").read_text()
            certificate.write_text(text[text.index("-----BEGIN CERTIFICATE-----") :])
        prometheus = Prometheus(tmp_path, address, token, certificate)
        started.append(prometheus)
        assert prometheus.until('up{job="farandole"}', 1) == 1
        assert prometheus.until("farandole_view_workers", 2) == 2
        prometheus.until("increase(farandole_steps_total[30s])", 1)
        prometheus.until("farandole_checkpoint_size_bytes", 1)
        board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$job", ".*").replace("$instance", ".*")
                prometheus.ask("query", query=expression.replace("$__rate_interval", "30s"))  # refused if it is none
        for name in ("farandole_loss", "farandole_step", "farandole_worker_speed_ratio", "farandole_learning_rate"):
            assert prometheus.value(name) is not None, name
        job.quick()
        run.finish()
    assert TOKEN not in prometheus.log.read_text()
