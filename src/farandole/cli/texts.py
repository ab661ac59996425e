"""`farandole data prepare --tokens`: texts become token shards that any worker can read, here or on S3."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farandole.errors import UsageError
from farandole.platform.output import tell

if TYPE_CHECKING:
    from farandole.data.prepare.images.shards import Part

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


def asked(
    tokens: str, *, end: str, vocabulary: int, lines: bool, field: str, short_side: int, image: str, label: str
) -> bool:
    """Whether texts are to be prepared.

    Raises:
        UsageError: an option belongs to the other kind of source.
    """
    of_texts = {"--end": end, "--vocabulary": vocabulary, "--lines": lines, "--field": field}
    of_images = {"--short-side": short_side, "--image": image, "--label": label}
    stray = [name for name, value in (of_images if tokens else of_texts).items() if value]
    if stray:
        other = "images, and --tokens makes tokens of texts" if tokens else "texts; give a tokenizer by --tokens"
        raise UsageError(f"{', '.join(stray)}: of {other}")
    if vocabulary < 0:
        raise UsageError(f"--vocabulary {vocabulary}: as many ids as the model has")
    return bool(tokens)


def prepare_texts(
    source: str, destination: str, tokens: str, *, end: str, vocabulary: int, lines: bool, field: str,
    shard_bytes: int, processes: int, part: Part,
) -> None:  # fmt: skip
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from farandole.data.prepare.images.shards import alone_at, cut
    from farandole.data.prepare.images.tokens import Encoding, Made, Reading, listing, prepare
    from farandole.platform.process import die_with_parent

    reading = Reading(lines=lines, field=field)
    listed = listing(source, reading, shard_bytes)
    passed_over = f"; {listed.passed_over} files are no texts by their names" if listed.passed_over else ""
    tell(f"{source}: {listed.files} texts, {listed.size / 1e6:.1f} MB{passed_over}")
    encoding = Encoding(tokenizer=_absolute(tokens), end=end, vocabulary=vocabulary, reading=reading)
    counts = Counter[str]()
    began = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    columns = ("text", BarColumn(), DownloadColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with alone_at(destination, part), Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shards = cut(listed.pieces, shard_bytes)
        mine = sum(piece.size for n, (_, pieces) in enumerate(shards) if part.has(n) for piece in pieces)
        task = progress.add_task("", total=mine, said="")

        def made(result: Made) -> None:
            counts["kept" if result.kept else "made" if result.record else "bad"] += 1
            said = ", ".join(f"{count} shards {what}" for what, count in counts.items())
            progress.update(task, advance=result.size, said=said)

        index = prepare(
            listed, destination, encoding, shard_bytes=shard_bytes, processes=processes, begin=die_with_parent,
            made=made, part=part,
        )  # fmt: skip
    done = f"{counts['made']} made, {counts['kept']} kept"
    if isinstance(index, int):
        tell(
            f"{destination}: part {part.number}/{part.of} is done ({done}, {time.monotonic() - began:.1f} s); {index} "
            f"shards of other parts are not there yet: whoever makes the last of them writes the index"
        )
        return
    tell(
        f"{destination}: {index.tokens} tokens of {index.documents} documents in {len(index.shardlist)} shards "
        f"({done}), {index.dtype}, ids below {index.vocabulary}, {time.monotonic() - began:.1f} s"
    )


def _absolute(tokens: str) -> str:
    """A path as processes of another working folder would find it."""
    return str(Path(tokens).resolve()) if tokens.endswith(".json") else tokens
