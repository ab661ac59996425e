"""Which shards a cache fetches next, and which copies make way: the truth table of it, and what always holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.data.cache_folder import STAYS_S, Copy, Next, RemoteFile, choose

A, B, C = (RemoteFile(f"s3://there/{name}.tar", 10, name * 32) for name in "abc")
OLD, NEW = STAYS_S + 1, STAYS_S - 1


def copy(of: RemoteFile, used_s: float, *, coming: bool = False) -> Copy:
    return Copy(of.name, of.size, used_s, coming)


@pytest.mark.parametrize(
    ("wanted", "there", "limit", "expected"),
    [
        ((A, B), (), 30, Next(A)),
        ((A, B), (copy(A, 0),), 30, Next(B)),
        ((A, B), (copy(A, OLD), copy(B, OLD)), 30, None),
        ((A, B, C), (copy(A, OLD), copy(B, OLD)), 20, None),  # what is wanted makes way for nothing
        ((C,), (copy(A, OLD), copy(B, OLD + 9)), 20, Next(C, (B.name,))),  # the least recently used
        ((C,), (copy(A, NEW), copy(B, NEW)), 20, None),  # others use them
        ((C,), (copy(A, OLD, coming=True), copy(B, NEW)), 20, None),  # somebody fetches it
        ((C,), (copy(A, OLD), copy(B, NEW)), 29, Next(C, (A.name,))),
        ((A, B), (copy(A, 0, coming=True),), 15, None),  # what comes counts in full
        ((A, B), (), 5, None),
        ((), (), 30, None),
    ],
)
def test_what_comes_next(
    wanted: tuple[RemoteFile, ...], there: tuple[Copy, ...], limit: int, expected: Next | None
) -> None:
    assert choose(wanted, there, limit) == expected


def test_what_somebody_is_at_is_left_to_him() -> None:
    assert choose((A, B), (), 30, busy={A.name}) == Next(B)
    assert choose((A,), (), 30, busy={A.name}) is None


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    there=st.sets(st.integers(0, 7)),
    wanted=st.lists(st.integers(0, 7), unique=True),
    ages=st.lists(st.floats(0, 400), min_size=8, max_size=8),
    limit=st.integers(0, 30),
)
def test_the_limit_is_kept_and_nothing_goes_that_is_wanted(
    sizes: list[int], there: set[int], wanted: list[int], ages: list[float], limit: int
) -> None:
    files = [RemoteFile(f"u/{n}", sizes[n % len(sizes)], f"{n:032}") for n in range(8)]
    copies = [copy(files[n], ages[n]) for n in there]
    found = choose([files[n] for n in wanted], copies, limit)
    if found is None:
        return
    assert found.file in [files[n] for n in wanted]
    assert found.file.name not in {each.name for each in copies}
    assert not set(found.makes_way) & {files[n].name for n in wanted}
    stays = [each for each in copies if each.name not in found.makes_way]
    assert sum(each.size for each in stays) + found.file.size <= limit
