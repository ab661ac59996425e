"""Runs the commands of the pages in an empty folder.

    python -m docs.check [PATTERN]      only commands that begin with this regular expression

tests/cli/test_commands_of_pages.py shows that the command line accepts each command; this shows that each ends with
exit code 0. docs/stand_ins.py makes what they name: hosts, a store, EC2, data. SMALLER makes long commands short; the
output has the line that was run. A command of TESTED_BY is run by that test instead.

First the commands without a live run, in the order of the pages, then those of a live run, which
`farandole run --detach` begins and `farandole stop` ends.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from docs.stand_ins import example_data, prepare, services
from tests.support import browser, sshd
from tests.support.pages import PAGES, commands

LIMIT_S = 600
SHORT, ENDLESS = 2, 1_000_000  # epochs
TESTED_BY = {  # a pattern of commands: the test that runs them
    r"--pool kubernetes|--run /runs/mine": "tests/pool/kubernetes/test_page.py",
    r"--pool slurm": "tests/pool/slurm/test_page.py",
    r"--pool ray": "tests/pool/ray/test_page.py",
    r"--take-over": "tests/system/test_taken_over.py",
}
NEEDS = {  # a pattern of commands: whether this machine can run them, and why not
    r"^hosts|--pool ssh|--config": (sshd.AVAILABLE, sshd.WHY_NOT),
    r"--png": (bool(browser.INSTALLED), browser.WHY_NOT),
}
SMALLER = {  # a pattern of a part of commands: what stands for it. FOLDER is the folder of this check
    r"(?<![\w.:/])~?/(?=\w)": "FOLDER/root/",
    r"10\.0\.0\.5": "0.0.0.0",
    r"size=[48]\b": "size=1",
    r"tiktoken:gpt2": "tiktoken:small",
    r"(^bench .*--json )(?=scaling|batches)": r"\1measured-",  # `plan` reads the prepared ones: larger machines
    r"TRACE\.\.\.": "us-east-2b_v100_1.json us-west-2a_v100_1.json",
    r"--steps 8 --rounds 3": "--steps 2 --rounds 1",
    r"(benchmarks/resnet\.py.*)": r"\1 --side 32 --batch 8 --micro 4 --samples 4000",
    r"(^bench batch .*)train\.py": r"\1examples/digits.py --policy per-worker --epochs 30",
}
LIVE = (  # how the commands of a live run begin, in the order in which they are run
    "run --detach", "join", "status", "numerics --against run", "ticket new", "trace", "release", "ticket revoke",
    "scale", "stop",
)  # fmt: skip
BEFORE = {  # a pattern of commands: what is run before the first of them
    r"runs/|^(account|dashboard|evaluate|replay|report)": "run --folder runs/done train.py",
    r"runs/B": "run --folder runs/B train.py",
    r"^numerics .*other\.json": "numerics --json other.json",
    r"^hosts clean": "run --folder runs/hosts --listen 0.0.0.0 --pool ssh,hosts=hosts.txt train.py",
}
ENVIRON_OF = {r"^join (- |\S*/farandole-network-)": {"FARANDOLE_HOST": "node2"}}  # the machine where a page starts it
Value = TypeVar("Value")


def page_commands() -> list[str]:
    """Each command of the pages, once, as a shell reads it."""
    return list(dict.fromkeys(shlex.join(words) for page in PAGES for words in commands(page.read_text())))


def of(line: str, table: Mapping[str, Value]) -> list[Value]:
    """Return the values of the patterns that match the command."""
    plain = " ".join(shlex.split(line))
    return [value for pattern, value in table.items() if re.search(pattern, plain)]


def reason(line: str) -> str:
    """Why a command is not run here; "" if it is."""
    missing = [why for is_there, why in of(line, NEEDS) if not is_there]
    return next((f"{test} runs them" for test in of(line, TESTED_BY)), missing[0] if missing else "")


def smaller(line: str, folder: Path, names: Mapping[str, str]) -> str:
    """The command with its stand-ins. `names`: those of its runs, tickets and examples, which are known here only."""
    for pattern, text in [*SMALLER.items(), *names.items()]:
        line = re.sub(pattern, text, line)
    return line.replace("FOLDER", str(folder))


class Call:
    """A command that runs, in `folder`. `<` reads a file, as in a shell; `>` is dropped."""

    def __init__(self, line: str, folder: Path, environ: Mapping[str, str], epochs: int = SHORT) -> None:
        (folder / "epochs").write_text(str(epochs))
        self.line, self._folder, self._environ, self._began = line, folder, environ, time.monotonic()
        words = shlex.split(line)
        ends = [words.index(sign) for sign in "<>" if sign in words]
        source = folder / words[words.index("<") + 1] if "<" in words else Path("/dev/null")
        self._output = Path(tempfile.mkstemp(dir=folder / "outputs")[1])
        with source.open("rb") as stdin, self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farandole", *words[: min(ends, default=None)]], cwd=folder, stdin=stdin,
                env=dict(ChainMap(*of(line, ENVIRON_OF), dict(environ))), stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, or the end of the command."""
        while not condition() and self.process.poll() is None:
            time.sleep(0.2)

    def end(self) -> bool:
        """Wait for its end, and print it. Returns True if its exit code is 0."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # so that it ends its own processes
            code = self.process.wait(60) or 1
        print(
            f"{'FAILS' if code else 'ok':6}{time.monotonic() - self._began:6.1f} s  farandole {self.line}", flush=True
        )
        if code:
            print(*(f"      | {each}" for each in self.output.splitlines()[-8:]), f"      exit code {code}", sep="\n")
        return not code

    def also(self, line: str) -> Call:
        """Start another command beside this one."""
        return Call(line, self._folder, self._environ, ENDLESS)


def visit(call: Call) -> None:
    """Open the page of the dashboard, then press Ctrl-C."""
    call.until(lambda: "http://" in call.output)
    if found := re.search(r"http://\S+", call.output):
        urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(found[0], timeout=60).close()
    call.process.send_signal(signal.SIGINT)


def second_host(call: Call) -> None:
    """Type the printed line on the second host."""
    call.until(lambda: "farandole join" in call.output)
    if found := re.search(r"farandole (join \S+)", call.output):
        other = call.also(found[1])
        call.process.wait(LIMIT_S)
        other.process.wait(LIMIT_S)


MEANWHILE = {  # a pattern of commands: what is done while they run
    r"^dashboard": visit,
    r"^bench network .*--listen 0\.0\.0\.0$": second_host,
}


def alone(lines: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[bool]:
    """Run the commands that take no live run, or a finished one: runs/done."""
    names = {rf"(examples/{example}\.py.*)": rf"\1 {short}" for example, short in example_data(folder).items()}
    names[r"(^probe .*)--epochs \d+"] = r"\1--epochs 1000"  # it ends the script itself
    names[r"(^hosts clean .*)runs/NAME"] = r"\1runs/hosts"
    names[r"runs/(NAME|A|20261121-160210-train)\b"] = "runs/done"
    for line in [line for pattern, line in BEFORE.items() if any(of(each, {pattern: None}) for each in lines)]:
        yield Call(line, folder, environ).end()
    for line in lines:
        endless = line.startswith(("bench", "probe"))  # they end the script themselves
        call = Call(smaller(line, folder, names), folder, environ, ENDLESS if endless else SHORT)
        for act in of(line, MEANWHILE):
            act(call)
        yield call.end()


def live(lines: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Iterator[bool]:
    """Run the commands of a live run, from `run --detach` to `stop`."""
    joined, run, names = list[Call](), "", dict[str, str]()
    for line in sorted(lines, key=lambda line: next(n for n, begin in enumerate(LIVE) if line.startswith(begin))):
        call = Call(smaller(line, folder, names), folder, environ, ENDLESS)
        if line.startswith("join"):
            joined.append(call)
            metrics = folder / run / "metrics.jsonl"
            call.until(lambda: len(re.findall(r'"ready".*"guest', metrics.read_text())) == len(joined))  # noqa: B023
            continue
        yield call.end()
        if line.startswith("run"):
            newest = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
            run = f"runs/{newest.name}"
            names = {r"runs/(NAME|job1)": run, r"run\.ticket|TICKET": f"{run}/ticket"}
    for call in joined:
        yield call.end()


def main() -> None:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    lines = page_commands()
    chosen = [line for line in lines if not reason(line) and re.match(only, line)]
    of_live = [line for line in chosen if line.startswith(LIVE)]
    if of_live and only and not only.startswith("run --detach"):
        of_live = ["run --detach train.py", *of_live, "stop"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "work"
        prepare(folder, [smaller(line, folder, {}) for line in lines])
        environ = stack.enter_context(services(folder))
        results = [*alone([line for line in chosen if line not in of_live], folder, environ)]
        results += live(list(dict.fromkeys(of_live)), folder, environ)
    for why, number in Counter(map(reason, lines)).items():
        print(f"{number:4} {f'are not run: {why}' if why else 'are run'}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
