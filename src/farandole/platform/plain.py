"""Text of others as plain text: what a terminal would act on, or would show as something else, is taken out.

Scripts colour their output, move the cursor, set titles, and print what they have read from files of others. In their
log files all of it stays as it is; what we show has nothing that is not to be seen: no control characters but tabs and
line ends, and no marks that turn the direction of writing or have no width. Names hold none of these in the first
place. Pure.
"""

from __future__ import annotations

import re

# Unicode's categories Cc, Cf, Zl, Zp and Cs
UNSEEN = (
    "\\x00-\\x1f\\x7f-\\x9f\\u00ad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u0890\\u0891\\u08e2\\u180e\\u200b-\\u200f"
    "\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000110bd\\U000110cd\\U00013430-\\U0001343f"
    "\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a\\U000e0001\\U000e0020-\\U000e007f"
)
NAME = rf"^[^{UNSEEN}]*\Z"
LONGEST_NAME = 256  # characters
SHOWN = "\ufffd"

_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and the like, to their end or the line's: titles, links
    r"|\x1b[ -/]*[0-~]"  # two characters and more: resets, character sets
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI in one character
    re.MULTILINE,
)
_UNSEEN = re.compile(f"[{UNSEEN}]")
_BUT_LINES = re.compile(rf"(?![\t\n])[{UNSEEN}]")
_NAME = re.compile(NAME)


def plain(text: str) -> str:
    """`text` without control sequences, and a replacement character for each character left that is not to be seen."""
    return _BUT_LINES.sub(SHOWN, _SEQUENCES.sub("", text))


def one_line(text: str) -> str:
    """... and for each tab and line end: what is to be a part of a line of ours."""
    return _UNSEEN.sub(SHOWN, text)


def escaped(json_text: str) -> str:
    """JSON that says the same, in which such characters are escaped. Layout stays."""
    return _BUT_LINES.sub(_escape, json_text)


def _escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it. Python gives other bytes of a command line, or of a path, as surrogates."""
    return text.isprintable() or text == text.encode(errors="replace").decode()


def is_name(text: str) -> bool:
    """Whether everybody who sees it sees the same."""
    return len(text) <= LONGEST_NAME and _NAME.search(text) is not None
