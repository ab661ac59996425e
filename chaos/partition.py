"""A run over hosts in namespaces, whose links are broken and mended by its seed.

Host 0 has the coordinator and the pool's one worker, whose process nothing is done to: it always holds the state. Each
other host has an external worker, which reaches the coordinator over TLS; when it is gone, another one joins. A break
is mended before the next one.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.attack import Struck
from chaos.launched import PACE_S, Launched
from chaos.network import Network

HOSTS = 3
GATHERING_PACE_S = 20 * PACE_S  # so the run is not over before everyone has come

# What happens to a link, how often, and for how long. After 3 s of silence a worker connects again, after 5 s the
# coordinator does without it. TCP sends again after 0.2, 0.4, 0.8, ... s, so what is mended within 1 s is heard of
# within 2, and what is mended within 1.5 s within 3.2.
KINDS = {
    "link down": (3, 0.1, 1.5),
    "link down at the limit": (1, 1.5, 6.0),
    "link down for long": (2, 6.0, 8.0),
    "link slow": (2, 1.0, 3.0),
    "cut to the coordinator": (1, 1.5, 8.0),
    "cut from the coordinator": (1, 1.5, 8.0),
    "cut between two": (2, 0.1, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class Break:
    """Of the link of `host`, for `seconds`, `after_s` the one before; `other` and `kbit` where the kind has them."""

    kind: str
    host: int
    other: int
    seconds: float
    kbit: int
    after_s: float

    def __str__(self) -> str:
        return f"{self.kind}, host {self.host}, for {self.seconds:.2f} s"


def breaks(seed: int) -> tuple[Break, ...]:
    draw = random.Random(seed)
    chosen: list[Break] = []
    for _ in range(draw.randint(2, 4)):
        kind = draw.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
        host = draw.randrange(0 if kind.startswith("link") else 1, HOSTS)
        other = draw.choice([peer for peer in range(1, HOSTS) if peer != host])
        seconds, kbit = draw.uniform(*KINDS[kind][1:]), draw.choice((500, 2000, 8000))
        chosen.append(
            Break(kind=kind, host=host, other=other, seconds=seconds, kbit=kbit, after_s=draw.uniform(0.2, 1.5))
        )
    return tuple(chosen)


class Partition:
    """A run over the hosts of `network`, which are in `zones` zones in turn.

    Use once, as a context: `gather`, `strike` each, then `run.finish()`.
    """

    def __init__(
        self, network: Network, folder: Path, digits: Path, options: Sequence[str] = (), zones: int = 1
    ) -> None:
        self.network, self._zones = network, zones
        self.struck: list[Struck] = []
        self._external_workers: dict[int, subprocess.Popen[bytes]] = {}
        words = ["--workers", "1", "--listen", network.address(0), *options]
        self.run = Launched(folder, digits, words, within=network.within(0), environ=self._environ(0),
                            pace_s=GATHERING_PACE_S)  # fmt: skip

    def __enter__(self) -> Partition:
        return self

    def __exit__(self, *error: object) -> None:
        self.run.__exit__(None, None, None)

    def gather(self) -> bool:
        """Whether all are in the view: an external worker on each host but the first. The run is slow until then."""
        run, everyone = self.run, len(self.network.hosts)
        run.until(lambda: (run.folder / "ticket").exists() or run.over)
        self.invite()
        run.until(lambda: len(run.watch.members) == everyone or run.over)
        run.pace(PACE_S)
        return len(run.watch.members) == everyone

    def invite(self) -> None:
        """An external worker to every host that has none."""
        for host in self.network.hosts[1:]:
            gone = host not in self._external_workers or self._external_workers[host].poll() is not None
            if gone and self.run.join(within=self.network.within(host), environ=self._environ(host)):
                self._external_workers[host] = self.run.external_workers[-1]

    def strike(self, first: Break, *others: Break) -> None:
        """Break all at once, wait, mend; when and for how long, the first one says."""
        run = self.run
        run.wait(first.after_s)
        if run.over:
            return
        began, step = run.seconds, run.watch.step
        several = [(what, *self._breaking(what)) for what in (first, *others)]
        for what, broken, _ in several:
            broken()
            self.struck.append(Struck(seconds=began, kind=what.kind, what=str(what), target=f"h{what.host}", step=step))
        run.wait(first.seconds)
        for _, _, mend in several:
            mend()

    def _breaking(self, what: Break) -> tuple[Callable[[], None], Callable[[], None]]:
        network, host, other = self.network, what.host, what.other
        match what.kind:
            case "link slow":
                return lambda: network.slow(host, what.kbit), lambda: network.hurry(host)
            case "cut to the coordinator":
                return lambda: network.cut(host, 0), lambda: network.mend(host, 0)
            case "cut from the coordinator":
                return lambda: network.cut(0, host), lambda: network.mend(0, host)
            case "cut between two":
                return lambda: network.cut(host, other), lambda: network.mend(host, other)
            case _:
                return lambda: network.pull(host), lambda: network.plug(host)

    def _environ(self, host: int) -> dict[str, str]:
        return {"FARANDOLE_HOST": f"h{host}", "FARANDOLE_ZONE": f"z{host % self._zones}"}


def fight(partition: Partition, seed: int) -> int | None:
    """A run under its seed's breaks, to its end. Its exit code, None if it did not end."""
    run = partition.run
    if partition.gather():
        for what in breaks(seed):
            partition.strike(what)
            partition.invite()
    return run.finish()
