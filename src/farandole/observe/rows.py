"""The progress as a table of plain text: a header, and a row now and then; other lines come between. Pure."""

from __future__ import annotations

from farandole.membership.metrics import StepLine
from farandole.observe.gauges import factor_words, rate_words
from farandole.observe.words import clock, number

HEADER_ROWS = 25  # after so many it is repeated,
AWAY_LINES, AWAY_ROWS = 50, 5  # or after so many lines of others, which have scrolled it away
TITLES = ("Time", "Step", "Epoch", "Workers", "Speed", "Loss", "LR")
WIDTHS = (8, 9, 5, 7, 8, 10, 10)  # characters, at least


class Rows:
    """`of` a step its row, with a header before it where one is due; tell it of the lines of others, as they pass."""

    def __init__(self) -> None:
        self._widths = [0] * len(TITLES)
        self._rows = self._others = 0  # since the header

    def passed(self, lines: int) -> None:
        self._others += lines

    def of(self, line: StepLine, wanted: int, samples_per_s: float | None) -> list[str]:
        cells = (
            clock(line),
            str(line.step) if line.total is None else f"{line.step}/{line.total}",
            str(line.epoch),
            f"{line.workers}/{wanted}" if wanted else str(line.workers),
            "" if samples_per_s is None else f"{rate_words(samples_per_s)}/s",
            "" if line.loss is None else number(line.loss),
            "" if line.learning_rate is None else number(line.learning_rate),
        )
        longest = 2 * len(str(line.total)) + 1 if line.total else 0
        least = (WIDTHS[0], max(WIDTHS[1], longest), *WIDTHS[2:])
        widths = [max(w) for w in zip(self._widths, least, map(len, cells), strict=True)]
        away = self._others >= AWAY_LINES and self._rows >= AWAY_ROWS
        header = [_aligned(TITLES, widths)] if widths != self._widths or self._rows >= HEADER_ROWS or away else []
        if header:
            self._rows = self._others = 0
        self._widths = widths
        self._rows += 1
        return [*header, f"{_aligned(cells, widths)}{factor_words(line)}".rstrip()]


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
