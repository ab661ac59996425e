"""What the tests in `tests/cuda/` have in common: they need a GPU. `make test-cuda` runs them where there is one."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)
