"""`farandole data prepare`: images, or texts, become shards that any worker can read, here or on S3."""

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
    from farandole.data.prepare.images.images import Images
    from farandole.data.prepare.images.shards import Part

app = typer.Typer(help="Prepare and index datasets.", no_args_is_help=True)
app.command("index")(indexing.index)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST = 1 << 16


@app.callback()
def data() -> None:
    """Prepare and index datasets."""


@app.command("prepare")
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of one folder a class, with images anywhere in it; of texts, with --tokens; or tables "
            "(.parquet, .arrow): a file, a folder, a pattern or a URL of them."
        ),
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A folder, or a URL such as s3://bucket/folder.")],
    *,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Size of the images or text in one shard, such as 64MB.")
    ] = "64MB",
    short_side: Annotated[
        int,
        typer.Option(
            "--short-side",
            metavar="PIXELS",
            help="Shrink images whose short side is longer than this.",
            show_default="leave them",
        ),
    ] = 0,
    processes: Annotated[
        int | None, typer.Option("--processes", help="How many processes to use.", show_default="one a core")
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            "--part",
            metavar="K/N",
            help="This machine is number K of N machines that prepare the same source together.",
        ),
    ] = "1/1",
    image: Annotated[
        str,
        typer.Option(
            "--image",
            metavar="COLUMN",
            help="Column with the images of a table.",
            show_default="what the schema notes, or image",
        ),
    ] = "",
    label: Annotated[
        str,
        typer.Option(
            "--label",
            metavar="COLUMN",
            help="Column with the labels of a table.",
            show_default="what the schema notes, or label",
        ),
    ] = "",
    tokens: texts.Tokens = "",
    end: texts.End = "",
    vocabulary: texts.Vocabulary = 0,
    lines: texts.Lines = False,
    field: texts.Field = "",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Decode every image to verify it, or only images with a missing end."),
    ] = False,
) -> None:
    """Make shards from a folder of images, tables or texts. If it is interrupted, start it again: it continues."""
    from farandole.data.prepare.images.shards import alone_at

    shard_bytes, own = parse_size(shard_size), parse_part(part)
    processes = (os.cpu_count() or 1) if processes is None else processes
    if processes < 1 or short_side < 0:
        raise UsageError(f"--processes {processes} --short-side {short_side}: at least 1 process, at least 0 pixels")
    of_texts = texts.asked(
        tokens,
        end=end,
        vocabulary=vocabulary,
        lines=lines,
        field=field,
        short_side=short_side,
        image=image,
        label=label,
    )
    _check_apart(source, destination)
    if of_texts:
        texts.prepare_texts(
            source, destination, tokens, end=end, vocabulary=vocabulary, lines=lines, field=field or texts.FIELD,
            shard_bytes=shard_bytes, processes=processes, part=own,
        )  # fmt: skip
        return
    listed = _listing(source, image, label, shard_bytes)
    with alone_at(destination, own):
        _make(listed, destination, shard_bytes, short_side, processes, own, check)


def _check_apart(source: str, destination: str) -> None:
    from farandole.data.cache import local_path

    into, of = local_path(destination), local_path(source)
    if into is not None and of is not None and Path(into).resolve().is_relative_to(Path(of).resolve()):
        raise UsageError(f"{destination} lies in {source}, and would be taken for a part of it; put it elsewhere")


def _listing(source: str, image: str, label: str, shard_bytes: int) -> Images:
    from farandole.data.prepare.images import images as image_folder
    from farandole.data.prepare.images.shards import is_table

    if is_table(source):
        listed = image_folder.list_table(source, image, label, shard_bytes)
    elif image or label:
        raise UsageError(f"--image, --label: of tables, and {source} holds none (.parquet, .arrow)")
    else:
        listed = image_folder.list_folder(Path(source))
    count, kind = sum(piece.samples for piece in listed.pieces), "tables" if is_table(source) else "images"
    passed_over = f"; {listed.passed_over} files are no {kind} by their names" if listed.passed_over else ""
    tell(f"{source}: {count} images in {len(listed.classes)} classes{passed_over}")
    return listed


def _make(
    listed: Images, url: str, shard_bytes: int, short_side: int, processes: int, part: Part,
    check: bool,
) -> None:  # fmt: skip
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farandole.data.prepare.images.images import Made, prepare
    from farandole.data.prepare.images.shards import samples_of
    from farandole.platform.process import die_with_parent

    console = Console(highlight=False, soft_wrap=True)
    counts = Counter[str]()
    began = time.monotonic()
    columns = ("images", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=samples_of(listed.pieces, shard_bytes, part), said="")

        def made(result: Made) -> None:
            counts["kept" if result.kept else "made" if result.record else "bad"] += 1
            said = ", ".join(f"{count} shards {what}" for what, count in counts.items())
            progress.update(task, advance=result.samples, said=said)

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
    images, size = (sum(its) for its in zip(*((s.nsamples, s.filesize) for s in index.shardlist), strict=True))
    tell(
        f"{url}: {images} images in {len(index.shardlist)} shards ({counts['made']} made, {counts['kept']} kept), "
        f"{size / 1e6:.1f} MB, {time.monotonic() - began:.1f} s"
    )


def parse_part(text: str) -> Part:
    """The K-th of N, from "K/N".

    Raises:
        UsageError: it does not parse, or K is not one of N.
    """
    from farandole.data.prepare.images.shards import Part

    parsed = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if parsed is None or not 1 <= int(parsed[1]) <= int(parsed[2]):
        raise UsageError(f"--part {text}: K/N, the K-th of N machines, as 2/4")
    return Part(int(parsed[1]), int(parsed[2]))


def parse_size(text: str) -> int:
    """Bytes, from "64MB", "500k", "1G".

    Raises:
        UsageError: it does not parse, or is too little for a shard.
    """
    parsed = re.fullmatch(r"(\d{1,12})\s*([kmg]?)b?", text.strip().lower())
    if parsed is None:
        raise UsageError(f"--shard-size {text}: a number with k, M or G, as 64MB")
    size = int(parsed[1]) * _UNITS[parsed[2]]
    if size < _LEAST:
        raise UsageError(f"--shard-size {text}: at least {_LEAST} bytes; a shard is one file to open, or one request")
    return size
