"""Whom an exchange waits for: the peer that is late, over the network and through shared memory; and no one unasked."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support.every import every
from tests.support.exchanging import Worker, on_all, until, workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several loopback addresses, /proc/self/fd")


@every(["", "aaa", "aab"])
def test_it_is_who_is_late_that_the_others_wait_for(hosts: str) -> None:
    with workers(3, hosts=hosts) as everyone:
        lineage = (tuple(worker.name for worker in everyone),)
        late = everyone[1]
        came: list[int] = []  # when it did

        def waits(worker: Worker) -> bool:
            peer, _ = worker.exchange.waiting_for or ("", 0.0)
            return peer == late.name or (hosts == "aab" and worker is everyone[2] and peer != "")  # w0 passes it on

        def step(worker: Worker, number: int) -> None:
            if worker is late:
                until(lambda: all(waits(other) for other in everyone if other is not late))
                came.append(time.monotonic_ns())
            worker.step(number, 6, lineage)

        on_all(everyone, lambda worker: step(worker, 0))
        assert all(worker.waits.recorded is None for worker in everyone), "nobody has asked"
        for worker in everyone:
            worker.waits.most, worker.waits.recorded = 100, []
        came.clear()
        on_all(everyone, lambda worker: step(worker, 1))
        for worker in everyone:
            kept = worker.waits.recorded or []
            if worker is late:
                assert all(wait.began_ns > came[0] for wait in kept)
                continue
            peer = next(wait.peer for wait in kept if wait.ended_ns > came[0])
            assert peer == late.name or (hosts == "aab" and peer != worker.name), "or for who passes its part on"
