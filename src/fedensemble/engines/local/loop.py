"""The executable specification: one client after another, nothing batched, nothing clever."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...core.engine import engines
from .local_engine import LocalEngine


@engines.register("loop")
class LoopEngine(LocalEngine):
    """Trains one visit at a time, in the plan's order."""

    batched: ClassVar[bool] = False

    @property
    def precision(self) -> str:  # type: ignore[override]
        """That of the weights, less on a GPU where torch's switches say so: it leaves them as they
        are.
        """
        if self.learner.dtype != torch.float32 or self.learner.device.type != "cuda":
            return str(self.learner.dtype).removeprefix("torch.")
        try:
            products, convolutions = (
                torch.get_float32_matmul_precision() != "highest",
                torch.backends.cudnn.allow_tf32,
            )
        except RuntimeError:  # set by torch's newer switches, after which these may not be asked
            new = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
            products, convolutions = (switch.fp32_precision == "tf32" for switch in new)
        if products == convolutions:
            return "tf32" if products else "float32"
        return f"float32, {'products' if products else 'convolutions'} tf32"

    def order(self, counts: Tensor) -> Tensor:
        return torch.arange(len(counts))
