"""Engine `loop`: the executable specification, which trains one visit at a time."""

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
        """Precision of matmuls and convolutions.

        It is that of the weights, except on a GPU where torch's global TF32 flags are on. This
        engine does not change these flags.
        """
        if self.model.dtype != torch.float32 or self.model.device.type != "cuda":
            return str(self.model.dtype).removeprefix("torch.")
        try:
            matmul_tf32, conv_tf32 = (
                torch.get_float32_matmul_precision() != "highest",
                torch.backends.cudnn.allow_tf32,
            )
        except RuntimeError:  # raised if the program has set torch's newer `fp32_precision` flags
            flags = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
            matmul_tf32, conv_tf32 = (flag.fp32_precision == "tf32" for flag in flags)
        if matmul_tf32 == conv_tf32:
            return "tf32" if matmul_tf32 else "float32"
        return f"float32, {'products' if matmul_tf32 else 'convolutions'} tf32"

    def order(self, counts: Tensor) -> Tensor:
        return torch.arange(len(counts))
