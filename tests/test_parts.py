"""Parts of the tests."""

from __future__ import annotations

import pytest

from tests.support.parts import in_part

TESTS = [f"tests/test_it.py::test_that[{number}]" for number in range(500)]


def test_each_test_is_in_one_part() -> None:
    found = [[number for number in range(12) if in_part(test, f"{number}/12")] for test in TESTS]
    assert all(len(numbers) == 1 for numbers in found)
    assert {number for numbers in found for number in numbers} == set(range(12))


@pytest.mark.parametrize("part", ["12/12", "3", "3/", "/12", "-1/12", "a/b", "0/0"])
def test_what_is_no_part_is_named(part: str) -> None:
    with pytest.raises(pytest.UsageError, match=part):
        in_part(TESTS[0], part)
