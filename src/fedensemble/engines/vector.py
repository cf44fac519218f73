"""All visits of a block at once, for any nn.Module, by `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.engine import engines
from ..core.types import Plan
from ..errors import InputError
from .folded import can_fold, folded_gradient
from .simulation import Simulation

_COPIES = 8  # of a visit's weights alive at once: start, point, gradient, slots and what autograd keeps
_BUDGET = {"cpu": 1 << 30, "cuda": 8 << 30}  # bytes for those copies
_MOST = {"cpu": 64, "cuda": 1024}  # activations, too, need room


@engines.register("vector")
class VectorEngine(Simulation):
    """Trains blocks of visits together, those with the same number of local steps side by side.

    Args:
        block: visits at once; None takes as many as a memory budget for their weights allows.
    """

    batched = True

    def __init__(self, *args: Any, block: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if block is not None and block < 1:
            raise InputError(f"Engine 'vector' needs block >= 1; got {block}.")
        few = slice(0, 8)
        inputs, targets = self.data.inputs(self.data.x[few], self.learner.dtype), self.data.y[few]
        targets = targets.to(self.learner.dtype) if targets.is_floating_point() else targets
        self.not_folded = can_fold(self.learner, inputs, targets)
        if self.not_folded is None:
            self.gradient = folded_gradient(self.learner)
        kind = "cuda" if self.learner.device.type == "cuda" else "cpu"
        bytes_a_visit = _COPIES * self.learner.theta_layout.total * self.learner.dtype.itemsize
        self.block = block or max(1, min(_MOST[kind], _BUDGET[kind] // bytes_a_visit))

    def blocks(self, plan: Plan) -> Iterator[Tensor]:
        order = torch.argsort(self.work.count(self.sizes[plan.client]), stable=True, descending=True)
        yield from torch.split(order, self.block)
