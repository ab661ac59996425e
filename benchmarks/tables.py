"""Prints a table: for the terminal with rich, or as Markdown for the README."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from rich.console import Console
from rich.table import Table


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> None:
    """One table; the first column is text, the others are set to the right."""
    if markdown:
        print(f"\n{title}\n")
        print("| " + " | ".join(columns) + " |")
        print("| --- |" + " ---: |" * (len(columns) - 1))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 140)
    console.print(table)


def number(value: float, digits: int = 1) -> str:
    return "-" if isnan(value) else f"{value:,.{digits}f}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`min..max`, or a dash for nothing."""
    known = [value for value in values if not isnan(value)]
    return f"{min(known):,.{digits}f}..{max(known):,.{digits}f}" if known else "-"
