"""`farandole data prepare`: an image folder, or texts, become shards that any worker can read, here or on S3."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.cli import indexing, texts
from farandole.errors import UsageError
from farandole.platform.output import tell

if TYPE_CHECKING:
    from rich.console import Console

    from farandole.data.cutting import Part
    from farandole.data.prepare import Listing

app = typer.Typer(help="Data sets.", no_args_is_help=True)
app.command("index")(indexing.index)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST = 1 << 16


@app.callback()
def data() -> None:
    """Data sets."""


@app.command("prepare")
def prepare(
    source: Annotated[
        Path,
        typer.Argument(help="A folder of one folder a class, with images anywhere in it; of texts, with --tokens."),
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A folder, or a URL such as s3://bucket/folder.")],
    *,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Of the images or the text in a shard, as 64MB.")
    ] = "64MB",
    short_side: Annotated[
        int, typer.Option("--short-side", metavar="PIXELS", help="Make larger images smaller.  [default: leave them]")
    ] = 0,
    processes: Annotated[int | None, typer.Option("--processes", help="[default: one a core]")] = None,
    part: Annotated[
        str, typer.Option("--part", metavar="K/N", help="Of N machines with the same source this is the K-th.")
    ] = "1/1",
    tokens: texts.Tokens = "",
    end: texts.End = "",
    vocabulary: texts.Vocabulary = 0,
    lines: texts.Lines = False,
    field: texts.Field = "",
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Decode every image, or only those whose end is missing.")
    ] = False,
) -> None:
    """Make shards of an image folder, or of texts. Started again after whatever ended it, it goes on where it was."""
    from rich.console import Console

    from farandole.data.cache import local_path
    from farandole.data.making import alone_at
    from farandole.data.prepare import listing

    shard_bytes, own = parse_size(shard_size), parse_part(part)
    processes = (os.cpu_count() or 1) if processes is None else processes
    if processes < 1 or short_side < 0:
        raise UsageError(f"--processes {processes} --short-side {short_side}: at least 1 process, at least 0 pixels")
    if texts.asked(tokens, end=end, vocabulary=vocabulary, lines=lines, field=field, short_side=short_side):
        texts.prepare_texts(
            source, destination, tokens, end=end, vocabulary=vocabulary, lines=lines, field=field or texts.FIELD,
            shard_bytes=shard_bytes, processes=processes, part=own,
        )  # fmt: skip
        return
    local = local_path(destination)
    if local is not None and Path(local).resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{destination} lies in {source}, and would be taken for a class; put it elsewhere")
    listed = listing(source)
    passed_over = f"; {listed.passed_over} files are no images by their names" if listed.passed_over else ""
    console = Console(highlight=False, soft_wrap=True)
    tell(f"{source}: {len(listed.files)} images in {len(listed.classes)} classes{passed_over}")

    with alone_at(destination, own):
        _make(console, listed, destination, shard_bytes, short_side, processes, own, check)


def _make(
    console: Console, listed: Listing, url: str, shard_bytes: int, short_side: int, processes: int, part: Part,
    check: bool,
) -> None:  # fmt: skip
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farandole.data.cutting import files_of
    from farandole.data.prepare import Made, prepare
    from farandole.platform.parent import die_with_parent

    counts = Counter[str]()
    began = time.monotonic()
    columns = ("images", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=files_of(listed.files, shard_bytes, part), said="")

        def made(result: Made) -> None:
            counts["kept" if result.kept else "made" if result.record else "bad"] += 1
            said = ", ".join(f"{count} shards {what}" for what, count in counts.items())
            progress.update(task, advance=result.files, said=said)

        index = prepare(
            listed, url, shard_bytes=shard_bytes, short_side=short_side, processes=processes, begin=die_with_parent,
            made=made, part=part, check=check,
        )  # fmt: skip
    if isinstance(index, int):
        tell(
            f"{url}: part {part.number}/{part.of} is done ({counts['made']} shards made, {counts['kept']} kept, "
            f"{time.monotonic() - began:.1f} s); {index} shards of other parts are not there yet: whoever makes "
            f"the last of them writes the index"
        )
        return
    total = sum(shard.filesize for shard in index.shardlist)
    tell(
        f"{url}: {len(listed.files)} images in {len(index.shardlist)} shards ({counts['made']} made, "
        f"{counts['kept']} kept), {total / 1e6:.1f} MB, {time.monotonic() - began:.1f} s"
    )


def parse_part(text: str) -> Part:
    """The K-th of N, from "K/N".

    Raises:
        UsageError: it does not parse, or K is not one of N.
    """
    from farandole.data.cutting import Part

    parsed = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if parsed is None or not 1 <= int(parsed[1]) <= int(parsed[2]):
        raise UsageError(f"--part {text}: K/N, the K-th of N machines, as 2/4")
    return Part(int(parsed[1]), int(parsed[2]))


def parse_size(text: str) -> int:
    """Bytes, from "64MB", "500k", "1G".

    Raises:
        UsageError: it does not parse, or is too little for a shard.
    """
    parsed = re.fullmatch(r"(\d+)\s*([kmg]?)b?", text.strip().lower())
    if parsed is None:
        raise UsageError(f"--shard-size {text}: a number with k, M or G, as 64MB")
    size = int(parsed[1]) * _UNITS[parsed[2]]
    if size < _LEAST:
        raise UsageError(f"--shard-size {text}: at least {_LEAST} bytes; a shard is one file to open, or one request")
    return size
