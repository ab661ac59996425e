"""What others print, as plain text."""

from __future__ import annotations

import pytest

from farandole.plain import plain

TEXTS = [
    ("loss 0.5\tstep 3", "loss 0.5\tstep 3", "as it is"),
    ("a\nb", "a\nb", "lines stay lines"),
    ("grün 🎉 é", "grün 🎉 é", "letters of all kinds"),
    ("\x1b[1;31mred\x1b[0m", "red", "colours"),
    ("\x1b[2J\x1b[3;4Hover", "over", "the cursor, the screen"),
    ("\x1b[?1049hscreen", "screen", "private modes"),
    ("\x1b]0;owned\x07title", "title", "a title, ended by BEL"),
    ("\x1b]52;c;Zm9v\x1b\\clipboard", "clipboard", "the clipboard, ended by ST"),
    ("\x1b]8;;http://x\nnext", "\nnext", "never ended: to the end of its line"),
    ("\x1bP+q\x1b\\dcs", "dcs", "a device control string"),
    ("\x1bcreset", "reset", "a reset of the terminal"),
    ("\x9b2Jcsi", "csi", "CSI in one character"),
    ("a\x08b\x07c\rd", "a\ufffdb\ufffdc\ufffdd", "single controls are shown to be there"),
    ("\x1b", "\ufffd", "a lone escape"),
]


@pytest.mark.parametrize(("text", "expected", "remark"), TEXTS)
def test_plain(text: str, expected: str, remark: str) -> None:
    assert plain(text) == expected, remark
