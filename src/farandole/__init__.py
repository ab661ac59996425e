"""farandole trains PyTorch models on machines that come and go: nothing stops, nothing is lost, the same bits.

    run = farandole.join()
    run.replicate(model=model, optimizer=optimizer)
    loader = run.loader(dataset, batch=farandole.GlobalBatch(1024, micro=64))
    for step in run.steps(loader, epochs=90):
        for images, labels in step:
            step.backward(loss_of(model(images), labels))
        optimizer.step()

The package imports torch only when a training script needs it, so that the command line stays quick.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from farandole.errors import FarandoleError

if TYPE_CHECKING:
    from farandole.data.formats.mds import MDS
    from farandole.data.formats.table import Table
    from farandole.data.formats.webdataset import WebDataset
    from farandole.data.images import ShardedImages, Synthetic
    from farandole.data.tokens import Tokens
    from farandole.data.transforms import Normalize, RandomResizedCrop, Resize
    from farandole.joining import join
    from farandole.plan.batch import GlobalBatch, PerWorkerBatch
    from farandole.plan.rules import AdaScale, LinearScaling, MomentumCompensation, RateInBuffer, SquareRoot
    from farandole.run import Run
    from farandole.training.step import Step

__version__ = "0.1.0"
logging.getLogger(__name__).addHandler(logging.NullHandler())  # who starts the process decides; see platform/output.py
_HOMES = {
    "AdaScale": "plan.rules",
    "GlobalBatch": "plan.batch",
    "LinearScaling": "plan.rules",
    "MDS": "data.formats.mds",
    "MomentumCompensation": "plan.rules",
    "Normalize": "data.transforms",
    "PerWorkerBatch": "plan.batch",
    "RandomResizedCrop": "data.transforms",
    "RateInBuffer": "plan.rules",
    "Resize": "data.transforms",
    "Run": "run",
    "ShardedImages": "data.images",
    "SquareRoot": "plan.rules",
    "Step": "training.step",
    "Synthetic": "data.images",
    "Table": "data.formats.table",
    "Tokens": "data.tokens",
    "WebDataset": "data.formats.webdataset",
    "join": "joining",
}
__all__ = [
    "MDS",
    "AdaScale",
    "FarandoleError",
    "GlobalBatch",
    "LinearScaling",
    "MomentumCompensation",
    "Normalize",
    "PerWorkerBatch",
    "RandomResizedCrop",
    "RateInBuffer",
    "Resize",
    "Run",
    "ShardedImages",
    "SquareRoot",
    "Step",
    "Synthetic",
    "Table",
    "Tokens",
    "WebDataset",
    "__version__",
    "join",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"farandole.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'farandole' has no attribute {name!r}")
