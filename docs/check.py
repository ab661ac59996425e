"""Runs the commands of the pages that one machine can run, in an empty folder, and says why it runs the others not.

    python -m docs.check [PATTERN]      only commands that begin with this regular expression

tests/cli/test_commands_of_pages.py shows that the command line accepts each command; this shows that each ends with
exit code 0. First the commands without a live run, in the order of the pages, then those of a live run, which
`farandole run --detach` begins and `farandole stop` ends.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.pages import PAGES, ROOT, changed, commands, readme_script

LIMIT_S = 400
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
LEFT_OUT = {  # a pattern of the words: why such a command is not run here
    r"--pool (?!local)": "it takes machines of a pool",
    r"^hosts\b": "it takes hosts",
    r"^pool list": "it takes an account of AWS",
    r"\w+://": "it takes a store elsewhere",
    r"(^|['\s])~?/\w|10\.0\.0\.5": "it takes files or addresses of another machine",
    r"(examples/(?!digits)|clothing)\S*": "it takes data that is not here",
    r"^(simulate|plan)\b": "it takes recorded traces of a market",
    r"^(bench (steps|batch|scaling)|.*benchmarks/)": "it takes minutes",
    r"^(top|dashboard)\b": "it ends only when somebody ends it",
    r"^bench network": "it waits for another machine",
    r" < ": "it reads what another command has printed",
    r"--notices ec2": "it takes an instance of EC2",
    r"--take-over": "it takes a run whose machine is lost",
}
LIVE = ("status", "scale", "release", "stop", "trace", "join", "ticket", "numerics --against", "run --detach")
ORDER = (
    "run --detach", "join", "status", "numerics", "ticket new", "trace", "release", "ticket revoke", "scale", "stop",
)  # fmt: skip
HISTORY = "0 2\n3 3\n5 1\n"
PRICES = "date = 2026-11-01\n[pools]\nlocal = 0.05\n"


def reason(line: str) -> str:
    """Why a command is not run here; "" if it is."""
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, line)), "")


def script() -> str:
    """The README's script on fewer samples, with an evaluation; EPOCHS says how long it trains."""
    return changed(
        readme_script(),
        {
            "import torch\n": "import os\n\nimport torch\n",
            "20_000": "2_000",
            "epochs=20": 'epochs=int(os.environ["EPOCHS"])',
            "if run.is_leader:": "    if step.ends_epoch:\n        run.log(accuracy=run.evaluate(model, train_set, "
            "lambda logits, y: logits.argmax(1) == y))\nif run.is_leader:",
        },
    )


def prepare(folder: Path) -> None:
    """Put what the commands name into the folder."""
    (folder / "train.py").write_text(script())
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "train.py").write_text(script())
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("h.txt", "history.txt"):
        (folder / name).write_text(HISTORY)
    (folder / "prices.toml").write_text(PRICES)
    (folder / "token").write_text("0123456789abcdef" * 4 + "\n")
    (folder / "token").chmod(0o600)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a text\n" * 100)


def call(words: Sequence[str], folder: Path, epochs: int) -> subprocess.Popen[str]:
    """Start one, with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "farandole", *words], cwd=folder, env={**ENVIRON, "EPOCHS": str(epochs)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(line: str, process: subprocess.Popen[str]) -> bool:
    """Wait for one, and print what became of it. Returns True if its exit code is 0."""
    began = time.monotonic()
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # so that it ends its own processes
        output = f"{process.communicate(timeout=60)[0]}\nno end within {LIMIT_S} s"
    print(
        f"{'ok' if not process.returncode else 'FAILS':6}{time.monotonic() - began:6.1f} s  farandole {line}",
        flush=True,
    )
    if process.returncode:
        print(*(f"      | {each}" for each in output.splitlines()[-8:]), sep="\n", flush=True)
    return not process.returncode


def named(words: Sequence[str], names: dict[str, str]) -> list[str]:
    """The words, with the names that stand for a run, a ticket or a file; a redirection is dropped."""
    kept = list(words[: words.index(">")] if ">" in words else words)
    for before, after in names.items():
        kept = [word.replace(before, after) for word in kept]
    return kept


def alone(lines: Sequence[str], folder: Path) -> Iterator[bool]:
    """Run the commands that take no live run, or a finished one: runs/done."""
    yield finish("run (the finished run of the others)", call(["run", "--folder", "runs/done", "train.py"], folder, 2))
    yield finish("numerics", call(["numerics", "--json", "other.json"], folder, 2))
    names = dict.fromkeys(("runs/NAME", "runs/A", "runs/20261121-160210-train"), "runs/done")
    (folder / "runs" / "B").symlink_to("done")
    for line in lines:
        endless = line.startswith(("bench", "probe"))  # they end the script themselves
        yield finish(line, call(named(shlex.split(line), names), folder, 1000 if endless else 2))


def live(lines: Sequence[str], folder: Path) -> Iterator[bool]:
    """Run the commands of a live run, from `run --detach` to `stop`."""
    joined: dict[str, subprocess.Popen[str]] = {}
    folder_of_run, names = folder, dict[str, str]()
    for line in sorted(lines, key=lambda line: next(n for n, begin in enumerate(ORDER) if line.startswith(begin))):
        words = named(shlex.split(line), names)
        if line.startswith("join"):
            if not joined:  # the others differ only in the name of the ticket
                joined[line] = call(words, folder, 1_000_000)
                until_ready(folder_of_run, joined[line])
            continue
        yield finish(line, call(words, folder, 1_000_000))
        if line.startswith("run"):
            folder_of_run = max((folder / "runs").iterdir(), key=lambda path: path.lstat().st_mtime)
            run = f"runs/{folder_of_run.name}"
            names = {"runs/NAME": run, "runs/job1": run, "run.ticket": f"{run}/ticket", "TICKET": f"{run}/ticket"}
    for line, process in joined.items():
        yield finish(line, process)


def until_ready(run: Path, worker: subprocess.Popen[str]) -> None:
    """Wait until an external worker has asked for admission, or has ended."""
    while worker.poll() is None and not re.search(r'"ready".*"guest', (run / "metrics.jsonl").read_text()):
        time.sleep(0.2)


def main() -> None:
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    lines = list(dict.fromkeys(shlex.join(words) for page in PAGES for words in commands(page.read_text())))
    plain = {line: " ".join(shlex.split(line)) for line in lines}
    run = [line for line in lines if not reason(plain[line]) and re.match(only, line)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        results = [*alone([line for line in run if not line.startswith(LIVE)], folder)]
        results += live([line for line in run if line.startswith(LIVE)], folder)
    for why, number in Counter(reason(plain[line]) for line in lines).items():
        print(f"{number:4} {f'are not run: {why}' if why else 'are run'}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
