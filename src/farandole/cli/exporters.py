"""Exports of `farandole run` to TensorBoard, Weights & Biases and Prometheus: options, and the export process.

The export process runs beside the run. Its output is shown. It is restarted if it ends too early, and it may end after
the run. Nothing waits for it before the run ends. A missing package is an error before anything is started.
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
EXPORT_END_S = 20.0  # time that the export process has after the run's end
MISSING = 2  # its exit code if a package is missing
RESTARTS = 3  # restarts of a process that ends too early
RESTART_S = 5.0


def exports_of(tensorboard: bool, directory: Path | None, wandb: str | None, token: Path | None) -> Exports:
    """Returns the exports of a command line, and checks them before anything is started.

    TensorBoard's folder is inside the run's folder, unless a `directory` is given.

    Raises:
        UsageError: a package is missing, or the token's file holds no valid token.
    """
    from farandole.control import ticket
    from farandole.control.run_folder import TENSORBOARD
    from farandole.coordinator.prometheus import require_prometheus
    from farandole.observe.tensorboard import require_tensorboard
    from farandole.observe.wandb import require_wandb
    from farandole.protocol.settings import Exports

    if wandb == "":
        raise UsageError("--wandb '': give the name of a project")
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
    """The export process of one run, if `exports` need one. Call `begin` once, and `close` in any case."""

    def __init__(self, folder: Path, exports: Exports, show: Callable[[str], None]) -> None:
        self._folder, self._exports, self._show = folder, exports, show
        self._process: asyncio.subprocess.Process | None = None
        self._tending: asyncio.Task[None] | None = None
        self._over = False

    def begin(self, address: str) -> None:
        """Starts the export process. The run serves at `address`; its first lines come next."""
        if self._exports.metrics_token:
            self._show(f"for Prometheus: {address}/metrics, with the token of {self._exports.metrics_token}")
        if self._exports.tensorboard:
            self._show(f"for TensorBoard: tensorboard --logdir {self._exports.tensorboard}")
        if self._exports.from_file:
            self._tending = asyncio.create_task(self._tend())

    async def close(self, given_up: asyncio.Event) -> None:
        """Lets the process export the rest after the run's end, for up to `EXPORT_END_S` or until `given_up` is set."""
        self._over = True
        process, tending = self._process, self._tending
        if tending is None:
            return
        if process is not None and process.stdin is not None:
            process.stdin.close()
        enough = asyncio.create_task(given_up.wait())
        await asyncio.wait({tending, enough}, timeout=EXPORT_END_S, return_when=asyncio.FIRST_COMPLETED)
        if process is not None and process.returncode is None:
            self._show("the run's exports are not complete and are stopped: they lack the end of the run")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in (tending, enough):
            task.cancel()
        await asyncio.wait({tending, enough})

    async def _tend(self) -> None:
        """Starts the process, shows its output, and restarts it if it ends too early."""
        for tried in range(1 + RESTARTS):
            if self._over:
                return
            try:
                process = self._process = await self._start()
            except OSError as error:
                self._show(f"the run's exports can't be started ({error.strerror}); training continues")
                return
            assert process.stdout is not None
            async for line in process.stdout:
                self._show(line.decode(errors="replace").rstrip("\n"))
            code = await process.wait()
            if self._over or code == MISSING:  # the process printed that
                return
            consequence = "farandole restarts it" if tried < RESTARTS else "the run is no longer exported"
            self._show(
                f"the process that exports the run ended with exit code {code}; {consequence}, and training continues"
            )
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
