"""torchvision, also where its wheel was made for another build of torch.

Its compiled operators (non-maximum suppression and a few more) do not load then, and the import fails although models,
transforms and datasets do without them. So two of them are declared, not defined, and the import is done once more.
"""

import sys

import torch

try:
    import torchvision
except RuntimeError as error:  # "operator torchvision::nms does not exist"
    if "torchvision::nms" not in str(error):
        raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    OPERATORS = torch.library.Library("torchvision", "DEF")  # lives as long as the process
    OPERATORS.define("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

from torchvision import datasets, models, transforms

__all__ = ["datasets", "models", "torchvision", "transforms"]
