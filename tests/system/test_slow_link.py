"""Three machines with a link that is far slower than the others: the status names it, and `auto` compresses for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
LEAST_SAVED, MOST_SAVED = 0.05, 0.02  # parts of the bytes: of float32 gradients, and of each 64th message


def test_the_slow_link_is_named_and_the_bytes_are_priced(tmp_path: Path) -> None:
    rates = {pair: SLOW if pair == (1, 2) else FAST for pair in permutations(range(MACHINES), 2)}
    with training(tmp_path, rates, "--traffic-price", str(PRICE)) as (run, status):
        run.until(lambda: bool(status()["slow_links"]), "a slow link")
        named = status()
        slow, *others = named["slow_links"]
        assert (slow["link"]["source"], slow["link"]["target"], others) == ("there1", "there2", [])
        assert slow["link"]["bytes_per_s"] == pytest.approx(SLOW * 1e6 / 8, rel=0.3)
        assert slow["others_bytes_per_s"] >= 10 * slow["link"]["bytes_per_s"] > 0
        assert len(named["links"]) == MACHINES * (MACHINES - 1)
        run.until(lambda: bool((status()["account"] or {}).get("traffic", {}).get("dollars")), "an account")
        traffic = status()["account"]["traffic"]
        zones = {each["host"]: each["zone"] for each in traffic["hosts"]}
        assert (len(zones), zones["there1"], zones["there2"]) == (MACHINES, "east", "")
        assert sum(each["sent_bytes"] for each in traffic["hosts"]) == traffic["sent_bytes"]
        assert 0 < traffic["between_zones_bytes"] < traffic["sent_bytes"]
        assert traffic["dollars"] == pytest.approx(traffic["between_zones_bytes"] / 1e9 * PRICE)


def test_with_the_codec_auto_messages_are_compressed_where_the_link_is_slow(tmp_path: Path) -> None:
    """The other links have no limit."""
    with training(tmp_path, dict.fromkeys(((1, 2), (2, 1)), SLOW), "--codec", "auto") as (run, status):

        def saved() -> dict[str, float]:
            """By target, of what there1 sends."""
            return {link["target"]: link["saved"] for link in status()["links"] if link["source"] == "there1"}

        def is_settled() -> bool:
            found = saved()
            return len(found) == MACHINES - 1 and found.pop("there2") > LEAST_SAVED and max(found.values()) < MOST_SAVED

        run.until(is_settled, f"the choice; saved: {saved()}")


@contextmanager
def training(
    folder: Path, rates: Mapping[tuple[int, int], int], *options: str
) -> Iterator[tuple[Elastic, Callable[[], dict[str, Any]]]]:
    """A run on three machines, the last two of them there1 in zone east and there2, with its status.

    `rates`: of links in Mbit/s; the others have no limit.
    """
    out = (str(folder / "out"), "--width", "65536", "--epochs", "1000")
    options = ("--listen", Mesh(MACHINES).addresses[0], "--max", str(MACHINES), *options)
    with ExitStack() as stack:
        mesh = stack.enter_context(Mesh(MACHINES))
        for (here, there), mbit in rates.items():
            mesh.limit(here, there, mbit)
        run = Elastic(folder / "run", JOB, *out, workers=1, options=list(options), on=mesh.on(0))
        stack.enter_context(run)
        run.until_members(1)
        for number in range(1, MACHINES):
            log = folder / f"guest-{number}"
            place = {"host": f"there{number}", "zone": "east" if number == 1 else ""}
            stack.enter_context(external_worker(mesh.on(number), run.folder, log, JOB, *out, **place))
        run.until_members(MACHINES)

        def status() -> dict[str, Any]:
            command = [*mesh.on(0), *FARANDOLE, "status", "--json", "--run", str(run.folder)]
            done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, check=True, timeout=60)
            return json.loads(done.stdout)

        yield run, status
