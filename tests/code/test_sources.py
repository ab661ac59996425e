"""What a process executes of a script's folder: the copies, under the originals' names, whatever became of these."""

from __future__ import annotations

import errno
import importlib
import linecache
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

import farandole
from farandole.code import snapshot
from farandole.code.pack import keep
from farandole.code.snapshot import Sources
from farandole.errors import FarandoleError, UsageError

SCRIPT = "VALUE = 1\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A script's folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train_it.py").write_text(SCRIPT)
    (folder / "farandole_plain.py").write_text("def fail():\n    raise ValueError('as it was')\n")
    (folder / "farandole_parts").mkdir()
    (folder / "farandole_parts" / "__init__.py").write_text("")
    (folder / "farandole_parts" / "inner.py").write_text("WHICH = 'first'\n")
    return folder


Process = Callable[[], Sources]


@pytest.fixture
def process(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Each call is as if another worker began: nothing imported yet. The copies are in tmp_path/copies."""
    monkeypatch.syspath_prepend(place)
    finders = list(sys.meta_path)

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith("farandole_")]:
            del sys.modules[name]
        sys.meta_path[:] = finders

    def begin() -> Sources:
        forget()
        importlib.invalidate_caches()
        found = Sources(str(place / "train_it.py"), tmp_path / "copies")
        sys.meta_path.insert(0, found)
        return found

    keep(str(place / "train_it.py"), tmp_path / "copies")
    yield begin
    forget()


def module(name: str) -> types.ModuleType:
    return importlib.import_module(name)


@pytest.mark.failure(
    "Other code than the run's",
    "the script or a module of its folder is edited, renamed or deleted while a run trains, and a worker is replaced",
)
def test_a_module_is_what_it_was_at_its_first_import(process: Process, place: Path) -> None:
    process()
    assert module("farandole_parts.inner").WHICH == "first"
    (place / "farandole_parts" / "inner.py").write_text("WHICH = 'other'\n")
    again = process()
    inner = module("farandole_parts.inner")
    assert inner.WHICH == "first"
    assert inner.__file__ == str(place / "farandole_parts" / "inner.py")
    assert [name for name, _ in again.facts()] == ["module farandole_parts", "module farandole_parts.inner"]


@pytest.mark.failure(
    "Other code than the run's",
    "the script or a module of its folder is edited, renamed or deleted while a run trains, and a worker is replaced",
)
@pytest.mark.parametrize("becomes", ["nothing", "a package"])
def test_a_module_that_is_no_more(becomes: str, process: Process, place: Path) -> None:
    process()
    before = module("farandole_plain").__file__
    (place / "farandole_plain.py").unlink()
    if becomes == "a package":
        (place / "farandole_plain").mkdir()
        (place / "farandole_plain" / "__init__.py").write_text("")
    process()
    assert module("farandole_plain").__file__ == before
    assert callable(module("farandole_plain").fail)


def test_a_folder_elsewhere_that_comes_first_is_looked_into_first(
    process: Process, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a script that has the name of a module which it imports from another folder."""
    process()
    mine = module("farandole_plain").__file__
    (tmp_path / "elsewhere" / "farandole_parts").mkdir(parents=True)  # what may be a namespace package comes last
    (tmp_path / "elsewhere" / "farandole_plain.py").write_text("")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path / "elsewhere")
        process()
        assert module("farandole_plain").__file__ == str(tmp_path / "elsewhere" / "farandole_plain.py")
        assert module("farandole_parts").__file__ == str(place / "farandole_parts" / "__init__.py")
    process()
    assert module("farandole_plain").__file__ == mine


def test_a_traceback_shows_what_was_executed(process: Process, place: Path) -> None:
    process()
    module("farandole_plain")
    (place / "farandole_plain.py").write_text("# edited\n# edited\n")
    linecache.clearcache()
    process()
    with pytest.raises(ValueError, match="as it was") as raised:
        module("farandole_plain").fail()
    linecache.checkcache()
    told = "".join(traceback.format_exception(raised.value))
    assert f'File "{place / "farandole_plain.py"}", line 2' in told
    assert "    raise ValueError('as it was')" in told


def test_what_is_installed_below_the_script_is_not_copied(
    process: Process, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(place / "lib" / name))
    monkeypatch.syspath_prepend(place / "lib" / "purelib")
    (place / "lib" / "purelib").mkdir(parents=True)
    (place / "lib" / "purelib" / "farandole_installed.py").write_text("")
    found = process()
    module("farandole_installed")
    assert list(found.facts()) == []
    assert not (tmp_path / "copies" / "lib").exists()


def test_a_namespace_package_and_a_folder_by_another_name(
    process: Process, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "farandole_space").mkdir()
    (place / "farandole_space" / "a.py").write_text("WHICH = 'first'\n")
    alias = tmp_path / "alias"
    alias.symlink_to(place)
    monkeypatch.syspath_prepend(alias)
    process()
    assert module("farandole_space.a").WHICH == "first"
    (place / "farandole_space" / "a.py").write_text("WHICH = 'other'\n")
    process()
    assert module("farandole_space.a").WHICH == "first"
    assert module("farandole_space.a").__file__ == str(alias / "farandole_space" / "a.py")


def test_without_copies_it_is_only_told(place: Path, process: Process) -> None:
    process()  # for the clean slate
    sys.meta_path[0] = told = Sources(str(place / "train_it.py"), None)
    (place / "farandole_plain.py").write_text("WHICH = 'mine'\n")
    assert module("farandole_plain").WHICH == "mine"
    assert [name for name, _ in told.facts()] == ["module farandole_plain"]


@pytest.mark.failure(
    "Other code than the run's",
    "a module can't be copied at its first import because the disk is full",
    seen="a line in the worker's log",
    outcome="the module itself is executed; a later worker with another version is refused",
)
def test_where_no_copy_can_be_made_the_file_itself_counts(
    process: Process, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = process()
    (tmp_path / "copies" / "farandole_parts").write_text("a file where a folder is to be")
    assert module("farandole_parts.inner").WHICH == "first"
    assert "farandole_parts/inner.py" in caplog.text
    assert "module farandole_parts.inner" in dict(found.facts())


def _first(number: int, folder: str, begin: object) -> bytes:
    root = Path(folder, str(number))
    found = Sources(str(root / "t.py"), Path(folder, "copies"))
    begin.wait()  # type: ignore[attr-defined]
    return found.source("module m", Path("deep", "m.py"), str(root / "m.py"))


def _race(number: int, folder: str, begin: object, results: object) -> None:
    results.put(_first(number, folder, begin))  # type: ignore[attr-defined]


def test_of_several_that_copy_at_once_all_execute_the_same(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "t.py").touch()
        (tmp_path / str(number) / "m.py").write_text(f"WHICH = {number}\n" * 1000)
    keep(str(tmp_path / "0" / "t.py"), tmp_path / "copies")
    context = get_context("fork")
    begin, results = context.Barrier(6), context.SimpleQueue()
    racers = [context.Process(target=_race, args=(n, str(tmp_path), begin, results)) for n in range(6)]
    for racer in racers:
        racer.start()
    assert len({results.get() for _ in racers}) == 1
    for racer in racers:
        racer.join()
    assert [path.name for path in (tmp_path / "copies" / "deep").iterdir()] == ["m.py"]


def test_the_script_runs_under_its_own_name(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path through a symbolic link, with the run's folder beside the script, which is gone by then."""
    copies = place / "runs" / "r" / "code"
    (tmp_path / "link.py").symlink_to(place / "train_it.py")
    monkeypatch.chdir(tmp_path)
    keep("link.py", copies)
    (place / "train_it.py").unlink()
    found = Sources("link.py", copies)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    found.run()
    main = sys.modules["__main__"]
    assert (main.VALUE, main.__file__, main.__name__, main.__spec__) == (1, "link.py", "__main__", None)
    assert found.origin.root == str(place)
    assert list(found.facts()) == [(snapshot.of_kept(copies)[0])]


# --- the copy of the script ------------------------------------------------------------------------------------------


@pytest.mark.failure("Other code than the run's", "a run resumes with an edited script")
def test_an_earlier_copy_is_compared_and_replaced(place: Path, tmp_path: Path, process: Process) -> None:
    script, copies = str(place / "train_it.py"), tmp_path / "copies"
    process()
    module("farandole_parts.inner")
    module("farandole_plain")
    assert keep(script, tmp_path / "fresh") == ()
    (place / "farandole_parts" / "inner.py").write_text("WHICH = 'other'\n")
    (place / "farandole_plain.py").unlink()
    assert keep(script, copies) == ("farandole_parts/inner.py", "farandole_plain.py")
    assert sorted(path.name for path in copies.iterdir()) == ["origin.json", "train_it.py"]
    (place / "train_it.py").write_text("VALUE = 2\n")
    assert keep(script, copies) == ("train_it.py",)
    assert (copies / "train_it.py").read_text() == "VALUE = 2\n"
    (place / "train_it.py").rename(place / "renamed.py")
    [other] = keep(str(place / "renamed.py"), copies)
    assert "renamed.py" in other
    assert "train_it.py" in other


@pytest.mark.failure(
    "Other code than the run's",
    "the script can't be copied (no space), or `code/` in the folder of the run holds other files",
    seen="an error when `farandole run` starts",
    outcome="exit code 1 or 2; nothing is started or overwritten",
)
def test_a_copy_that_can_not_be_written_is_said_at_the_start(place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        FarandoleError, match=rf"{re.escape(str(tmp_path / 'file' / 'code'))}\b.*{os.strerror(errno.ENOTDIR)}"
    ):
        keep(str(place / "train_it.py"), tmp_path / "file" / "code")


@pytest.mark.failure(
    "Other code than the run's",
    "the script can't be copied (no space), or `code/` in the folder of the run holds other files",
)
def test_nothing_but_an_earlier_copy_is_replaced(place: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "code"
    mine.mkdir(parents=True)
    keep(str(place / "train_it.py"), mine)
    with pytest.raises(UsageError, match=rf"{re.escape(str(mine / 'train_it.py'))}\b.*{re.escape(str(mine.parent))}"):
        keep(str(mine / "train_it.py"), mine)
    (mine / "origin.json").unlink()
    with pytest.raises(UsageError, match=rf"{re.escape(str(mine))}\b.*--folder"):
        keep(str(place / "train_it.py"), mine)
    assert [path.name for path in mine.iterdir()] == ["train_it.py"]


def test_no_copy_where_one_is_expected(place: Path, tmp_path: Path) -> None:
    with pytest.raises(FarandoleError, match=re.escape(str(tmp_path / "nothing"))):
        Sources(str(place / "train_it.py"), tmp_path / "nothing")


def test_the_packages_own_code_has_a_hash() -> None:
    assert len(snapshot.own()) == 16
    assert dict(snapshot.facts())[snapshot.OWN] == snapshot.own()
    assert os.environ.get("FARANDOLE_CODE") is None


def test_all_of_farandole_counts_as_its_code(tmp_path: Path) -> None:
    """Of which a room is a part: a worker in whose farandole any file differs is not to pass for an equal one."""
    package = Path(farandole.__file__).parent

    def own() -> str:
        program = "from farandole.code import snapshot; print(snapshot.own())"
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    shutil.copytree(package, tmp_path / "farandole", ignore=shutil.ignore_patterns("__pycache__"))
    assert own() == snapshot.own(), "wherever it lies"
    for name in ("run.py", "plan/shards.py"):
        file = tmp_path / "farandole" / name
        before, text = own(), file.read_text()
        file.write_text(text + "\n")
        assert own() != before, name
        file.write_text(text)
