"""The module of split.py's folder."""

from __future__ import annotations

from torch import nn

DROPOUT = 0.2


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(16, 1))
