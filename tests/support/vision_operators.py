"""Declares two operators of torchvision, without which a wheel for another build of torch can't be imported.

transformers imports torchvision where it is installed. Call `declare` before.
"""

from __future__ import annotations

import importlib.util

import torch

_LIBRARIES: list[torch.library.Library] = []  # they live as long as the process


def declare() -> None:
    """Declare the operators, if torchvision is installed and does not define them."""
    if _LIBRARIES or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
