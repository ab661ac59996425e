"""Where else `farandole run` shows a run: its options for that, and the process that writes those files.

That process is started beside the run, shows what it prints, is started again where it ends too early, and may come
to its end after the run's. Nothing waits for it before. A package that is missing is an error before anything is
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.errors import UsageError
from farandole.platform.files import append

if TYPE_CHECKING:
    from farandole.protocol.settings import Exports


TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", help="Write metrics for TensorBoard to FOLDER/tensorboard.", rich_help_panel="Watching"
    ),
]
TensorBoardDir = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard-dir", metavar="DIR", help="Write them to this folder instead.", rich_help_panel="Watching"
    ),
]
Wandb = Annotated[
    str | None,
    typer.Option(
        "--wandb",
        metavar="PROJECT",
        help="Log metrics to this project of Weights & Biases.",
        rich_help_panel="Watching",
    ),
]
MetricsToken = Annotated[
    Path | None,
    typer.Option(
        "--metrics-token",
        metavar="FILE",
        help="Serve /metrics for Prometheus at the run's address, to clients with the token in this file.",
        rich_help_panel="Watching",
    ),
]
EXPORT_END_S = 20.0  # that it has after the run's end
MISSING = 2  # its exit code where a package is
RESTARTS = 3  # of a process that ends too early
RESTART_S = 5.0


def asked(tensorboard: bool, directory: Path | None, wandb: str | None, token: Path | None) -> Exports:
    """What a command line asks for, looked at before anything is started. TensorBoard's folder is in the run's unless
    another `directory` is named.

    Raises:
        UsageError: a package is missing, or the token's file is none.
    """
    from farandole.control import ticket
    from farandole.control.run_folder import TENSORBOARD
    from farandole.coordinator.prometheus import require_prometheus
    from farandole.observe.tensorboard import require_tensorboard
    from farandole.observe.wandb import require_wandb
    from farandole.protocol.settings import Exports

    if wandb == "":
        raise UsageError("--wandb '': name the project")
    if tensorboard or directory:
        require_tensorboard()
    if wandb:
        require_wandb()
    if token:
        require_prometheus()
        ticket.load_scrape_token(token)
    place = str(directory.absolute()) if directory else TENSORBOARD if tensorboard else ""
    return Exports(tensorboard=place, wandb=wandb or "", metrics_token=str(token.absolute()) if token else "")


class Exporters:
    """The process of one run, where `exports` ask for any. `begin`, and `close` in any case."""

    def __init__(self, folder: Path, exports: Exports, show: Callable[[str], None]) -> None:
        self._folder, self._exports, self._show = folder, exports, show
        self._process: asyncio.subprocess.Process | None = None
        self._tending: asyncio.Task[None] | None = None
        self._over = False

    def begin(self, address: str) -> None:
        """The run is at `address`, and its first lines are about to be written."""
        if self._exports.metrics_token:
            self._show(f"for Prometheus: {address}/metrics, with the token of {self._exports.metrics_token}")
        if self._exports.tensorboard:
            self._show(f"for TensorBoard: tensorboard --logdir {self._exports.tensorboard}")
        if self._exports.from_file:
            self._tending = asyncio.create_task(self._tend())

    async def close(self, given_up: asyncio.Event) -> None:
        """The run is over: what is left is exported, for up to `END_S`, or until that is given up."""
        self._over = True
        process, tending = self._process, self._tending
        if tending is None:
            return
        if process is not None and process.stdin is not None:
            process.stdin.close()
        enough = asyncio.create_task(given_up.wait())
        await asyncio.wait({tending, enough}, timeout=EXPORT_END_S, return_when=asyncio.FIRST_COMPLETED)
        if process is not None and process.returncode is None:
            self._show("the run's exports are not ready, and are ended: they lack the end of the run")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in (tending, enough):
            task.cancel()
        await asyncio.wait({tending, enough})

    async def _tend(self) -> None:
        """Start it, show what it says, and start it again where it ends too early."""
        for tried in range(1 + RESTARTS):
            if self._over:
                return
            try:
                process = self._process = await self._start()
            except OSError as error:
                self._show(f"the run's exports can't be started ({error.strerror}); the training goes on")
                return
            assert process.stdout is not None
            async for line in process.stdout:
                self._show(line.decode(errors="replace").rstrip("\n"))
            code = await process.wait()
            if self._over or code == MISSING:  # which was said
                return
            again = "it is started again" if tried < RESTARTS else "the run is not exported any more"
            self._show(f"the process that exports the run has ended ({code}); {again}, and the training goes on")
            await asyncio.sleep(RESTART_S)

    async def _start(self) -> asyncio.subprocess.Process:
        from farandole.control.run_folder import EXPORTS_LOG

        words = [sys.executable, "-m", "farandole.observe.export_process", str(self._folder)]
        words += [f"--tensorboard={self._exports.tensorboard}"] if self._exports.tensorboard else []
        words += [f"--wandb={self._exports.wandb}"] if self._exports.wandb else []
        environ = {name: value for name, value in os.environ.items() if name != "FARANDOLE_WORKER"}  # see `Strays`
        with append(self._folder / EXPORTS_LOG) as log:
            return await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                start_new_session=True, env=environ,
            )  # fmt: skip
