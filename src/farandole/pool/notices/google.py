"""What Google says to a spot or preemptible VM: that it is preempted. There is no advice.

`instance/preempted` is FALSE, and TRUE from the notice on. With `wait_for_change` a request is answered once that
changes, or after `timeout_sec`; with `last_etag` also where it has changed between two requests. The VM is stopped 30 s
later, by best effort; nothing says when that was counted from, so the 30 s begin when it is heard. Where a longer
notice was asked for (120 s), what is not used of it is not waited for. An answer without the header
`Metadata-Flavor: Google` is somebody else's, and 503 is to be tried again.

Sources, in docs.cloud.google.com/compute/docs: instances/create-use-spot, metadata/querying-metadata.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from farandole.membership.hosts import Notified
from farandole.pool.notices.base import ANSWER_S, Answer, Metadata, Unanswered, refused

ROOT = "/computeMetadata/v1/instance/"
PREEMPTED = ROOT + "preempted"
FLAVOR = "Google"
NOTICE_S = 30.0
WAIT_S = 60


class Google:
    """Of one VM."""

    name = "Google"

    def __init__(self, metadata: Metadata, pause_s: float = 1.0, clock: Callable[[], float] = time.time) -> None:
        """`pause_s`: a server that does not wait is asked no oftener."""
        self.pause_s = pause_s
        self._metadata, self._clock = metadata, clock
        self._etag = ""
        self._goes_at = math.nan

    async def here(self) -> bool:
        await self._get(ROOT + "id")
        return True

    async def read(self) -> Notified | None:
        waiting = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(WAIT_S)} if self._etag else {}
        answer = await self._get(PREEMPTED, answer_s=WAIT_S + 5.0 if waiting else ANSWER_S, **waiting)
        said = answer.body.decode("ascii", "replace").strip().upper()
        if said not in ("TRUE", "FALSE"):
            raise refused(answer, PREEMPTED)
        self._etag = answer.headers.get("etag", "")
        if said == "FALSE":
            self._goes_at = math.nan
            return None
        if math.isnan(self._goes_at):
            self._goes_at = self._clock() + NOTICE_S
        return Notified(at=self._goes_at, reason="Google preempts this VM")

    async def _get(self, path: str, *, answer_s: float = ANSWER_S, **parameters: str) -> Answer:
        answer = await self._metadata.ask("GET", path, {"Metadata-Flavor": FLAVOR}, answer_s=answer_s, **parameters)
        if answer.headers.get("metadata-flavor") != FLAVOR:
            raise Unanswered(f"{path}: status {answer.status}, and not from Google's metadata server")
        if answer.status != 200:
            raise refused(answer, path)
        return answer
