"""Coverage-guided fuzzing: `python -m tests.fuzz.harness TARGET SECONDS`; exit code 0 if clean.

TARGET is a name of the table in `targets.py`, or `all`: then an input's first byte says which. A finding ends it with a
traceback, and the input that did it is in ./crash-*.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["farandole", "msgspec", "aiohttp"], enable_loader_override=False):
    from tests.fuzz.targets import Target, targets
    from tests.fuzz.wire import Wire


def every(table: dict[str, Target]) -> Target:
    each = tuple(table.values())

    def feed(data: bytes) -> None:
        each[data[0] % len(each) if data else 0].feed(data[1:])

    return Target(feed, tuple(bytes([n]) + seed for n, target in enumerate(each) for seed in target.seeds))


def main(name: str, seconds: int) -> None:
    table = targets(Wire())
    target = every(table) if name == "all" else table[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        arguments = [f"-max_total_time={seconds}", "-max_len=4096", "-rss_limit_mb=4096", corpus]
        atheris.Setup([sys.argv[0], *arguments], target.feed)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
