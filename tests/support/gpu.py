"""What the tests in `tests/cuda/` have in common: they need a GPU. `make test-cuda` runs them where there is one.

Those that name no process and no property of a GPU run on the CPU as well, so that they don't rot where there is none.
"""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_EACH = pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=NEEDS_GPU)], ids=str)
