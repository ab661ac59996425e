"""`farandole status`: where a live run stands."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live


def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    run: RunOption = None,
) -> None:
    """Show a live run's view, progress and workers."""
    with live(run) as api:
        answer = api.status()
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return
    from rich.console import Console

    from farandole.observe.table import status_table

    Console().print(status_table(answer))
