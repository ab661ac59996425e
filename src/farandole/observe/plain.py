"""Text of others as plain text: what a terminal would act on is taken out.

Scripts colour their output, move the cursor, set titles, and print what they have read from files of others. In their
log files all of it stays as it is; what we show has no control characters but tabs and line ends. Pure.
"""

from __future__ import annotations

import re

SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and the like, to their end or the line's: titles, links
    r"|\x1b[ -/]*[0-~]"  # two characters and more: resets, character sets
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI in one character
    re.MULTILINE,
)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SHOWN = "\ufffd"


def plain(text: str) -> str:
    """`text` without control sequences, and a replacement character for each control character that is left."""
    return CONTROLS.sub(SHOWN, SEQUENCES.sub("", text))
