"""Running statistics that clients send: which entries cannot be negative, and which never
change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...modeling.functional_model import FunctionalModel
from ...runtime.torch_compat import norm_layers
from .messages import UnreadableError


@dataclass(frozen=True)
class Statistics:
    """What is known of the entries of a model's buffers, [R] bool each.

    Args:
        variances: running variances, which are never negative: a square root is taken of them in
            every prediction.
        frozen: parameters that are not trained, which no client may move.
    """

    variances: Tensor
    frozen: Tensor

    @classmethod
    def of(cls, learner: FunctionalModel) -> Statistics:
        """Those of a model."""
        model, layout = learner.training_model, learner.buffer_layout
        norms = [
            n
            for n, module in model.named_modules()
            if isinstance(module, norm_layers())
        ]
        variances = {f"{name}.running_var".lstrip(".") for name in norms}
        frozen = {
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        return cls(*(_mask(names, layout.names, layout.sizes) for names in (variances, frozen)))

    def check(self, before: Tensor, moved: Tensor) -> None:
        """Raises UnreadableError if a client's change of a mode's statistics, [R], cannot be
        honest.
        """
        if bool((moved[self.frozen] != 0).any()):
            raise UnreadableError("'buffers' changes parameters that are not trained")
        start = before[self.variances]
        # A client sends the difference of two variances. Where its own is tiny, adding the
        # difference to the server's
        # may end below zero by rounding alone; that much is allowed here and cut off in `repair`.
        slack = 8 * torch.finfo(start.dtype).eps * start.abs()
        if bool((start + moved[self.variances] < -slack).any()):
            raise UnreadableError("'buffers' makes a running variance negative")

    def repair(self, buffers: Tensor) -> Tensor:
        """Statistics of modes, [K, R], with variances that rounding made negative set to zero."""
        return torch.where(self.variances & (buffers < 0), torch.zeros_like(buffers), buffers)


def _mask(chosen: set[str], names: tuple[str, ...], sizes: list[int]) -> Tensor:
    flags = [torch.full((size,), name in chosen) for name, size in zip(names, sizes, strict=True)]
    return torch.cat(flags) if flags else torch.zeros(0, dtype=torch.bool)
