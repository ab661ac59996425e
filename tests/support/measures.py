"""torchmetrics, also beside a torchvision whose wheel was made for another build of torch.

torchmetrics imports torchvision where it is installed, and fails where that fails (`examples/vision.py`).
"""

from __future__ import annotations

import contextlib
import importlib

with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("examples.vision")

import torchmetrics as tm
from torchmetrics import classification as tc
from torchmetrics import detection as td

__all__ = ["tc", "td", "tm"]
