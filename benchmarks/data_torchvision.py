"""torchvision's transforms as `benchmarks/data.py` uses them: a random part, resized and mirrored."""

from __future__ import annotations

from typing import Any

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_kept: list[Any] = []


def floats(side: int) -> Any:
    """float32, normalised."""
    transforms = torchvision()
    return transforms.Compose([*_drawn(side), transforms.ToTensor(), transforms.Normalize(MEAN, STD)])


def whole(side: int) -> Any:
    """uint8."""
    return torchvision().Compose([*_drawn(side), torchvision().PILToTensor()])


def _drawn(side: int) -> list[Any]:
    return [torchvision().RandomResizedCrop(side), torchvision().RandomHorizontalFlip()]


def torchvision() -> Any:
    """Its transforms. The wheel for CUDA beside torch for CPUs lacks an operator, without which it does not load."""
    import torch

    if not _kept:
        library = torch.library.Library("torchvision", "DEF")
        for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                       "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
            library.define(schema)
        _kept.append(library)
    from torchvision import transforms

    return transforms
