"""`-v`, the same for each verb that starts processes: how much of farandole's log is shown, here and in all of them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from farandole.platform import output
from farandole.settings import verbosity


def _verbose(times: int) -> int:
    if times:
        os.environ["FARANDOLE_VERBOSE"] = str(times)
        output.show(verbosity())
    return times


Verbose = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, callback=_verbose, show_default=False,
        help="More logging; -vv logs every message.",
    ),
]  # fmt: skip
