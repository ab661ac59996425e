"""`farandole data prepare` and `index` make datasets of shards; `farandole probe` times an input pipeline."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.cli.options import check_script, show_script_help
from farandole.errors import UsageError
from farandole.platform.output import tell

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from farandole.data.loader import Loader
    from farandole.data.prepare.images import Images
    from farandole.data.prepare.shards import Part, ShardResult
    from farandole.data.prepare.webdataset_index import Read
    from farandole.data.probe import ProbeResult
    from farandole.training.replica import Replica


# --- indexing ---------------------------------------------------------------------------------------------------------
#
# `farandole data index`: indexes existing WebDataset tars, so that each sample can be read by itself.


def index_tars(
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

    from farandole.data.prepare.webdataset_index import listing, make_index, output_for
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

        def on_result(result: Read) -> None:
            counts["known" if result.is_noted else "bad" if result.bad else "read"] += 1
            progress.update(task, advance=1, said=", ".join(f"{count} {outcome}" for outcome, count in counts.items()))

        index = make_index(url, tars, place, processes=processes, begin=die_with_parent, on_result=on_result)
    samples = sum(shard.nsamples for shard in index.shardlist)
    tell(
        f"{place}: {samples} samples in {len(tars)} tars ({counts['read']} read, {counts['known']} known), "
        f"{time.monotonic() - began:.1f} s"
    )


# --- texts ------------------------------------------------------------------------------------------------------------
#
# `farandole data prepare --tokens`: writes texts as token shards, in a folder or on S3.

FIELD = "text"
Tokens = Annotated[
    str,
    typer.Option(
        "--tokens",
        metavar="TOKENIZER",
        help="Make tokens of texts (.txt, .jsonl, their .gz, tables) with: bytes, tiktoken:gpt2, or a tokenizer.json.",
    ),
]
End = Annotated[
    str,
    typer.Option(
        "--end", metavar="TOKEN", help="Token that ends a document.", show_default="the tokenizer's, as <|endoftext|>"
    ),
]
Vocabulary = Annotated[
    int,
    typer.Option(
        "--vocabulary", metavar="N", help="Size of the vocabulary; ids are 0 to N - 1.", show_default="the tokenizer's"
    ),
]
Lines = Annotated[
    bool,
    typer.Option(
        "--lines", help="Treat each line of a .txt file as one document.", show_default="a file is one document"
    ),
]
Field = Annotated[
    str, typer.Option("--field", help="The field with the text, in a line of .jsonl or in a row.", show_default=FIELD)
]


def prepares_texts(
    tokens: str, *, end: str, vocabulary: int, lines: bool, field: str, short_side: int, image: str, label: str
) -> bool:
    """Returns True if texts are prepared, False if images are.

    Raises:
        UsageError: an option belongs to the other kind of source, or the vocabulary is negative.
    """
    of_texts = {"--end": end, "--vocabulary": vocabulary, "--lines": lines, "--field": field}
    of_images = {"--short-side": short_side, "--image": image, "--label": label}
    stray = [name for name, value in (of_images if tokens else of_texts).items() if value]
    if stray:
        other = "images, but --tokens reads texts" if tokens else "texts; give a tokenizer with --tokens"
        raise UsageError(f"{', '.join(stray)}: only for {other}")
    if vocabulary < 0:
        raise UsageError(f"--vocabulary {vocabulary}: give the number of ids of the model")
    return bool(tokens)


def prepare_texts(
    source: str, url: str, tokens: str, *, end: str, vocabulary: int, lines: bool, field: str, shard_bytes: int,
    processes: int, part: Part,
) -> None:  # fmt: skip
    from farandole.data.prepare.shards import cut
    from farandole.data.prepare.tokens import Encoding, TextFormat, listing, prepare
    from farandole.platform.process import die_with_parent

    reading = TextFormat(lines=lines, field=field)
    listed = listing(source, reading, shard_bytes)
    passed_over = f"; {listed.passed_over} files are skipped: no text by their names" if listed.passed_over else ""
    tell(f"{source}: {listed.files} texts, {listed.size / 1e6:.1f} MB{passed_over}")
    encoding = Encoding(tokenizer=_absolute(tokens), end=end, vocabulary=vocabulary, reading=reading)
    shards = cut(listed.pieces, shard_bytes)
    total = sum(piece.size for n, (_, pieces) in enumerate(shards) if part.has(n) for piece in pieces)
    with _progress("text", total, url, part) as shown:
        index = prepare(
            listed, url, encoding, shard_bytes=shard_bytes, processes=processes, begin=die_with_parent,
            on_result=shown.on_result, part=part,
        )  # fmt: skip
    if isinstance(index, int):
        tell(f"{url}: {shown.of_part(part, index)}")
        return
    tell(
        f"{url}: {index.tokens} tokens of {index.documents} documents in {len(index.shardlist)} shards "
        f"({shown.summary}), {index.dtype}, ids below {index.vocabulary}, {shown.seconds:.1f} s"
    )


def _absolute(tokens: str) -> str:
    """Returns a path to a tokenizer as an absolute path, for processes with another working folder."""
    return str(Path(tokens).resolve()) if tokens.endswith(".json") else tokens


# --- data -------------------------------------------------------------------------------------------------------------

app = typer.Typer(help="Prepare and index datasets.", no_args_is_help=True)
app.command("index")(index_tars)
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
    tokens: Tokens = "",
    end: End = "",
    vocabulary: Vocabulary = 0,
    lines: Lines = False,
    field: Field = "",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Decode every image to verify it, or only images with a missing end."),
    ] = False,
) -> None:
    """Make shards from a folder of images, tables or texts. If it is interrupted, start it again: it continues."""
    shard_bytes, own = parse_size(shard_size), parse_part(part)
    processes = (os.cpu_count() or 1) if processes is None else processes
    if processes < 1 or short_side < 0:
        raise UsageError(f"--processes {processes} --short-side {short_side}: at least 1 process, at least 0 pixels")
    of_texts = prepares_texts(
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
        prepare_texts(
            source, destination, tokens, end=end, vocabulary=vocabulary, lines=lines, field=field or FIELD,
            shard_bytes=shard_bytes, processes=processes, part=own,
        )  # fmt: skip
        return
    listed = _listing(source, image, label, shard_bytes)
    _prepare_images(listed, destination, shard_bytes, short_side, processes, own, check)


def _check_apart(source: str, destination: str) -> None:
    from farandole.data.cache import local_path

    destination_path, source_path = local_path(destination), local_path(source)
    if (
        destination_path is not None
        and source_path is not None
        and Path(destination_path).resolve().is_relative_to(Path(source_path).resolve())
    ):
        raise UsageError(
            f"{destination} lies in {source}, so it would be read as a part of the source; use another destination"
        )


def _listing(source: str, image: str, label: str, shard_bytes: int) -> Images:
    from farandole.data.prepare import image_table
    from farandole.data.prepare import images as image_folder
    from farandole.data.prepare.table_pieces import is_table

    if is_table(source):
        listed = image_table.list_table(source, image, label, shard_bytes)
    elif image or label:
        raise UsageError(f"--image, --label: only for tables, but {source} holds none (.parquet, .arrow)")
    else:
        listed = image_folder.list_folder(Path(source))
    count, kind = sum(piece.samples for piece in listed.pieces), "tables" if is_table(source) else "images"
    passed_over = f"; {listed.passed_over} files are no {kind} by their names" if listed.passed_over else ""
    tell(f"{source}: {count} images in {len(listed.classes)} classes{passed_over}")
    return listed


def _prepare_images(
    listed: Images, url: str, shard_bytes: int, short_side: int, processes: int, part: Part, check: bool
) -> None:
    from farandole.data.prepare.images import prepare
    from farandole.data.prepare.shards import samples_of
    from farandole.platform.process import die_with_parent

    with _progress("images", samples_of(listed.pieces, shard_bytes, part), url, part) as shown:
        index = prepare(
            listed, url, shard_bytes=shard_bytes, short_side=short_side, processes=processes, begin=die_with_parent,
            on_result=shown.on_result, part=part, check=check,
        )  # fmt: skip
    if isinstance(index, int):
        tell(f"{url}: {shown.of_part(part, index)}")
        return
    images, size = (sum(column) for column in zip(*((s.nsamples, s.filesize) for s in index.shardlist), strict=True))
    tell(
        f"{url}: {images} images in {len(index.shardlist)} shards ({shown.summary}), {size / 1e6:.1f} MB, "
        f"{shown.seconds:.1f} s"
    )


class _Progress:
    """The progress of shards that are made, in a bar on the terminal."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total, said="")
        self._counts = Counter[str]()
        self._began = time.monotonic()

    def on_result(self, result: ShardResult[Any]) -> None:
        """Called when a shard is made."""
        self._counts["kept" if result.is_reused else "made" if result.record else "bad"] += 1
        summary = ", ".join(f"{count} shards {outcome}" for outcome, count in self._counts.items())
        self._progress.update(self._task, advance=result.size, said=summary)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def summary(self) -> str:
        return f"{self._counts['made']} made, {self._counts['kept']} kept"

    def of_part(self, part: Part, missing: int) -> str:
        """Returns the message for a part that is done while `missing` shards of other parts are not."""
        return (
            f"part {part.number}/{part.total} is done ({self.summary}, {self.seconds:.1f} s); {missing} shards of "
            f"other parts are missing; the machine that makes the last one writes the index"
        )


@contextmanager
def _progress(label: str, total: int, url: str, part: Part) -> Generator[_Progress]:
    """Locks the part of the folder, and shows the progress. `total`: of the work; bytes for "text"."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from farandole.data.prepare.shards import alone_at

    console = Console(highlight=False, soft_wrap=True)
    progress_column = DownloadColumn() if label == "text" else MofNCompleteColumn()
    columns = (label, BarColumn(), progress_column, TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with alone_at(url, part), Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Progress(progress, label, total)


def parse_part(text: str) -> Part:
    """Parses "K/N": part K of N.

    Raises:
        UsageError: the text does not parse, or K is not in 1 to N.
    """
    from farandole.data.prepare.shards import Part

    parsed = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    if parsed is None or not 1 <= int(parsed[1]) <= int(parsed[2]):
        raise UsageError(f"--part {text}: write K/N for machine K of N, such as 2/4")
    return Part(int(parsed[1]), int(parsed[2]))


def parse_size(text: str) -> int:
    """Returns a size in bytes, from "64MB", "500k" or "1G".

    Raises:
        UsageError: the text does not parse, or the size is too small for a shard.
    """
    parsed = re.fullmatch(r"(\d{1,12})\s*([kmg]?)b?", text.strip().lower())
    if parsed is None:
        raise UsageError(f"--shard-size {text}: write a number with k, M or G, such as 64MB")
    size = int(parsed[1]) * _UNITS[parsed[2]]
    if size < _LEAST:
        raise UsageError(
            f"--shard-size {text}: at least {_LEAST} bytes, since each shard costs one open file or one request"
        )
    return size


# --- probe ------------------------------------------------------------------------------------------------------------
#
# `farandole probe`: measures, with the script itself, if the data or the computation limits a step.


def probe(
    script: Annotated[str, typer.Argument(help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")] = None,
    *,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to time the steps after the first.")] = 10.0,
    threads: Annotated[int, typer.Option("--threads", help="Intra-op threads; use the run's number.")] = 1,
) -> None:
    """Time a script's steps: do data or compute limit them?

    The script runs in one process. Writes nothing.
    """
    if seconds <= 0 or threads < 1:
        raise UsageError(f"--seconds {seconds:g} --threads {threads}: more than 0 seconds, at least 1 thread")
    check_script(script)
    show_script_help(script, arguments)
    os.environ["FARANDOLE_TICKET"] = os.environ["FARANDOLE_FOLDER"] = ""
    os.environ["FARANDOLE_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(threads)

    from farandole.data.probe import Ended, Probe
    from farandole.script import run_alone
    from farandole.training.loop import Loop, use

    watching = Probe(seconds)

    def measured_loop(replica: Replica, loader: Loader, *others: Any, **options: Any) -> Loop:
        watching.loader = loader
        loader.measure(watching, making=True)
        return Loop(replica, loader, *others, **options)

    use(measured_loop)
    try:
        run_alone(script, arguments or [])
    except Ended:
        assert watching.loader is not None
        watching.loader.close()
        _print(watching.findings(os.cpu_count() or 1), watching.loader.batch.samples(1))
        return
    raise UsageError(
        f"{script} ended before its steps after the first had taken --seconds {seconds:g}; let it train for more "
        f"epochs, or give less"
    )


def _print(result: ProbeResult, batch: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one worker, num_workers={result.processes}, {result.cores} cores", title_justify="left")
    for name in ("", "ms a step", "samples/s", "waiting for data"):
        table.add_column(name, justify="right" if name else "left")
    for name, steps in (("first step", result.first), ("after it", result.steps)):
        table.add_row(name, f"{1e3 * batch / steps.rate:.1f}", f"{steps.rate:.0f}", f"{steps.share:.1%}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table, _making(result), sep="\n")
    bottleneck, advice = result.verdict()
    tell(f"bottleneck: {bottleneck}; {advice}")


def _making(result: ProbeResult) -> Table:
    """Returns the table of the time that processes spend to make a sample."""
    from rich.table import Table

    table = Table(title="making a sample, ms of one process; cold: waited for the store", title_justify="left")
    for name in ("", "samples", "store", "cache", "decoding", "collating", "handing over"):
        table.add_column(name, justify="right" if name else "left")
    for name, spent in (("cold", result.making.cold), ("warm", result.making.warm)):
        if spent.samples:
            phases = (spent.fetching, spent.reading, spent.computing, spent.collating, spent.handing_over)
            each = (f"{1e3 * seconds / spent.samples:.3f}" for seconds in phases)
            table.add_row(name, str(spent.samples), *each)
    return table
