"""What device a worker drives on a host with several."""

from __future__ import annotations

import pytest
import torch

from farandole.training import signature


@pytest.mark.parametrize(
    ("gpus", "slot", "device"),
    [
        (0, "1", torch.device("cpu")),
        (1, "0", torch.device("cuda", 0)),
        (4, "0", torch.device("cuda", 0)),
        (4, "3", torch.device("cuda", 3)),
        (4, "5", torch.device("cuda", 1)),  # more workers than GPUs share them
        (4, "", torch.device("cuda", 0)),  # nobody has said
    ],
)
def test_each_slot_has_a_gpu_of_its_own(
    gpus: int, slot: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", slot)
    assert signature.device() == device
