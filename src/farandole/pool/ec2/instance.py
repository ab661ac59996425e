"""On an EC2 instance: learn from its metadata which run it belongs to, join that, and return when it is over.

Whoever has called this shuts the instance down then, however it ended (`template.py`), so it bounds everything: an
instance that can't reach a run, or whose run is out of reach, returns after the orphan limit; one that has failed is
kept for as long as its tag says; and none outlives the run's end that its tag names.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from farandole.errors import FarandoleError
from farandole.pool.agents.post import UNFIT
from farandole.pool.ec2 import template
from farandole.pool.ec2.api import Aws
from farandole.pool.notices import clouds

_log = logging.getLogger(__name__)

ORPHAN_S = 600.0  # without a run
AGAIN_S, LONGEST_S = 1.0, 15.0
METADATA, TOKEN_S = "http://169.254.169.254", 600
TRIES = 5


class Metadata:
    """Of this instance, by a token (IMDSv2). boto3's own variable names another address."""

    def __init__(self) -> None:
        self.address = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", METADATA).rstrip("/")

    def read(self, what: str) -> str | None:
        """None: there is no such thing. Raises FarandoleError: nobody answers."""
        failure: OSError = TimeoutError()
        for tried in range(TRIES):
            try:
                token = self._ask("api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}, "PUT")
                return self._ask(f"meta-data/{what}", {"X-aws-ec2-metadata-token": token}, "GET")
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                failure = error
            except OSError as error:
                failure = error
            time.sleep(0.2 * 2.0**tried)
        raise FarandoleError(f"the metadata of this instance, {self.address}: {failure}") from None

    def _ask(self, path: str, headers: dict[str, str], method: str) -> str:
        request = urllib.request.Request(f"{self.address}/latest/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            return answer.read().decode()

    def tag(self, name: str) -> str:
        """ "" for none."""
        return self.read(f"tags/instance/{name}") or ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`until`: Unix time, infinite for none."""

    keep_s: float = 0.0
    until: float = float("inf")


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def serve(orphan_s: float = ORPHAN_S) -> None:
    """Join the run that the tags name, until it is over or can't be reached for so long."""
    metadata = Metadata()
    me = metadata.read("instance-id") or ""
    limits = Limits(
        keep_s=60 * _number(metadata.tag(template.KEEP), 0.0),
        until=_number(metadata.tag(template.UNTIL), float("inf")),
    )
    reason, reached, unfit = "", time.monotonic(), False
    pause_s = AGAIN_S
    while time.time() < limits.until and time.monotonic() - reached < orphan_s and not unfit:
        begun = time.monotonic()
        try:
            reason, unfit = _join(metadata, me, limits.until)
        except FarandoleError as error:
            reason = str(error)
        if not reason:
            return
        if time.monotonic() - begun > orphan_s:  # it has served meanwhile
            reached = time.monotonic()
        _log.warning("%s", reason)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
    kept = min(limits.keep_s, limits.until - time.time())
    if kept > 0:
        _log.warning("kept for a look for %.0f min: %s", kept / 60, reason)
        time.sleep(kept)


def _join(metadata: Metadata, me: str, until: float) -> tuple[str, bool]:
    """Have its agent serve to its end. Returns "" where the run has let it go, else what went wrong; and whether this
    instance is no use to the run.
    """
    run, pool = metadata.tag(template.RUN), metadata.tag(template.POOL) or "ec2"
    if not run:
        return f"{me} has no tag {template.RUN}, or may not read its tags: it belongs to no run", False
    region = metadata.read("placement/region") or ""
    ticket = Aws(region).secret(template.secret_name(run, pool))
    words = [sys.executable, "-m", "farandole", "agent", "-", "--pool", pool, "--host", me, "--wait"]
    words += ["--notices", clouds.EC2]
    environ = {**os.environ, "FARANDOLE_METADATA": metadata.address}
    left = until - time.time()
    try:
        done = subprocess.run(
            words, input=ticket.encode(), stderr=subprocess.PIPE, env=environ, check=False,
            timeout=None if left > 1e9 else left,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the run's time is over", False
    said = done.stderr.decode(errors="replace").strip().splitlines()
    why = said[-1] if said else f"the agent ended with code {done.returncode}"
    return (why if done.returncode else ""), done.returncode == UNFIT
