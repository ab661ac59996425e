"""A run as a real Prometheus has it: by its own configuration file, the token in a file, over TLS too."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "prometheus_client", reason="prometheus_client is not installed: pip install 'farandole[prometheus]'"
)

from tests.support.small_job import Job

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.world,
    pytest.mark.processes,
    pytest.mark.timeout(200),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"),
]
TOKEN = "s3cret-0123456789abcdef"


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


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_it_reads_the_run_and_the_dashboards_queries_give_something(
    tmp_path: Path, started: list[Prometheus], listen: str
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    job = Job(tmp_path)
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
