"""Who is named where replicas differ: the odd one, and the member whose sums alone differ, if others can tell."""

from __future__ import annotations

import msgspec
import pytest

from farandole.protocol import messages as m
from farandole.protocol.messages import MAX_PARTS, PartDigests
from tests.support.scene import Scene, trained


def answer(members: str, weight: int, *parts: int, rest: int = 1) -> m.Digests:
    """Of a replica whose parts, in the order of these members, have these digests."""
    made = PartDigests(view=1, cut=7, members=tuple(members), digests=parts)
    return m.Digests(step=7, names=("rate", "weight"), digests=(5, weight), parts=(made,) if parts else (), rest=rest)


def compared(members: str, odd: str, **answers: m.Digests) -> Scene:
    """All say that `odd` are unlike the others, have stopped, and give these answers."""
    scene = trained(*members)
    for worker in members:
        scene.say(worker, m.Differs(step=7, workers=tuple(odd)))
    for worker in members:
        scene.report(worker, 7, has_result=True)
    for worker, each in answers.items():
        scene.say(worker, each)
    return scene


def named(scene: Scene) -> tuple[list[str], list[str]]:
    event = scene.fields["replicas differ"]
    return event["workers"], event["suspects"]


def ended(scene: Scene, *members: str) -> None:
    """The run ends for all of them alike, with exit code 1; nobody was put out before."""
    saver = next(worker for worker in members if scene.kinds(worker)[-1] == "End")
    scene.say(saver, m.Saved(path="after-step-7", between=True))
    assert {scene.last(worker, m.Goodbye).code for worker in members} == {1}
    assert "lost" not in scene.fields
    assert "refused" not in scene.fields


def test_one_odd_replica_that_differs_in_one_members_part_names_both() -> None:
    """As well `a` may have sent `b` a wrong sum as `b` may have spoiled a right one."""
    scene = compared("abc", "b", a=answer("abc", 1, 1, 1, 1), b=answer("abc", 2, 2, 1, 1), c=answer("abc", 1, 1, 1, 1))
    assert named(scene) == (["b"], ["b", "a"])
    ended(scene, "a", "b", "c")


def test_two_whose_replicas_differ_in_one_members_part_are_enough_to_tell() -> None:
    scene = compared("abc", "bc", a=answer("abc", 1, 1, 1, 1), b=answer("abc", 2, 2, 1, 1), c=answer("abc", 3, 3, 1, 1))
    assert named(scene) == (["b", "c"], ["a"])
    ended(scene, "a", "b", "c")


def test_two_against_two_are_told_by_whose_part_it_is_and_not_by_standing() -> None:
    right, wrong = answer("abcd", 1, 1, 1, 1, 1), answer("abcd", 2, 1, 1, 1, 2)
    assert named(compared("abcd", "cd", a=wrong, b=wrong, c=right, d=right)) == (["c", "d"], ["d"])


def test_of_two_members_both_are_named() -> None:
    assert named(compared("ab", "b", a=answer("ab", 1, 1, 1), b=answer("ab", 2, 2, 1))) == (["b"], ["a", "b"])


@pytest.mark.parametrize(
    "odd",
    [
        answer("abc", 2, 2, 2, 1),  # in two members' parts
        answer("abc", 2, 2, 1, 1, rest=2),  # elsewhere too
        answer("abc", 2, rest=0),  # unknown where
        answer("cba", 2, 2, 1, 1),  # another view by its members, as it says
    ],
)
def test_a_difference_that_is_in_more_than_one_part_names_the_odd_one_alone(odd: m.Digests) -> None:
    one = answer("abc", 1, 1, 1, 1)
    assert named(compared("abc", "b", a=one, b=odd, c=one)) == (["b"], ["b"])


def test_who_lies_about_its_parts_is_always_among_those_named() -> None:
    """`b` says of each member's part in turn that it differs there."""
    one = answer("abc", 1, 1, 1, 1)
    for parts in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2), (1, 1, 1), (2,), ()):
        for rest in (0, 1, 2):
            suspects = named(compared("abc", "b", a=one, b=answer("abc", 2, *parts, rest=rest), c=one))[1]
            assert "b" in suspects
            assert len(suspects) <= 2


def test_as_many_views_as_a_worker_may_say() -> None:
    part = PartDigests(view=1, cut=1, members=("a",), digests=(1,))
    message = m.Digests(step=1, names=(), digests=(), parts=(part,) * (MAX_PARTS + 1))
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_worker(m.encode(message))
