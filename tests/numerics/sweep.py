"""Which operators have the same bits on this CPU and on emulated ones, and which do not. Takes an hour or so.

    python -m tests.numerics.sweep [--cpus EPYC,Haswell] [--write] [--folder FOLDER]

What `tests/numerics/operators.py` computes agrees on all of them, or is printed. With --write the operators that were
run where all agree become `farandole/numerics/known.py`. A sweep that was cut off goes on by what is in FOLDER.

An emulator shows which instructions are chosen and what they give. Its estimates of 1/x are those of no vendor, so code
that uses them is noticed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
import threading
from collections import Counter
from pathlib import Path

from tests.support.emulated import ROOT, start

OPERATORS = ["-W", "ignore", "-m", "tests.numerics.operators"]
KNOWN = ROOT / "src" / "farandole" / "numerics" / "known.py"
HEAD = '''"""Operators that are known to be portable, by the types of their floating operands other than float32.

Made by `python -m tests.numerics.sweep --write`: each has run in some of {cases} computations, forward and backward,
which gave the same bits on {cpus}.
"""

KNOWN_BY_TYPES = {{
{names}}}

KNOWN = frozenset(f"{{name}} {{types}}".strip() for types, names in KNOWN_BY_TYPES.items() for name in names.split())
'''


class Computed:
    """What one CPU computes; what ends its process (emulators have faults of their own) is passed over and told.

    All that it prints is kept in a file of `folder`, by which it goes on where it was.
    """

    def __init__(self, cpu: str, folder: Path) -> None:
        self.cpu = cpu or "this CPU"
        self.digests: dict[str, str] = {}
        self.operators: dict[str, list[str]] = {}
        self._next = 0
        self._file = folder / f"{cpu or 'here'}.jsonl"
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                self._read(line)
        while not self._went_on(cpu):
            pass

    def _went_on(self, cpu: str) -> bool:
        before = self._next
        with start(cpu, [*OPERATORS, str(before)]) as process, self._file.open("a") as file:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                file.flush()
                self._read(line)
            errors = process.stderr.read() if process.stderr else ""
        if process.returncode and (process.returncode > 0 or self._next == before):
            raise SystemExit(f"on {self.cpu}: {errors[-2000:]}")
        if process.returncode:
            print(f"on {self.cpu} number {self._next - 1} ended the process ({process.returncode})", flush=True)
        return process.returncode == 0

    def _read(self, line: str) -> None:
        said = json.loads(line)
        if "number" in said:
            self._next = said["number"] + 1
        else:
            self.digests[said["name"]], self.operators[said["name"]] = said["digest"], said["operators"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpus", default="EPYC,Haswell")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "farandole-sweep"))
    args = parser.parse_args()
    cpus = args.cpus.split(",")
    args.folder.mkdir(exist_ok=True)
    done = dict[str, Computed]()
    threads = [
        threading.Thread(target=lambda cpu=cpu: done.update({cpu: Computed(cpu, args.folder)})) for cpu in ("", *cpus)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here, others = done.pop(""), list(done.values())
    agreed, differ, missing = split(here, others)
    for name in differ:
        print(f"differs: {name}, on {', '.join(o.cpu for o in others if o.digests[name] != here.digests[name])}")
    for name in missing:
        print(f"not computed everywhere: {name}")
    known, not_known = judged(here, agreed, differ)
    print(f"{len(agreed)} agree, {len(differ)} differ, {len(missing)} are missing; {len(known)} operators are known")
    print("run where something differs alone:", *sorted(not_known), sep="\n    ")
    if args.write:
        KNOWN.write_text(written(known, len(agreed), cpus))


def written(known: set[str], cases: int, cpus: list[str]) -> str:
    """The module that says so."""
    by_types = dict[str, list[str]]()
    for operator in sorted(known):
        name, _, types = operator.partition(" ")
        if "complex" in types or "profiler" in name:  # the first are more than we promise
            continue
        by_types.setdefault(types, []).append(name)
    names = ""
    for types, of_them in sorted(by_types.items()):
        lines = textwrap.wrap(" ".join(of_them), 116, break_on_hyphens=False, break_long_words=False)
        names += f'    "{types}": """\n' + "".join(f"    {line}\n" for line in lines) + '    """,\n'
    return HEAD.format(cases=f"{cases:,}", cpus=f"a CPU with AVX-512, {' and '.join(cpus)}", names=names)


def split(here: Computed, others: list[Computed]) -> tuple[list[str], list[str], list[str]]:
    """The computations that agree, that differ, and that some CPU lacks."""
    everywhere = [name for name in here.digests if all(name in other.digests for other in others)]
    differ = [n for n in everywhere if any(other.digests[n] != here.digests[n] for other in others)]
    agreed = [n for n in everywhere if n not in differ and not here.digests[n].startswith("raises")]
    return agreed, differ, [name for name in here.digests if name not in everywhere]


def judged(here: Computed, agreed: list[str], differ: list[str]) -> tuple[set[str], set[str]]:
    """The operators that have run where all agree; and those that have run only where something differs."""
    good = Counter(operator for name in agreed for operator in here.operators[name])
    bad = Counter(operator for name in differ for operator in here.operators[name])
    return set(good), set(bad) - set(good)


if __name__ == "__main__":
    sys.exit(main())
