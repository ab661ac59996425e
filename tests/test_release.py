"""What a release is named: one version in the package, its metadata, the changelog and the citation."""

from __future__ import annotations

import re

import pytest
import yaml

import farandole
from tests.support.pages import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_version_is_the_same_everywhere() -> None:
    [project] = re.findall(r'(?m)^version = "(.*)"$', PROJECT)
    newest, *_ = re.findall(r"(?m)^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text())
    assert {farandole.__version__, project, newest, CITATION["version"]} == {farandole.__version__}


@pytest.mark.parametrize("key", ["cff-version", "message", "title", "authors", "license"])
def test_the_citation_has_what_its_format_asks_for(key: str) -> None:
    assert CITATION[key]


def test_the_citation_has_the_license_of_the_project() -> None:
    assert f'license = "{CITATION["license"]}"' in PROJECT
