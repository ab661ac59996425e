"""A batch that follows the machines: how many samples it needs, and how fast it makes a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from farandole.errors import UsageError
from farandole.market.batches import BatchTable, following_speeds, read_batches
from tests.support.mentioned import mentions


def table(samples: Mapping[int, float]) -> BatchTable:
    return BatchTable(samples=dict(samples), target="")


def written(folder: Path, rows: Any) -> Path:
    path = folder / "batches.json"
    path.write_text(json.dumps(rows))
    return path


def test_between_sizes_and_beyond_them_the_samples_are_on_a_line() -> None:
    known = table({100: 1000.0, 200: 1200.0, 400: 2000.0})
    assert (known.base, known.largest) == (100, 400)
    assert [known.needed(batch) for batch in (100, 150, 200, 300, 400, 500)] == [1000, 1100, 1200, 1600, 2000, 2400]


def test_samples_that_fall_are_not_taken_to_fall_further() -> None:
    known = table({100: 1000.0, 200: 900.0})
    assert [known.needed(batch) for batch in (150, 200, 4000)] == [950, 900, 900]


def test_the_speed_is_that_of_the_samples_over_how_many_are_needed() -> None:
    speeds, largest = following_speeds((1.0, 1.9, 2.8, 3.6), table({100: 1000.0, 200: 1200.0, 400: 2000.0}))
    assert speeds == pytest.approx((1.0, 1.9 / 1.2, 2.8 / 1.6, 3.6 / 2.0))
    assert largest == 400


def test_a_batch_that_makes_the_job_slower_is_not_used() -> None:
    speeds, largest = following_speeds((1.0, 2.0, 3.0, 4.0), table({10: 100.0, 20: 120.0, 40: 900.0}))
    assert speeds == pytest.approx((1.0, 2 / 1.2, 2 / 1.2, 2 / 1.2))
    assert largest == 20


def test_files(tmp_path: Path) -> None:
    given = [{"batch": 64, "samples": 10}, {"batch": 128, "samples": 12.5, "note": "by hand"}]
    assert read_batches(written(tmp_path, given)) == table({64: 10.0, 128: 12.5})
    measured = [
        {"batch": 8, "samples": [10.0, 20.0], "target": "a>=1"},
        {"batch": 16, "samples": [30], "target": "a>=1"},
    ]
    assert read_batches(written(tmp_path, measured)) == BatchTable(samples={8: 15.0, 16: 30.0}, target="a>=1")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ({"batch": 64}, ("--batches",)),
        ([{"batch": 64, "samples": 10}], ("1 sizes",)),
        ([{"batch": 64, "samples": 10}, {"batch": 64, "samples": 11}], ("64", "twice")),
        ([{"batch": 64, "samples": 10}, {"batch": 128, "samples": [11, None]}], ("128",)),
        ([{"batch": 64, "samples": 10}, {"batch": 128, "samples": []}], ("128",)),
        ([{"batch": 64, "samples": 0}, {"batch": 128, "samples": 10}], ("64",)),
        ([{"batch": 0, "samples": 1}, {"batch": 128, "samples": 10}], ("0",)),
        ([{"batch": 64, "samples": "many"}], ("--batches",)),
        ([{"batch": 128, "samples": 11, "workers": 4}, {"batch": 64, "samples": 10, "workers": 2}], ("2 workers",)),
    ],
)
def test_what_it_refuses(tmp_path: Path, rows: Any, named: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        read_batches(written(tmp_path, rows))
    assert mentions(str(caught.value), "batches.json")
    for each in named:
        assert mentions(str(caught.value), each)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_batches(tmp_path / "none.json")
    assert mentions(str(caught.value), "none.json")
