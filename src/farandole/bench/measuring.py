"""The runs of `farandole bench`: a supervisor that reads the workers' reports, and kills all processes once the
reports are complete, or at the first signal. Nothing of the run is kept.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from farandole.bench.figures import figures
from farandole.bench.table import round_line
from farandole.bench.terms import BenchReports, BenchTerms, Record
from farandole.checkpoint.owner import claim, new_identity, this_run
from farandole.cli.folders import lives, make_folder
from farandole.cli.supervisor import Supervisor
from farandole.code import pack, snapshot
from farandole.control.run_folder import CHECKPOINTS, CODE, PACK
from farandole.observe.live import PlainDisplay
from farandole.observe.text import describe
from farandole.platform import files
from farandole.platform.process import up_to
from farandole.pool.ec2 import run_tag
from farandole.pool.local import OWN
from farandole.protocol.coordinator.state import OwnPool, RunSettings
from farandole.protocol.events import HostEvent, NoCapacityEvent
from farandole.protocol.messages import Checkpoints, Job, RunTerms
from farandole.protocol.metrics import Line
from farandole.protocol.settings import PoolTerms
from farandole.run_options import default

WATCH_S = 0.5  # interval at which the workers' reports are read
PATIENCE_S = 3600.0  # stall timeout: no worker is replaced here, and one may wait until another's DDP gives up


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a bench: `pools`, to which this machine listens at `listen`; without a pool, this machine. `files`:
    as of `farandole run`. `environ`: variables of the workers' environment.
    """

    pools: tuple[PoolTerms, ...] = ()
    listen: str = "127.0.0.1"
    files: Path | None = None
    environ: Mapping[str, str] = {}

    @property
    def are_others(self) -> bool:
        """Return True if workers may run on other machines."""
        return any(pool.kind != "local" for pool in self.pools)


HERE = Hosts()


def settings_of(
    folder: Path, command: Sequence[str], terms: BenchTerms, threads: int, hosts: Hosts = HERE, *, pin: bool = False,
    codec: str = default("codec"),
) -> RunSettings:  # fmt: skip
    """Return the settings of a run with `terms.workers` workers.

    All have equal shares of the micro-batches, and the run ends when one of them is lost.
    """
    script, *arguments = command
    packed = pack.pack(Path.cwd(), script, hosts.files) if hosts.are_others else None
    place = make_folder(folder, command[0])
    files.make(place / CHECKPOINTS)
    checkpoints = Checkpoints(every="never", identity=new_identity())
    claim(str(place / CHECKPOINTS), this_run(checkpoints.identity, place, inside=True), alive=lives)
    count = terms.workers
    pack.keep(script, place / CODE, pack.below(script, Path.cwd(), packed.modules()) if packed else {})
    if packed:
        files.write(place / PACK, packed.content)
    return RunSettings(
        **msgspec.structs.asdict(
            RunTerms(
                wanted=count, minimum=count, maximum=count, threads=threads, pin=pin, by_speed=False,
                checkpoints=checkpoints, stall_s=PATIENCE_S, standstill_s=PATIENCE_S, codec=codec,
            )
        ),
        run=place.name, folder=str(place),
        pool=OwnPool(pool=hosts.pools[0].name if hosts.pools else OWN, host=socket.gethostname(), pid=os.getpid()),
        pools=hosts.pools, listen=hosts.listen, command=tuple(command), directory=str(Path.cwd()),
        code=(*snapshot.of_kept(place / CODE), *(((pack.FACT, packed.hash),) if packed else ())),
        job=packed and Job(
            script=packed.script, arguments=tuple(arguments), pack=packed.hash, threads=threads,
            environ=dict(hosts.environ),
        ),
        tag=run_tag(place.name, socket.gethostname(), str(place)),
    )  # fmt: skip


def round_lines(records: Mapping[str, Sequence[Record]], terms: BenchTerms, rounds: range) -> Iterator[str]:
    """Yield a line about each of the `rounds`, which all workers have finished."""
    result = figures(records, terms, rounds.stop)
    return (round_line(result, round_) for round_ in rounds)


class Measuring(Supervisor):
    """The supervisor of a bench; see the module's docstring. `lines`: returns what is shown about finished rounds.

    Attributes:
        records: the complete reports of the workers; None if the measurement is incomplete.
    """

    def __init__(
        self, settings: RunSettings, terms: BenchTerms,
        lines: Callable[[Mapping[str, Sequence[Record]], BenchTerms, range], Iterable[str]] = round_lines,
    ) -> None:  # fmt: skip
        self._quiet = Quiet(sys.stdout)
        super().__init__(settings, settings.command[0], settings.command[1:], self._quiet, specs=settings.pools)
        self._terms, self._lines = terms, lines
        self.records: Mapping[str, Sequence[Record]] | None = None

    async def _enough(self) -> None:
        reports, terms, shown = BenchReports(self._folder), self._terms, 0
        while not self._forced.is_set() and self.records is None:
            if reports.read() and (rounds := reports.rounds(terms)) > shown:
                for line in self._lines(reports.records, terms, range(shown, rounds)):
                    self._quiet.show(line)
                shown, self.records = rounds, reports.records if rounds == terms.rounds else None
            await up_to(WATCH_S, self._forced)

    def _on_signal(self, signum: int) -> None:
        self._code = self._code or 128 + signum
        self._forced.set()


class Quiet(PlainDisplay):
    """A display that shows neither events nor the workers' output: both are in the run's folder. Only what happens to
    other hosts is shown, since the measurement may wait for one.
    """

    def line(self, line: Line) -> None:
        if isinstance(line, HostEvent | NoCapacityEvent):
            self.show(describe(line))

    def outputs(self, lines: Sequence[tuple[str, str]]) -> None:
        del lines

    def summary(self, lines: Sequence[str]) -> None:
        del lines
