"""`farandole status`: where a live run stands, or what became of one that is over."""

from __future__ import annotations

from typing import Annotated

import typer

from farandole.cli.folders import RunOption, live, past_of, place_of
from farandole.control.status import Status
from farandole.errors import CoordinatorUnreachable
from farandole.observe.past import Past
from farandole.platform.output import escaped, tell


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    run: RunOption = None,
) -> None:
    """Show a run's progress and workers; after its end, its outcome and last checkpoint."""
    answer = _ask(run)
    if as_json:
        import msgspec

        tell(escaped(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()))
        return
    from rich.console import Console

    from farandole.observe.table import past_table, status_table

    if isinstance(answer, Past):
        Console().print(past_table(answer), soft_wrap=True)  # a path or a fingerprint is in one piece
    else:
        Console().print(status_table(answer))


def _ask(run: RunOption) -> Status | Past:
    try:
        with live(run) as api:
            return api.status()
    except CoordinatorUnreachable:
        answer = past_of(folder := place_of(run))
        if answer is None:
            raise
        import msgspec

        from farandole.checkpoint.store import incomplete_here, step_of
        from farandole.observe.report import checkpoints_in, settings_of

        newest = step_of(answer.checkpoint)
        left = incomplete_here(checkpoints_in(folder, settings_of(folder)), after=-1 if newest is None else newest)
        return msgspec.structs.replace(answer, incomplete=left)
