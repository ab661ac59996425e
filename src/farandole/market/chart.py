"""Draws the cost of each strategy, over all windows, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from farandole.market.comparison import BOUND, CHEAPEST, StrategyResult

WIDE, HIGH = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 190, 720, 20, 290
COLOUR, COLOUR_OF_BOUNDS = "#1f6feb", "#57606a"


def cost_chart(results: Sequence[StrategyResult]) -> str:
    """Return an SVG with a row for each strategy: its dollars in all windows.

    The line is from the least to the most, the bar from the 10th to the 90th percentile, the mark is the mean.
    """
    row_high = (BOTTOM - TOP) / max(len(results), 1)
    highest = max((dollars for result in results for dollars in result.dollars if math.isfinite(dollars)), default=1.0)

    def place(dollars: float) -> float:
        return LEFT + (RIGHT - LEFT) * dollars / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>',
    ]
    for part in range(5):
        x = place(highest * part / 4)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{BOTTOM}" stroke="#e1e4e8"/>')
        parts.append(f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{highest * part / 4:,.0f}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">dollars</text>')
    for number, result in enumerate(results):
        y = TOP + row_high * (number + 0.5)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(result.strategy)}</text>')
        dollars = [each for each in result.dollars if math.isfinite(each)]
        colour = COLOUR_OF_BOUNDS if result.strategy in (BOUND, CHEAPEST) else COLOUR
        said = f"late in {result.missed} of {len(result.outcomes)}" if result.missed else ""
        if dollars:
            low, high = (float(each) for each in np.quantile(dollars, (0.1, 0.9)))
            least, most, middle = place(min(dollars)), place(max(dollars)), place(sum(dollars) / len(dollars))
            parts += [
                f'<line x1="{least:.1f}" y1="{y:.1f}" x2="{most:.1f}" y2="{y:.1f}" stroke="{colour}"/>',
                f'<rect x="{place(low):.1f}" y="{y - 6:.1f}" width="{place(high) - place(low):.1f}" height="12" '
                f'fill="{colour}" fill-opacity="0.35"/>',
                f'<rect x="{middle - 2:.1f}" y="{y - 9:.1f}" width="4" height="18" fill="{colour}"/>',
            ]
        parts.append(f'<text x="{RIGHT + 20}" y="{y + 4:.1f}">{escape(said)}</text>')
    return "\n".join([*parts, "</svg>", ""])
