"""Who computes which shards a second time."""

from __future__ import annotations

from collections import Counter

import pytest

from farandole.plan.shards import Check, audit, of_checker, of_owner, select_checks

HELD = {"a": (0, 1), "b": (2, 3), "c": (4,)}
ALL = ("a", "b", "c")


def test_who_has_to_prove_itself_computes_the_first_shard_too() -> None:
    assert select_checks(HELD, ("c", "b"), None, ()) == (
        Check(owner="a", checker="c", shards=(0,)),
        Check(owner="a", checker="b", shards=(0,)),
    )


def test_who_holds_the_first_shard_has_nobody_to_be_compared_with_but_those_who_compute_it() -> None:
    assert select_checks(HELD, ("a",), None, ()) == ()
    assert [check.checker for check in select_checks(HELD, ALL, None, ())] == ["b", "c"]


def test_an_audit_only_where_nothing_else_is_due() -> None:
    audited = (Check(owner="b", checker="c", shards=(2,)),)
    assert select_checks(HELD, (), None, audited) == audited
    assert select_checks(HELD, ("c",), None, audited) == (Check(owner="a", checker="c", shards=(0,)),)
    assert select_checks(HELD, (), (), audited) == (), (
        "in a round that is done again, what the coordinator said and no more"
    )


def test_in_a_round_that_is_done_again_whoever_holds_the_shards_now_is_checked() -> None:
    assert select_checks(HELD, (), (("c", (2, 3)), ("a", (2, 3))), ()) == (
        Check(owner="b", checker="c", shards=(2, 3)),
        Check(owner="b", checker="a", shards=(2, 3)),
    )
    inherited = {"a": (0, 1, 2), "c": (3, 4)}
    assert select_checks(inherited, (), (("c", (2, 3)),), ()) == (Check(owner="a", checker="c", shards=(2,)),)


def test_a_word_has_one_number_for_a_holder_and_one_for_a_checker() -> None:
    asked = (("c", (0,)), ("c", (2,)), ("b", (0, 1)))
    assert select_checks(HELD, (), asked, ()) == (Check(owner="a", checker="c", shards=(0,)),)


def test_each_shard_is_audited_as_often_as_was_asked_and_by_every_other_in_turn() -> None:
    shards, pairs, steps = Counter[int](), Counter[tuple[str, str]](), 4000
    for step in range(steps):
        checks = list(audit(HELD, ALL, 0.25, 7, step))
        assert checks == list(audit(HELD, ALL, 0.25, 7, step)), "the same for everyone"
        for check in checks:
            assert check.owner != check.checker
            assert set(check.shards) <= set(HELD[check.owner])
            pairs[check.owner, check.checker] += 1
            shards.update(check.shards)
        assert len({check.checker for check in checks}) == len(checks)
    assert {round(count / steps, 1) for count in shards.values()} <= {0.2, 0.3}
    assert len(shards) == 5
    assert len(pairs) == 6
    assert max(pairs.values()) < 1.3 * min(pairs[h, c] for h, c in pairs if h == max(pairs, key=lambda p: pairs[p])[0])


@pytest.mark.parametrize(("workers", "fraction"), [(("a",), 1.0), (ALL, 0.0)])
def test_nothing_is_audited_where_nobody_could_or_was_asked_to(workers: tuple[str, ...], fraction: float) -> None:
    assert not list(audit(HELD, workers, fraction, 7, 1))


def test_all_of_it_is_audited_where_that_was_asked_for() -> None:
    assert sorted(shard for check in audit(HELD, ALL, 1.0, 7, 1) for shard in check.shards) == [0, 1, 2, 3, 4]


def test_which_shards_does_not_depend_on_who_holds_them() -> None:
    """A round that is done again after a loss has the same ones."""
    left = {"a": (0, 1, 2), "b": (3, 4)}
    for step in range(200):
        before = {shard for check in audit(HELD, ALL, 0.3, 7, step) for shard in check.shards}
        assert {shard for check in audit(left, ("a", "b"), 0.3, 7, step) for shard in check.shards} == before


def test_a_workers_part() -> None:
    checks = select_checks(HELD, ("c",), None, ())
    assert of_owner(checks, "a") == (0,)
    assert of_owner(checks, "c") == ()
    assert of_checker(checks, "c") == checks[0]
    assert of_checker(checks, "a") is None
