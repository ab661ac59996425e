"""Three machines whose links are equal but for one direction of one, which is far slower: the status names it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import ENVIRON, FARANDOLE, Elastic, external_worker
from tests.support.network import AVAILABLE, WHY_NOT, Mesh

JOB = Path(__file__).parents[1] / "jobs" / "small.py"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.world,
    pytest.mark.skipif(sys.platform != "linux" or not AVAILABLE, reason=WHY_NOT),
]
FAST, SLOW = 200, 10  # Mbit/s; of the fast ones, short messages do not reach all
MACHINES = 3
PRICE = 0.02  # dollars a GB


def test_the_slow_link_is_named_and_the_bytes_are_priced(tmp_path: Path) -> None:
    out = (str(tmp_path / "out"), "--width", "65536", "--epochs", "1000")
    listen = Mesh(MACHINES).addresses[0]
    options = ["--listen", listen, "--max", str(MACHINES), "--traffic-price", str(PRICE)]
    with ExitStack() as stack:
        mesh = stack.enter_context(Mesh(MACHINES))
        for here, there in permutations(range(MACHINES), 2):
            mesh.limit(here, there, SLOW if (here, there) == (1, 2) else FAST)
        run = stack.enter_context(Elastic(tmp_path / "run", JOB, *out, workers=1, options=options, on=mesh.on(0)))
        run.until_members(1)
        for number in range(1, MACHINES):
            log = tmp_path / f"guest-{number}"
            stack.enter_context(external_worker(mesh.on(number), run.folder, log, JOB, *out, host=f"there{number}"))
        run.until_members(MACHINES)

        def status() -> dict[str, Any]:
            command = [*mesh.on(0), *FARANDOLE, "status", "--json", "--run", str(run.folder)]
            done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True, timeout=60)
            return json.loads(done.stdout)

        run.until(lambda: bool(status()["slow_links"]), "a slow link")
        named = status()
        (slow,) = named["slow_links"]
        assert (slow["link"]["source"], slow["link"]["target"]) == ("there1", "there2")
        assert slow["link"]["bytes_per_s"] == pytest.approx(SLOW * 1e6 / 8, rel=0.3)
        assert slow["others_bytes_per_s"] >= 10 * slow["link"]["bytes_per_s"] > 0
        assert len(named["links"]) == MACHINES * (MACHINES - 1)
        run.until(lambda: bool((status()["account"] or {}).get("traffic", {}).get("sent_bytes")), "an account")
        traffic = status()["account"]["traffic"]
        assert traffic["dollars"] == pytest.approx(traffic["sent_bytes"] / 1e9 * PRICE)
        assert {each["host"] for each in traffic["hosts"]} >= {"there1", "there2"}
        assert sum(each["sent_bytes"] for each in traffic["hosts"]) == traffic["sent_bytes"]
