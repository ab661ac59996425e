"""Checkpoints, the last resort: the state of a whole step in one file, written when a run is stopped or has failed.

Atomic (written beside, then renamed) and checksummed (a `.sha256` beside it); read with `weights_only`, so nothing in
it can be code. Resuming a run from one is not there yet.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from farandole.collective.state import decode, encode
from farandole.errors import FarandoleError
from farandole.plan.shards import Position


def save(folder: Path, position: Position, state: Any, *, whole: bool) -> Path:
    """Write `state` as of the start of `position` to FOLDER/step-N.pt and return that path.

    Not `whole`: as a script that failed between that step's end and the next one's beginning has left it, its update
    perhaps done by half; to FOLDER/after-step-N.pt.

    Raises:
        OSError: the disk is full or the folder can't be written; what was there before is untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'' if whole else 'after-'}step-{position.step:08d}.pt"
    skeleton, tensors = encode(state)
    content = {
        "position": [position.epoch, position.offset, position.step],
        "skeleton": torch.frombuffer(bytearray(skeleton), dtype=torch.uint8),
        "tensors": [tensor.detach().cpu().contiguous() for tensor in tensors],
    }
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    path.with_suffix(".sha256").write_text(f"{digest}  {path.name}\n")
    os.replace(partial, path)
    return path


def load(path: Path) -> tuple[Position, Any]:
    """Position and state from a checkpoint file.

    Raises:
        FarandoleError: the file's checksum is not the one beside it.
    """
    expected = path.with_suffix(".sha256").read_text().split()[0]
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise FarandoleError(
            f"{path}: its checksum is not the one in {path.with_suffix('.sha256').name}; it is damaged"
        )
    content = torch.load(path, weights_only=True)
    epoch, offset, step = content["position"]
    state = decode(content["skeleton"].numpy().tobytes(), content["tensors"])
    return Position(epoch=epoch, offset=offset, step=step), state
