"""Makes what the commands of the pages name: data, traces, hosts, a store and instances of EC2. For docs/check.py.

All of it is in one folder. A path of another machine, as /data/images, is in its folder `root`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import sys
import tarfile
from collections.abc import Generator, Sequence
from pathlib import Path

import pyarrow as pa

from tests.support import image_files, sshd, tables, tars, token_files
from tests.support.aws import Machines, account
from tests.support.examples import TABLE
from tests.support.forked import ENVIRON
from tests.support.metadata_services import Ec2Service
from tests.support.pages import ROOT, block_with, changed, readme_script

HOSTS = {"hosts.txt": ("node1", "node2"), "rack.txt": ("node1",), "lent.txt": ("node2",)}
HISTORY = "0 2\n3 3\n5 1\n"
SPEEDS = [{"run": {"workers": n, "mode": mode}, "samples_per_s": 9 * n} for n in (1, 2) for mode in ("strong", "weak")]
BATCHES = [{"batch": 96 * n, "samples": 2500 + 400 * n} for n in (1, 2, 4)]
DAYS, GAP_S = 10, 1200  # of a trace
PRICE = {"AvailabilityZone": "us-west-2a", "InstanceType": "p3.2xlarge", "ProductDescription": "Linux/UNIX"}
EXAMPLES = {  # data that a page names: the example that trains on it
    "cifar10_jpeg.npz": "cifar10",
    "clothing": "finetune",
    "bccd/BCCD": "detect",
    "root/usr/share/tuxpaint/stamps": "segment",
    "tinyshakespeare.txt": "shakespeare",
}
TEXTS = {
    "package/__init__.py": "",
    "h.txt": HISTORY,
    "history.txt": HISTORY,
    "prices.toml": "date = 2026-11-01\n[pools]\nlocal = 0.05\n",
    "requirements.txt": "torch\n",
    "run.toml": block_with(ROOT / "docs" / "running.md", "script = ", "toml"),
    "token": "0123456789abcdef" * 4 + "\n",
    "texts/a.txt": "a text\n" * 100,
    "root/data/stories/a.jsonl": '{"story": "a text"}\n' * 100,
    "modules/tiktoken_ext/small.py": token_files.ENCODING,
    "scaling.json": json.dumps(SPEEDS),
    "batches.json": json.dumps(BATCHES),
    "history.json": json.dumps(
        {"SpotPriceHistory": [PRICE | {"SpotPrice": "0.9", "Timestamp": "2026-11-01T00:00:00Z"},
                              PRICE | {"SpotPrice": "1.1", "Timestamp": "2026-11-09T00:00:00Z"}]}
    ),
}  # fmt: skip
PROGRAMS = {  # on the PATH of this machine and of the hosts
    "farandole": f'exec {sys.executable} -m farandole "$@"',
    "nvidia-smi": 'echo "GPU 0"',
}


def prepare(folder: Path, lines: Sequence[str]) -> None:
    """Make the files that the commands name."""
    script = training_script(folder / "epochs")
    traces = {word: trace(number) for number, word in enumerate(traces_in(lines))}
    for name, text in {**TEXTS, **traces, "train.py": script, "package/train.py": script}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "token").chmod(0o600)
    (folder / "outputs").mkdir()
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    for name, text in PROGRAMS.items():
        program(folder / "bin" / name, text)
    images = image_files.make_folder(folder / "images")
    content, labels = zip(*image_files.in_order(images), strict=True)
    table = pa.table({"image": content, "label": labels})
    tables.write(folder / "root" / "data" / "digits" / "train-0.parquet", table, "parquet")


def training_script(epochs: Path) -> str:
    """The README's script on fewer samples, with an evaluation. The file `epochs` says how long it trains."""
    return changed(
        readme_script(),
        {
            "import torch\n": "from pathlib import Path\n\nimport torch\n",
            "20_000": "2_000",
            "epochs=20": f"epochs=int(Path({str(epochs)!r}).read_text())",
            "if run.is_leader:": "    if step.ends_epoch:\n        run.log(accuracy=run.evaluate(model, train_set, "
            "lambda logits, y: logits.argmax(1) == y))\nif run.is_leader:",
        },
    )


def traces_in(lines: Sequence[str]) -> list[str]:
    """The names of traces in commands that take some: those with a zone."""
    words = [word for line in lines for word in shlex.split(line) if line.startswith(("simulate", "plan"))]
    return sorted({word for word in words if word.endswith(".json") and "us-" in word})


def trace(number: int) -> str:
    """A trace in SkyPilot's format."""
    counts = [(16, 16, 7, 0, 3, 16, 12)[(interval // 20 + number) % 7] for interval in range(DAYS * 86400 // GAP_S)]
    return json.dumps({"metadata": {"gap_seconds": GAP_S}, "data": counts})


def example_data(folder: Path) -> dict[str, str]:
    """Make the data of the examples. Returns the arguments for a short training, by example."""
    arguments = dict[str, str]()
    for name, example in EXAMPLES.items():
        place = folder / "examples-data" / example
        place.mkdir(parents=True)
        made, *short = TABLE[example].data(place, random.Random(example))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(made)
        arguments[example] = shlex.join(short)
    with tarfile.open(folder / "clothing128.tar", "w") as tar:
        for part in (folder / "clothing").iterdir():
            tar.add(part, part.name)
    return arguments


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@contextlib.contextmanager
def services(folder: Path) -> Generator[dict[str, str]]:
    """Start the hosts, the store and EC2, for this process and those that it starts. Yields variables of commands."""
    place = folder.parent  # runs pack the folder
    with contextlib.ExitStack() as stack:
        moto = stack.enter_context(account(place))
        for path in tars.folder(place / "tars", index=False).iterdir():
            moto.client("s3").put_object(Bucket="bucket", Key=f"tars/{path.name}", Body=path.read_bytes())
        machines = Machines(moto, place / "machines")
        stack.callback(machines.close)
        environ = {
            **{name: value for name, value in ENVIRON.items() if name.startswith("AWS_")},
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{folder / 'modules'}",
            "HOME": str(place / "home"),
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "120",
        }
        (place / "home").mkdir()
        if sshd.AVAILABLE:
            (place / "ssh").mkdir()
            make_hosts(folder, stack.enter_context(sshd.Sshd(place / "ssh", 2, environ)))
        yield {**environ, "FARANDOLE_METADATA": stack.enter_context(Ec2Service()).address}


def make_hosts(folder: Path, hosts: sshd.Sshd) -> None:
    """Write the hosts files. They have names, as real hosts do: see the configuration of `ssh`."""
    names = sorted({name for file in HOSTS.values() for name in file})
    with (folder.parent / "ssh" / "config").open("a") as config:
        for name, address in zip(names, hosts.addresses, strict=True):
            config.write(f"Host {name}\n HostName {address}\n Port {hosts.port}\n")
    options = shlex.join(shlex.split(hosts.ssh)[1:])
    program(folder / "bin" / "ssh", f'exec {shutil.which("ssh")} {options} "$@"')
    for file, listed in HOSTS.items():
        (folder / file).write_text("".join(f"{name} slots=2 python={sys.executable}\n" for name in listed))
