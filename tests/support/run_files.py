"""Every file of a run's folder, written by the code that writes it in a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path

from farandole.checkpoint.owner import mark_inside, new_identity, this_run
from farandole.checkpoint.store import Sealing, Sink, Store
from farandole.code import pack, snapshot
from farandole.control import security
from farandole.control.run_folder import hold
from farandole.control.ticket import Ticket, new_secret
from farandole.coordinator.journal import Journal
from farandole.data.ledger import Ledger
from farandole.platform import files
from farandole.platform.files import write_atomically
from farandole.pool.local import LocalPool
from farandole.worker.context import _make, _open_lines  # pyright: ignore[reportPrivateUsage]
from tests.support.checkpoints import manifest


@contextlib.contextmanager
def umask(mode: int) -> Generator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def ticket() -> Ticket:
    return Ticket(address="http://127.0.0.1:1", secret=new_secret(), run="r")


def write_ledger(folder: Path) -> None:
    ledger = Ledger(folder / "ledger" / "w1.jsonl")
    ledger.entered(origin="o")
    ledger.close()


def write_log(folder: Path) -> None:
    pool = LocalPool(["true"], logs=folder / "logs", threads=1, environ={})
    with pool._log("w1") as log:  # pyright: ignore[reportPrivateUsage]
        log.write(b"said\n")


def write_journal(folder: Path) -> None:
    Journal(folder).close()


def write_code(folder: Path) -> None:
    script = folder.parent / "train.py"
    script.write_text("import part.inner\n")
    pack.keep(str(script), folder / "code")
    (folder.parent / "part").mkdir(exist_ok=True)
    (folder.parent / "part" / "inner.py").write_text("")
    executed = snapshot.Sources(str(script), folder / "code")
    executed.source("module part.inner", Path("part", "inner.py"), str(folder.parent / "part" / "inner.py"))


def write_checkpoint(folder: Path) -> None:
    files.make(folder / "checkpoints")
    store = Store(str(folder / "checkpoints"))
    mark_inside(store.url, this_run(new_identity(), folder, inside=True))

    def produce(sink: Sink) -> bytes:
        sealing = Sealing(sink)
        sealing.write(b"state")
        return sealing.seal(manifest(1))

    store.write("step-00000001-0000000a", produce, keep=3)


def write_alone(folder: Path) -> None:
    _make(folder)
    _open_lines(folder).close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "settings.json": lambda folder: write_atomically(folder / "settings.json", b"{}"),
    "ticket": lambda folder: ticket().save(folder / "ticket"),
    "tls.pem": lambda folder: security.certificate(folder),
    "coordinator.json": lambda folder: write_atomically(folder / "coordinator.json", b"{}"),
    "lock": lambda folder: os.close(hold(folder)),
    "metrics.jsonl": write_journal,
    "journal.sqlite": write_journal,
    "journal.sqlite-wal": write_journal,
    "journal.sqlite-shm": write_journal,
    "journal.sqlite-journal": write_journal,
    "coordinator.log": lambda folder: files.append(folder / "coordinator.log").close(),
    "run.log": lambda folder: files.append(folder / "run.log").close(),
    "code.tar.gz": lambda folder: files.write(folder / "code.tar.gz", b""),
    "logs/w1.log": write_log,
    "ledger/w1.jsonl": write_ledger,
    "code/train.py": write_code,
    "code/part/inner.py": write_code,
    "checkpoints/.run": write_checkpoint,
    "checkpoints/step-00000001-0000000a.pt": write_checkpoint,
}
