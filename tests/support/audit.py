"""Whether anything is known against what farandole is run with: `make dependencies`.

Two lists are asked for: the pins of constraints.txt, with which everything here is tested, and the minimum versions of
pyproject.toml, the oldest that somebody may have. No test and no `make check` asks: what becomes known tomorrow must
not turn today's work red.

Exit code: 0 if nothing is known, 1 if something is, 2 if nobody could be asked about some of them. pip-audit itself
ends with 0 then, and with "No known vulnerabilities found".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = (
    "tls",
    "s3",
    "images",
    "fast-images",
)  # of pyproject.toml: what a run needs; the others are for this repository's own work
ACCEPTED = {
    "CVE-2025-3000": "torch.jit.script of a stranger's source; farandole calls none of torch.jit",
    "PYSEC-2026-139": "loading .pt2 archives of torch.export; farandole loads none",
}


def minimums() -> Iterator[Requirement]:
    """What pyproject.toml asks for at run time."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (
        *project["dependencies"],
        *(text for extra in EXTRAS for text in project["optional-dependencies"][extra]),
    ):
        yield Requirement(text)


def least(requirement: Requirement) -> str:
    """The version that a requirement begins with.

    Raises:
        ValueError: it does not say.
    """
    found = [each.version for each in requirement.specifier if each.operator in (">=", "==")]
    if len(found) != 1:
        raise ValueError(f"{requirement}: one version to begin with, as {requirement.name}>=1.0")
    return found[0]


def pins() -> dict[str, str]:
    """constraints.txt: this Python's version by each name, as PyPI spells both."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        re.sub(r"[-_.]+", "-", each.name).lower(): least(each)
        for each in found
        if each.marker is None or each.marker.evaluate()
    }


def judge(report: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """What is known, what is known and accepted, and what nobody could be asked about, of pip-audit's JSON."""
    known: list[str] = []
    accepted: list[str] = []
    unasked: list[str] = []
    for each in report["dependencies"]:
        if "vulns" not in each:
            unasked.append(each["name"])
            continue
        for found in each["vulns"]:
            names = {found["id"], *found.get("aliases", ())}
            why = next((ACCEPTED[name] for name in sorted(names & ACCEPTED.keys())), "")
            line = f"{each['name']} {each['version']}: {found['id']}, mended in {found['fix_versions'] or 'none'}"
            (accepted if why else known).append(f"{line} ({why})" if why else line)
    return known, accepted, unasked


def ask(program: str, versions: dict[str, str]) -> dict[str, Any]:
    """pip-audit's report; where it could reach nobody, one in which nobody was asked."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in sorted(versions.items()))
        file.flush()
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--aliases", "on"]
        done = subprocess.run([program, "-r", file.name, *options], stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        return {"dependencies": [{"name": name} for name in versions]}
    return json.loads(done.stdout)


def main(program: str) -> int:
    code = 0
    for what, versions in (
        ("the pins of constraints.txt", pins()),
        ("the minimum versions of pyproject.toml", {each.name: least(each) for each in minimums()}),
    ):
        known, accepted, unasked = judge(ask(program, versions))
        print(f"{what}: {len(versions)} asked for, {len(known)} advisories, {len(accepted)} accepted")
        for line in (*known, *(f"accepted: {line}" for line in accepted)):
            print(f"  {line}")
        if unasked:
            print(f"  NOT AUDITED, pip-audit could not reach its data: {', '.join(unasked)}")
        code = max(code, 1 if known else 2 if unasked else 0, key=(0, 2, 1).index)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
