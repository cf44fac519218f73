"""The executable specification: one client after another, nothing batched, nothing clever."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..core.engine import engines
from .simulation import Simulation


@engines.register("loop")
class LoopEngine(Simulation):
    """Trains one visit at a time, in the plan's order."""

    batched: ClassVar[bool] = False

    def order(self, counts: Tensor) -> Tensor:
        return torch.arange(len(counts))
