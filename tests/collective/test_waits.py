"""Whom an exchange waits for: the peer that is late, over the network and through shared memory; and no one unasked."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest

from tests.support.every import every
from tests.support.exchanging import Worker, on_all, workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")
LATE_S = 0.3


@every(["", "aaa", "aab"])
def test_it_is_who_is_late_that_the_others_wait_for(hosts: str) -> None:
    with workers(3, hosts=hosts) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        late = everyone[1]

        def step(worker: Worker, number: int) -> None:
            if worker is late:
                time.sleep(LATE_S)
            worker.step(number, 6, lineage)

        on_all(everyone, lambda worker: step(worker, 0))
        assert all(worker.waits.kept is None for worker in everyone), "nobody has asked"
        for worker in everyone:
            worker.waits.most, worker.waits.kept = 100, []
        on_all(everyone, lambda worker: step(worker, 1))
        for worker in everyone:
            waited: Counter[str] = Counter()
            for wait in worker.waits.kept or ():
                waited[wait.peer] += wait.ended_ns - wait.began_ns
            [(longest, ns)] = waited.most_common(1) or [("", 0)]
            if worker is late:
                assert sum(waited.values()) < 1e9 * LATE_S / 2
                continue
            assert ns > 1e9 * LATE_S / 2
            assert longest == late.name or (hosts == "aab" and longest != worker.name), "or for who passes its part on"
