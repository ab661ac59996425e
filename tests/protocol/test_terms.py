"""The terms of a run: checked when they are built, wherever they come from, and the same for everyone."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from farandole.errors import UsageError
from farandole.protocol import messages as m
from farandole.protocol.coordinator.state import RunSettings
from farandole.protocol.messages import Checkpoints, RunTerms
from tests.support.scene import Scene

OTHERS: dict[str, Any] = {  # none is the default
    "wanted": 4, "minimum": 2, "maximum": 6, "seed": 7, "threads": 3, "ledger": True, "by_speed": False,
    "bits": "portable", "codec": "fp16", "stop_on_nan": True, "audit": 0.25, "stop_undecided": True, "pin": True,
    "checkpoints": Checkpoints(url="s3://b", every="1m", keep=5, resume="r", identity="k"),
    "heartbeat_s": 0.25, "heartbeat_timeout_s": 6.0, "stall_s": 31.0, "orphan_s": 601.0, "prepare_timeout_s": 32.0,
    "startup_failures": 9, "end_s": 11.0, "standstill_s": 61.0, "stop_s": 33.0, "views_per_group": 128,
}  # fmt: skip
BAD = [
    ({"minimum": 0}, ["--min 0"]),
    ({"wanted": 2, "minimum": 3}, ["--workers 2", "--min 3"]),
    ({"wanted": 4, "maximum": 3}, ["--max 3", "--workers 4"]),
    ({"bits": "some"}, ["--bits some", "same", "portable", "any"]),
    ({"codec": "fp8"}, ["--codec fp8", "none", "bf16", "fp16"]),
    ({"threads": 0}, ["--threads 0"]),
    ({"audit": 0.5, "bits": "any"}, ["--audit 0.5", "--bits any"]),
    ({"audit": 1.5}, ["--audit 1.5"]),
    ({"heartbeat_s": 2.0}, ["5 s", "2 s"]),
    ({"orphan_s": 5.0}, ["--orphan-limit 5", "5 s"]),
    ({"stall_s": 0.4}, ["--stall 0.4", "0.5 s"]),
    ({"checkpoints": Checkpoints(keep=0)}, ["--keep 0"]),
]


@pytest.mark.parametrize(("fields", "named"), BAD)
def test_what_can_not_be_is_said_when_they_are_built(fields: dict[str, Any], named: list[str]) -> None:
    words = re.compile("".join(rf"(?=.*{re.escape(value)}(?!\w))" for value in named))
    with pytest.raises(UsageError, match=words):
        RunTerms(**fields)
    with pytest.raises(UsageError, match=words):
        RunSettings(run="r", **fields)
    with pytest.raises(UsageError, match=words):
        msgspec.structs.replace(RunTerms(), **fields)
    written = {**msgspec.to_builtins(RunTerms()), **msgspec.to_builtins(fields)}
    with pytest.raises((UsageError, msgspec.ValidationError), match=words):
        msgspec.json.decode(msgspec.json.encode(written), type=RunTerms)


def test_every_worker_gets_all_of_them_as_they_were_written() -> None:
    assert set(OTHERS) == set(RunTerms.__struct_fields__)
    terms = RunTerms(**OTHERS)
    assert all(getattr(terms, name) != getattr(RunTerms(), name) for name in OTHERS)
    file = msgspec.json.encode(RunSettings(run="r", **msgspec.structs.asdict(terms)))
    assert msgspec.json.decode(file, type=RunSettings).terms == terms
    scene = Scene(**OTHERS)
    scene.hello("a")
    welcome = scene.last("a", m.Welcome)
    assert welcome.terms == terms
    assert m.decode_from_coordinator(m.encode(welcome)) == welcome


def test_they_stay_as_they_are() -> None:
    with pytest.raises(AttributeError):
        RunTerms().seed = 1  # type: ignore[misc]
