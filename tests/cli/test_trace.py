"""What a trace says of the workers that are not in it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

from farandole.cli.folders import Live
from farandole.cli.inspect import _Asking
from farandole.errors import CoordinatorUnreachable
from farandole.protocol.messages import Traced


class Ends:
    """The coordinator of a run that ends: both workers have answered, and only one answer can be fetched any more."""

    def traced(self) -> Traced:
        return Traced(number=7, steps=5, asked=("w1", "w2", "w3"), answered=("w1", "w2"), gone=("w3",))

    def spans(self, worker: str) -> str:
        if worker == "w2":
            raise CoordinatorUnreachable("nobody answers")
        return worker


class Watched:
    def __init__(self, folder: Path) -> None:
        self.folder, self.api = folder, Ends()


def test_a_worker_whose_answer_can_not_be_fetched_any_more_is_named(tmp_path: Path) -> None:
    owed = Traced(number=7, steps=5, asked=("w1", "w2", "w3"), owed=("w1", "w2", "w3"))
    asking = _Asking(cast("Live", cast("Any", Watched(tmp_path))), 5, owed)
    asking.wait(threading.Event())
    assert list(asking.in_order()) == ["w1"]
    assert "w2" in asking.missing()
    assert "w3" in asking.missing()
    assert "w1" not in asking.missing()
