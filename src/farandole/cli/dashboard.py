"""`farandole dashboard`: a run in the browser, live or over."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli.folders import RunOption, live, place_of
from farandole.control.run_folder import held
from farandole.errors import CoordinatorUnreachable
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.control.client import Api
    from farandole.observe.dashboard.server import Server


def dashboard(
    run: RunOption = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1.", show_default="any")] = 0,
) -> None:
    """Show a run in the browser: its workers over time, curves and cost, with buttons to scale, release and stop."""
    asyncio.run(_serve(place_of(run), port))


async def _serve(folder: Path, port: int) -> None:
    from farandole.observe.dashboard.server import Server
    from farandole.observe.dashboard.watch import Watch

    def api() -> Api | None:
        with suppress(CoordinatorUnreachable):
            return live(folder).api
        return None

    watch = Watch(folder, api, lambda: held(folder))
    server = Server(watch, api)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    address = await server.start(port)
    following = asyncio.create_task(watch.follow())
    following.add_done_callback(lambda _: ended.set())
    tell(f"dashboard of {watch.name}: {server.link()}")
    here = address.rpartition(":")[2]
    tell(f"the link works once; of another machine: ssh -L {here}:127.0.0.1:{here} THIS-MACHINE, and the same link")
    if sys.stdin.isatty():
        tell("Enter: another link; Ctrl-C: the end (the run goes on)")
        loop.add_reader(sys.stdin, _another, server)
    try:
        await ended.wait()
        if following.done():
            following.result()
    finally:
        following.cancel()
        await server.close()


def _another(server: Server) -> None:
    if sys.stdin.readline():
        tell(server.link())
    else:
        asyncio.get_running_loop().remove_reader(sys.stdin)
