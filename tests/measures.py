"""torchmetrics, also beside a torchvision whose wheel was made for another build of torch.

torchmetrics imports torchvision where it is installed, although only a few of its metrics need it. The compiled
operators do not load then, and the import fails for the want of two declarations.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch

try:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torchvision")
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    OPERATORS = torch.library.Library("torchvision", "DEF")  # lives as long as the process
    OPERATORS.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")

import torchmetrics as tm
from torchmetrics import classification as tc

__all__ = ["tc", "tm"]
