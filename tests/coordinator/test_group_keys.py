"""A group's key: on the wire to the members of a proposed view, another for each group, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from farandole.coordinator.server import group_key, with_group_key
from farandole.protocol import messages as m
from farandole.protocol.view import View
from farandole.protocol.worker.state_machine import Connect, WorkerStateMachine
from tests.support.stage import Stage, play

VIEW = View(number=7, members=("a", "b"), group=7)


def test_each_group_of_each_run_has_a_key_of_its_own() -> None:
    keys = {group_key(secret, run, group) for secret in ("s", "t") for run in ("r", "q") for group in (1, 2, 12)}
    assert len(keys) == 12
    assert {len(key) for key in keys} == {32}
    assert group_key("s", "r1", 2) != group_key("s", "r", 12)


def test_only_a_proposal_carries_one_and_nothing_shows_it() -> None:
    proposal = with_group_key(m.Propose(view=VIEW), "s", "r")
    assert isinstance(proposal, m.Propose)
    assert proposal.key == group_key("s", "r", 7)
    (connect,) = WorkerStateMachine("a").on_message(proposal)
    assert isinstance(connect, Connect)
    assert connect.key == proposal.key
    for shown in (repr(proposal), str(proposal), repr(connect), f"{[connect]}"):
        assert "key" not in shown
        assert repr(proposal.key) not in shown
    demoted = m.ViewWithdrawn()
    assert with_group_key(demoted, "s", "r") is demoted


def test_the_members_of_a_group_are_told_the_same_key_and_no_file_is(tmp_path: Path) -> None:
    told: list[bytes] = []

    async def scenario(scene: Stage) -> None:
        workers = [scene.worker("w1"), scene.worker("w2")]
        await scene.in_view("w1", "w2")
        proposals = [message for worker in workers for message in worker.got(m.Propose)]
        told.extend(message.key for message in proposals if isinstance(message, m.Propose))
        for message in proposals:
            assert isinstance(message, m.Propose)
            assert message.key == group_key(scene.ticket.secret, scene.ticket.run, message.view.group)

    play(tmp_path, scenario)
    assert len(told) >= 2
    for path in tmp_path.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(key in content or key.hex().encode() in content for key in told), path
