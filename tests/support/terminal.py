"""A command on a pseudo-terminal of its own, and what is on it so far."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Sequence

from tests.support.harness import ENVIRON

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class OnATerminal:
    def __init__(self, command: Sequence[str]) -> None:
        self._end, theirs = pty.openpty()
        environ = {**ENVIRON, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.seen = ""

    def until(self, words: str) -> None:
        while words not in self.seen:
            self.seen += self._more()

    def rest(self) -> str:
        """All of it, once the process has ended."""
        try:
            while more := self._more():
                self.seen += more
        except OSError:  # the other end is closed
            pass
        os.close(self._end)
        return self.seen

    def _more(self) -> str:
        return os.read(self._end, 65536).decode(errors="replace")


def lines_of(seen: str) -> list[str]:
    """What stands in its lines, without what moves the cursor."""
    return CONTROL.sub("", seen).replace("\r", "\n").split("\n")
