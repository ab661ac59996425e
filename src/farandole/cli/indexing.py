"""`farandole data index`: tars that were made elsewhere become a dataset of which each sample can be reached."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.errors import UsageError
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.data.prepare.images.webdataset_index import Read


def index(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A folder of WebDataset tars, or a URL as s3://bucket/folder.")
    ],
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="PLACE", help="Where to write the index.", show_default="index.json beside the tars"
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", help="How many processes to use.", show_default="one a core")
    ] = None,
) -> None:
    """Write the index that farandole.WebDataset needs. If it is interrupted, start it again: it continues."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farandole.data.prepare.images.webdataset_index import listing, make_index, output_for
    from farandole.platform.process import die_with_parent

    processes = (os.cpu_count() or 1) if processes is None else processes
    if processes < 1:
        raise UsageError(f"--processes {processes}: at least 1")
    url = url.rstrip("/")
    tars = listing(url)
    total = sum(tar.size for tar in tars)
    place = output_for(url, output)
    tell(f"{url}: {len(tars)} tars, {total / 1e6:.1f} MB")
    counts = Counter[str]()
    began = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    columns = ("tars", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(tars), said="")

        def done(result: Read) -> None:
            counts["known" if result.known else "bad" if result.bad else "read"] += 1
            progress.update(task, advance=1, said=", ".join(f"{count} {what}" for what, count in counts.items()))

        made = make_index(url, tars, place, processes=processes, begin=die_with_parent, done=done)
    samples = sum(shard.nsamples for shard in made.shardlist)
    tell(
        f"{place}: {samples} samples in {len(tars)} tars ({counts['read']} read, {counts['known']} known), "
        f"{time.monotonic() - began:.1f} s"
    )
