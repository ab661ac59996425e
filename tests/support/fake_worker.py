"""A worker without torch or peers, for tests of what is around workers: it speaks the control protocol and obeys.

It trains nothing and sends no commit messages: it is prepared and has switched as soon as a view is proposed, and
every worker stays in round 1, or in that of the last Resume. Told to `stay`, it connects again when its connection
breaks. Files in its folder steer it: `finish` (report Finished), `fail-ID` (the script raises), `crash-ID` (exits with
code 7). Run as a process, which stays: `python fake_worker.py FOLDER [--children] [--silent]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from farandole.control.client import dial
from farandole.control.ticket import Ticket, load
from farandole.protocol import messages as m
from farandole.protocol.view import Lineage, View

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.metric_lines import stepped

SIGNATURE = m.Signature(facts=(("torch", "none"),))


class FakeWorker:
    """`await run()` returns the exit code that Goodbye said, or -1 where the connection closed without."""

    def __init__(
        self, ticket: Ticket, *, worker: str = "", pool: str = "", folder: Path | None = None, stay: bool = False
    ) -> None:
        self.ticket = ticket
        self.folder = folder
        self.stay = stay
        self.hello = m.Hello(
            kind="worker", worker=worker, host="here", pid=os.getpid(), pool=pool, session=secrets.token_hex(16)
        )
        self.id = worker
        self.view: View | None = None
        self.resumed: m.Resume | None = None
        self.prepared = 0
        self.synced = self.finished = False
        self.step = 0
        self.received: list[tuple[float, m.Message]] = []
        self.signature = SIGNATURE
        self.step_s = 0.02
        self.on_message: Callable[[m.Message], None] | None = None
        self.socket: aiohttp.ClientWebSocketResponse

    @property
    def round(self) -> int:
        """The same for all who are in one view."""
        return self.resumed.round + self.resumed.commit if self.resumed else 1

    def got(self, kind: type[m.Message]) -> list[m.Message]:
        return [message for _, message in self.received if type(message) is kind]

    async def tell(self, message: m.Message) -> None:
        with contextlib.suppress(ConnectionError):
            await self.socket.send_bytes(m.encode(message))

    async def run(self) -> int:
        training = asyncio.create_task(self._train())
        try:
            while (code := await self.converse()) < 0 and self.stay:
                await asyncio.sleep(0.05)
            return code
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)

    async def converse(self) -> int:
        """One connection, from Hello to its end."""
        self.hello.worker, self.hello.synced = self.id, self.synced
        self.hello.attempt += 1
        try:
            async with dial(self.ticket) as self.socket:
                await self.tell(self.hello)
                async for frame in self.socket:
                    message = m.decode_from_coordinator(frame.data)
                    self.received.append((time.monotonic(), message))
                    if self.on_message:
                        self.on_message(message)
                    if isinstance(message, m.Goodbye):
                        return message.code
                    await self._answer(message)
        except (aiohttp.ClientError, OSError):
            if not self.stay:
                raise
        return -1

    async def _answer(self, message: m.Message) -> None:
        match message:
            case m.Welcome():
                self.id = message.worker
                await self.tell(m.Ready(signature=self.signature))
                if self.finished:
                    await self.tell(m.Finished(fingerprint="f"))
            case m.Propose(view=view):
                await self.tell(m.Prepared(view=view.number))
                self.view, self.prepared, self.resumed = view, view.number, None
                await self.tell(m.Switched(view=view.number, round=self.round, step=self.step))
                if self.id in view.joining:
                    await self.tell(m.Synced(view=view.number))
                self.synced = True
            case m.Stop():
                view, resumed = self.view, self.resumed
                lineage = view.lineage(view.members) if view else Lineage(sets=())
                await self.tell(
                    m.Stopped(
                        stop=message.stop, view=view, round=self.round, step=self.step, has_result=True,
                        synced=self.synced, prepared=self.prepared,
                        lineage=resumed.lineage if resumed and not resumed.commit else lineage,
                    )
                )  # fmt: skip
            case m.Resume():
                self.view, self.resumed, self.prepared = message.view, message, 0
            case m.ViewWithdrawn():
                self.view, self.synced = None, False
            case m.End():
                await self.tell(m.Saved(path="checkpoint"))
            case _:
                pass

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.view is None:
                continue
            self.step += 1
            lines: tuple[m.Line, ...] = ()
            if self.view.members[:1] == (self.id,):
                view, now = self.view, time.time()
                lines = (
                    stepped(
                        self.step, loss=1 / self.step, seconds=self.step_s, view=view.number, workers=view.size,
                        time=now, total=1000,
                    ),
                )  # fmt: skip
            await self.tell(m.Heartbeat(view=self.view.number, round=1, step=self.step, lines=lines))
            if self.folder is None:
                continue
            if (self.folder / f"crash-{self.id}").exists():
                os._exit(7)
            if (self.folder / f"fail-{self.id}").exists():
                await self.tell(
                    m.ScriptFailed(traceback="Traceback (most recent call last):\n  fake\nOSError: no disk")
                )
                self.folder = None
            elif (self.folder / "finish").exists() and not self.finished:
                self.finished = True
                await self.tell(m.Finished(fingerprint="f"))


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition of another process."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """The process has ended; one that nobody has reaped yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def main(folder: Path, options: list[str]) -> int:
    me = os.environ["FARANDOLE_WORKER"]
    print(f"hello from {me}", *options)
    if "--silent" in options:
        os._exit(4)  # as if it were killed: it reports nothing
    if "--children" in options:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"child-of-{me}").write_text(str(child.pid))
    ticket = load(str(folder / "ticket"))
    worker = FakeWorker(ticket, worker=me, pool=os.environ["FARANDOLE_POOL"], folder=folder, stay=True)
    return asyncio.run(worker.run())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
