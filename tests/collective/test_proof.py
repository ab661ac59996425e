"""What a pair of a new group has to prove, over real Gloo connections, and who can't."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from farandole.collective.gloo import NONCE_BYTES, PROOF_BYTES, GlooLinks, proof, prove
from farandole.collective.transport import Unproved
from tests.support.linking import connect

KEY, OTHER = b"k" * 32, b"o" * 32
MEMBERS = ("a", "b", "c")
NONCES = {"a": b"1" * NONCE_BYTES, "b": b"2" * NONCE_BYTES}


def outcomes(groups: list[GlooLinks], keys: dict[str, bytes]) -> dict[str, str]:
    """What came of it for each member: "" or who did not prove itself, and its address."""

    def one(worker: str, group: GlooLinks) -> str:
        try:
            prove(group, worker, keys[worker])
        except Unproved as error:
            return f"{error.peer} at {error.address.partition(' ')[0]}"
        return ""

    with ThreadPoolExecutor(len(groups)) as pool:
        made = {worker: pool.submit(one, worker, group) for worker, group in zip(keys, groups, strict=True)}
        return {worker: future.result(30) for worker, future in made.items()}


def test_members_prove_themselves_to_each_other_and_the_pairs_are_as_new() -> None:
    groups = connect(MEMBERS)
    assert outcomes(groups, dict.fromkeys(MEMBERS, KEY)) == {"a": "", "b": "", "c": ""}
    ours, theirs = torch.arange(5.0), torch.zeros(5)
    sent, received = groups[0].send(ours, "b", 7), groups[1].receive(theirs, "a", 7)
    sent.wait()
    received.wait()
    assert theirs.equal(ours)


def test_who_has_another_key_is_found_out_by_everyone_and_finds_everyone_out() -> None:
    found = outcomes(connect(MEMBERS), {"a": KEY, "b": KEY, "c": OTHER})
    assert {found["a"], found["b"]} <= {"c at 127.0.0.1", "c at 127.0.0.9"}, "where it listens, or comes from"
    assert found["c"].startswith(("a at 127.0.0.", "b at 127.0.0."))


def test_a_proof_fits_one_pair_in_one_direction_of_one_group_with_its_nonces_only() -> None:
    ours = proof(KEY, 3, MEMBERS, NONCES, of="a")
    assert len(ours) == PROOF_BYTES
    assert ours == proof(KEY, 3, MEMBERS, dict(reversed(NONCES.items())), of="a"), "both ends make the same"
    others = [
        proof(OTHER, 3, MEMBERS, NONCES, of="a"),
        proof(KEY, 4, MEMBERS, NONCES, of="a"),
        proof(KEY, 3, MEMBERS, NONCES, of="b"),
        proof(KEY, 3, MEMBERS, {"a": NONCES["b"], "b": NONCES["a"]}, of="a"),
        proof(KEY, 3, MEMBERS, {**NONCES, "b": b"3" * NONCE_BYTES}, of="a"),
        proof(KEY, 3, MEMBERS, {**NONCES, "a": b"3" * NONCE_BYTES}, of="a"),
        proof(KEY, 3, MEMBERS, {"a": NONCES["a"], "c": NONCES["b"]}, of="a"),
    ]
    assert len({ours, *others}) == 1 + len(others)


def test_names_and_numbers_can_t_be_shifted_into_each_other() -> None:
    one = proof(KEY, 1, ("2a", "b"), {"2a": NONCES["a"], "b": NONCES["b"]}, of="b")
    assert one != proof(KEY, 12, ("a", "b"), NONCES, of="b")


def test_what_was_recorded_does_not_fit_a_second_time() -> None:
    """Nonces are new each time: two whole proofs of the same pair have nothing in common."""
    sent: list[bytes] = []
    groups = connect(("a", "b"))
    original = GlooLinks.send

    def recorded(self: GlooLinks, tensor: torch.Tensor, peer: str, tag: int) -> object:
        sent.append(bytes(tensor.numpy()))
        return original(self, tensor, peer, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooLinks, "send", recorded)
        for _ in range(2):
            assert outcomes(groups, dict.fromkeys(("a", "b"), KEY)) == {"a": "", "b": ""}
    assert len(set(sent)) == len(sent) == 8
