"""Kinds of pools: the built-in ones by name, others from the entry points of installed packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farandole.errors import UsageError
from farandole.pool.spec import BUILT_IN, kind_of, pools
from farandole.protocol.settings import PoolTerms

PACKAGE = """
class Kind:
    options, required = ("queue",), ("queue",)

    def is_sized(self, terms):
        return True

    def check(self, terms, listen, show, *, priced): ...

    async def open(self, terms, context): ...


KIND = Kind()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package beside farandole that adds the kinds `mine` and `broken`."""
    (tmp_path / "mine_pool.py").write_text(PACKAGE)
    info = tmp_path / "mine_pool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-pool\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[farandole.pools]\nmine = mine_pool:KIND\nbroken = not_there:KIND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_kind_says_what_it_needs(name: str) -> None:
    kind = kind_of(name)
    assert set(kind.required) <= set(kind.options)
    assert isinstance(kind.is_sized(PoolTerms(kind=name, name=name)), bool)


def test_the_module_of_a_kind_is_loaded_when_the_kind_is_used() -> None:
    code = (
        "import sys, farandole.pool.spec as s; s.pools(['local,size=2']); "
        "print([m for m in sys.modules if m in ('farandole.pool.ssh', 'farandole.pool.ec2')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_installed_package_adds_a_kind(installed: Path) -> None:
    del installed
    [terms] = pools(["mine,queue=night,size=3"])
    assert (terms.kind, terms.name, terms.size, terms.options) == ("mine", "mine", 3, {"queue": "night"})
    assert kind_of("mine") is sys.modules["mine_pool"].KIND
    with pytest.raises(UsageError, match="queue"):
        pools(["mine,size=3"])
    with pytest.raises(UsageError, match="partition"):
        pools(["mine,queue=night,partition=x"])


def test_a_kind_that_is_not_there_is_named_with_those_that_are(installed: Path) -> None:
    del installed
    with pytest.raises(UsageError, match="slumr") as error:
        pools(["slumr,size=2"])
    assert all(name in str(error.value) for name in (*BUILT_IN, "mine"))
    with pytest.raises(UsageError, match="not_there"):
        kind_of("broken")
