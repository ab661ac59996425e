"""Checkpoints made to do harm, whose manifests fit: each is damaged, says why, and costs no more memory than it has."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attack import files
from farandole.checkpoint import content as archive
from farandole.checkpoint.restore import find
from farandole.checkpoint.store import MAX_MANIFEST_BYTES, DamagedError, Store
from farandole.errors import FarandoleError
from tests.support import forked
from tests.support.harness import ENVIRON, FARANDOLE

JOBS, ROOT = Path(__file__).parents[1] / "jobs", Path(__file__).parents[2]


def load(data: bytes) -> Any:
    return archive.load(io.BytesIO(data), "x")


def test_what_they_are_made_from_is_one() -> None:
    position, state = load(files.saved(files.honest(2.0)))
    assert position.step == 3
    assert torch.equal(state["objects"]["model"]["w0"], torch.full((16,), 2.0))
    assert state["objects"].keys() == {"model"}
    assert load(files.beside(b"]"))[1]["objects"]["more"] == []


@pytest.mark.failure(
    "Checkpoints",
    "the only checkpoint was not written by farandole (compressed, other types inside, larger than its file)",
)
@pytest.mark.parametrize("make", files.BAD_CHECKPOINTS.values(), ids=files.BAD_CHECKPOINTS)
def test_it_is_damaged_and_the_one_before_it_is_used(tmp_path: Path, make: Callable[[], bytes]) -> None:
    files.checkpoint(tmp_path, files.saved(files.honest()), step=1)
    files.checkpoint(tmp_path, make(), step=3)
    found = find([str(tmp_path)])
    assert found.manifest is not None
    assert found.manifest.step == 1
    [said] = found.damaged
    assert re.match(r"step-00000003-\w{8}\b", said)
    assert "\n" not in said
    assert said.isprintable()


@pytest.mark.parametrize(
    ("make", "named", "unread"),
    [
        (lambda: files.deflated(1 << 20), r"\barchive/data/0\b", True),
        (lambda: files.with_entry("archive/constants.pkl"), "'archive/constants.pkl'", True),
        (lambda: files.with_entry("archive/../x"), r"'archive/\.\./x'", True),
        (files.overlapping, r"\barchive/data/1\b", True),
        (files.storing, None, True),
        (files.encoding, None, True),
        (files.nesting, None, False),
        (files.viewing, rf"\b{len(files.viewing())}\b", False),
    ],
)
def test_it_is_found_by_what_it_is(
    make: Callable[[], bytes], named: str | None, unread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if unread:
        monkeypatch.setattr(torch, "load", None)  # it is found before torch reads any of it
    with pytest.raises(DamagedError, match=named) as caught:
        load(make())
    found = caught.value.__cause__
    assert isinstance(found, DamagedError)
    assert found.__cause__ is None, "it is not torch that fails"


def test_more_objects_than_anybody_saves_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_OBJECTS", 1000)
    load(files.beside(b"]" + b"(" + b"]" * 800 + b"e"))
    with pytest.raises(DamagedError, match=r"\b1000\b"):
        load(files.beside(b"]" + b"(" + b"]" * 1000 + b"e"))


def test_no_command_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "called"
    with pytest.raises(DamagedError, match="'posix system'"):
        load(files.running(f"touch {mark}"))
    assert not mark.exists()


def test_none_takes_memory_that_it_has_not(tmp_path: Path) -> None:
    """Of a process that reads them all, and the shards of `data/test_hostile.py` too. The deflated one is 260 kB for
    256 MB; the lists in lists are 400 kB, and each list takes 60 bytes.
    """
    done = subprocess.run(
        [sys.executable, "-m", "attack.reader", str(tmp_path)], cwd=ROOT, env=ENVIRON, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["read"] == []
    assert not told["called"]
    assert told["mib"] < 100


# --- arbitrary ones ----------------------------------------------------------------------------------------------

HONEST = files.saved(
    files.honest(1.0, 3) | {"other": {"b": b"\x00\xff", "t": (1, 2.5, None), "c": [True, "ü", 1 << 63]}}
)


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A good one with a few bytes changed, cut out or put in."""
    data = bytearray(HONEST)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 8)))
        data[at:until] = draw(
            st.one_of(st.binary(max_size=8), st.just(bytes(data[at:until]) * 2), st.just(struct.pack("<i", 1 << 30)))
        )
    return bytes(data)


@st.composite
def restructured(draw: st.DrawFn) -> bytes:
    """A good one whose pickle is not as it was: in an archive that fits."""
    structure = bytearray(files.structure_of(files.honest(1.0)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(structure)))
        until = min(len(structure), at + draw(st.integers(0, 4)))
        structure[at:until] = draw(
            st.one_of(st.binary(max_size=4), st.just(bytes(structure[at:until]) * 2), st.sampled_from(OPERATIONS))
        )
    return files.structured(bytes(structure))


OPERATIONS = [bytes([byte]) for byte in b".()]}lt\x85\x86\x87RQbaesu0122NIJKMXq\x88\x89h\x81\x80c"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.one_of(st.binary(max_size=300), changed(), restructured()))
def test_arbitrary_bytes_are_a_checkpoint_or_damaged(data: bytes) -> None:
    try:
        _, state = load(data)
    except FarandoleError as error:
        assert isinstance(error, DamagedError) or type(error) is FarandoleError  # noqa: PT017  another format
    else:
        tensors = [value for each in state["objects"].values() if isinstance(each, dict) for value in each.values()]
        assert sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor)) <= len(data)


# --- manifests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"step": 4}, "step-00000004-"),
        ({"whole": False}, "after-step-00000003-"),
        ({"step": "3"}, r"`\$\.step`"),
        ({"offset": -1}, r"`\$\.offset`"),
        ({"epoch": 1 << 60}, r"`\$\.epoch`"),
        ({"size": -1}, r"`\$\.size`"),
        ({"sha256": "../x"}, r"`\$\.sha256`"),
        ({"run": "\x1b[2J"}, r"`\$\.run`"),
        ({"worker": "w" * 257}, r"`\$\.worker`"),
        ({"facts": [["a"]]}, r"`\$\.facts\b"),
    ],
)
def test_a_manifest_that_claims_what_can_not_be_is_damaged(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    store = Store(str(files.checkpoint(tmp_path, files.saved(files.honest()), claims=said)))
    [entry] = store.entries()
    with pytest.raises(DamagedError, match=rf"{entry.stem}\.json .*{message}"):
        store.manifest(entry.stem)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_bytes(b'{"more":' + b"[" * 100_000)


def vast(path: Path) -> None:
    os.truncate(path, 1 << 34)


def without_end(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("suffix", "do", "said"),
    [
        *((suffix, do, "") for suffix in (".json", ".pt") for do in (directory, fifo, without_end)),
        (".json", nested, ""),
        (".json", vast, rf"\b{1 << 34} bytes.*\b{MAX_MANIFEST_BYTES}\b"),
        (".pt", vast, r"\b\d+ bytes.*\b1\d\d\d\b"),
    ],
)
def test_what_is_no_file_or_has_no_end_is_damaged(
    tmp_path: Path, suffix: str, do: Callable[[Path], None], said: str
) -> None:
    files.checkpoint(tmp_path, files.saved(files.honest()), step=1)
    files.checkpoint(tmp_path, files.saved(files.honest(1.0)), step=3)
    do(next(tmp_path.glob(f"step-00000003*{suffix}")))
    found = find([str(tmp_path)])
    assert found.position.step == 3  # as the older one's content says
    assert found.manifest is not None
    assert found.manifest.step == 1
    [damaged] = found.damaged
    assert re.search(rf"step-00000003-\w{{8}}\{suffix} .*{said}", damaged)


# --- at the command line -----------------------------------------------------------------------------------------


def text(path: Path) -> Path:
    path.write_text("no checkpoint\n")
    return path


RESUMED = {
    "a text": lambda folder: text(folder / "notes.txt"),
    "a text that is called so": lambda folder: text(folder / "step-00000003-01234567.pt"),
    "nothing": lambda folder: folder / "none",
    "an empty folder": lambda folder: folder,
    "no manifest": lambda folder: _without(files.checkpoint(folder, b""), ".json"),
}


def _without(folder: Path, suffix: str) -> Path:
    next(folder.glob(f"*{suffix}")).unlink()
    return next(folder.iterdir())


@pytest.mark.failure(
    "Checkpoints",
    "`--resume` names a text, a folder without checkpoints, or a file without its manifest",
    seen="one sentence at once",
    outcome="exit code 2; nothing is started",
)
@pytest.mark.processes
@pytest.mark.parametrize("make", RESUMED.values(), ids=RESUMED)
def test_resume_from_what_is_no_checkpoint_is_a_sentence(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "there").mkdir()
    place = make(tmp_path / "there")
    done = run(tmp_path, "--resume", str(place))
    assert done.returncode == 2
    assert str(place) in re.sub(r"\s", "", done.stderr)
    assert re.search(r"--resume\b|\.json\b", done.stderr)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*FARANDOLE, "run", "--workers", "1", "--folder", str(folder / "run"), *options, str(JOBS / "small.py")]
    return forked.run([*command, str(folder / "out")], env=ENVIRON, timeout=120)


@pytest.mark.failure(
    "Checkpoints",
    "the only checkpoint was not written by farandole (compressed, other types inside, larger than its file)",
    seen="one sentence with the file and the reason when the first worker starts",
    outcome="exit code 1; it is never loaded, and nothing is overwritten",
)
@pytest.mark.processes
def test_a_worker_says_what_is_wrong_with_the_only_one_and_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "--resume", str(files.checkpoint(tmp_path / "there", files.deflated(1 << 28))))
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert str(tmp_path / "there") in said
    assert "archive/data/0" in said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.processes
def test_a_state_of_other_objects_than_its_manifest_says_is_said_to_be_that(tmp_path: Path) -> None:
    """What fits is the manifest: of a checkpoint that this very script has written."""
    assert run(tmp_path).returncode == 0
    saved = tmp_path / "run" / "checkpoints"
    manifest = msgspec.json.decode(next(saved.glob("*.json")).read_bytes())
    there = files.checkpoint(
        tmp_path / "there", files.saved(files.honest()), step=manifest["step"], claims={"facts": manifest["facts"]}
    )
    (tmp_path / "second").mkdir()
    done = run(tmp_path / "second", "--resume", str(there))
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert str(there) in said
    assert "Error: " in said, "what its state has met with"
    assert "Traceback" not in said
