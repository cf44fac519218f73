"""The executable specification: one client after another, nothing batched, nothing clever."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.engine import engines
from ..core.types import Plan
from .simulation import Simulation


@engines.register("loop")
class LoopEngine(Simulation):
    """Trains one visit at a time, in the plan's order."""

    batched = False

    def blocks(self, plan: Plan) -> Iterator[Tensor]:
        for visit in range(len(plan.client)):
            yield torch.tensor([visit], device=plan.client.device)
