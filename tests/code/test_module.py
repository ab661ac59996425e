"""A script that is a module of a package, as `python -m` runs it."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from multiprocessing import spawn
from pathlib import Path

import pytest

from farandole.cli.options import check_script
from farandole.code import pack, snapshot
from farandole.code.pack import Origin, keep
from farandole.code.snapshot import Sources
from farandole.errors import UsageError

RAISES = "raise AssertionError('nothing is imported to find a module')\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with a package in a package."""
    folder = tmp_path / "project"
    inner = folder / "farandole_job" / "inner"
    inner.mkdir(parents=True)
    (folder / "farandole_job" / "net.py").write_text("WIDTH = 3\n")
    (folder / "farandole_job" / "__init__.py").write_text("LOADED = True\n")
    (inner / "__init__.py").write_text("")
    (inner / "train.py").write_text("from ..net import WIDTH\nimport farandole_job\nLOADED = farandole_job.LOADED\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    finders = sys.meta_path[:]
    yield folder
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.startswith("farandole_job")]:
        del sys.modules[name]


def test_the_origin_of_a_module(place: Path) -> None:
    (place / "farandole_job" / "__init__.py").write_text(RAISES)
    (place / "farandole_job" / "inner" / "__main__.py").write_text("")
    file = place / "farandole_job" / "inner" / "train.py"
    origin = Origin.from_script("farandole_job.inner.train")
    assert origin == Origin(
        script=str(file), root=str(place), name="farandole_job/inner/train.py", module="farandole_job.inner.train"
    )
    assert origin.run_name == "train"
    package = Origin.from_script("farandole_job.inner")
    assert (package.module, package.name) == ("farandole_job.inner.__main__", "farandole_job/inner/__main__.py")
    assert package.run_name == "inner"
    assert Origin.from_script(str(file)).module == ""
    assert "farandole_job" not in sys.modules


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("word", ["farandole_job", "farandole_job.missing", "farandole_job.inner.train.py", "a-b", ""])
def test_what_is_no_module(word: str) -> None:
    assert Origin.from_script(word).module == ""
    with pytest.raises(UsageError):
        check_script(word)


def test_a_file_takes_precedence_over_a_module(place: Path) -> None:
    (place / "farandole_job.net").write_text("")
    assert Origin.from_script("farandole_job.net").module == ""
    check_script("farandole_job.net")
    (place / "farandole_job.net").unlink()
    assert Origin.from_script("farandole_job.net").module == "farandole_job.net"


def executed(sources: Sources) -> types.ModuleType:
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    sources.run_as(main)
    return main


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], Sources]:
    monkeypatch.setattr(snapshot, "_current", None)
    monkeypatch.setattr(spawn, "get_preparation_data", lambda name: {"init_main_from_path": name})
    monkeypatch.setenv("FARANDOLE_CODE", "")
    return lambda copies: snapshot.install("farandole_job.inner.train", copies)


def test_it_runs_in_its_package(place: Path, installed: Callable[[Path | None], Sources]) -> None:
    sources = installed(None)
    main = executed(sources)
    assert (main.WIDTH, main.LOADED, main.__package__) == (3, True, "farandole_job.inner")
    assert main.__file__ == sources.file == str(place / "farandole_job" / "inner" / "train.py")
    assert sys.path[0] == str(place)
    assert spawn.get_preparation_data("a") == {"init_main_from_name": "farandole_job.inner.train"}
    facts = [name for name, _ in sources.facts()]
    assert facts == [
        "script farandole_job/inner/train.py", "module farandole_job", "module farandole_job.inner",
        "module farandole_job.net",
    ]  # fmt: skip
    assert snapshot.of_file("farandole_job.inner.train")[0] == next(iter(sources.facts()))


def test_its_package_is_copied_with_it(
    place: Path, tmp_path: Path, installed: Callable[[Path | None], Sources]
) -> None:
    copies = tmp_path / "copies"
    keep("farandole_job.inner.train", copies)
    executed(installed(copies))
    assert spawn.get_preparation_data("a") == {"init_main_from_name": "farandole.code.spawned"}
    for file in place.rglob("*.py"):
        file.write_text(RAISES)
    for name in [name for name in sys.modules if name.startswith("farandole_job")]:
        del sys.modules[name]
    sources = Sources("farandole_job.inner.train", copies)
    sys.meta_path.insert(0, sources)
    main = executed(sources)
    assert (main.WIDTH, main.__package__) == (3, "farandole_job.inner")
    assert snapshot.of_kept(copies)[0] == next(iter(sources.facts()))


def test_a_pack_for_other_hosts_names_the_module(place: Path, tmp_path: Path) -> None:
    packed = pack.pack(place, "farandole_job.inner.train")
    assert packed.script == "farandole_job.inner.train"
    assert "farandole_job/inner/train.py" in packed.files
    with pytest.raises(UsageError):
        pack.pack(tmp_path / "project" / "farandole_job", "json.tool")


@pytest.mark.usefixtures("installed")
def test_a_module_elsewhere_on_the_path(place: Path, tmp_path: Path) -> None:
    """The working folder comes first all the same."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "farandole_job_there.py").write_text("from farandole_job.net import WIDTH\n")
    sys.path.append(str(other))
    sources = snapshot.install("farandole_job_there", None)
    assert (sources.origin.root, sys.path[0]) == (str(other), str(place))
    assert executed(sources).WIDTH == 3


@pytest.mark.parametrize(
    ("first", "runs"),
    [
        (b"import torch", True), (b"#!/usr/bin/env python3", True), (b"", True), (b"#!/bin/sh", False),
        (b"\x7fELF\x02\x01\x01\x00", False),
    ],
)  # fmt: skip
def test_a_program_that_is_not_python_is_refused(tmp_path: Path, first: bytes, runs: bool) -> None:
    program = tmp_path / "tool"
    program.write_bytes(first + b"\nprint(1)\n")
    with nullcontext() if runs else pytest.raises(UsageError):
        check_script(str(program))
