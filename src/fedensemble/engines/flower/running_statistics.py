"""Checks on the running statistics (model buffers) that clients upload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...modeling.functional_model import FunctionalModel
from ...runtime.torch_compat import norm_layers
from .messages import UnreadableError


@dataclass(frozen=True)
class BufferRules:
    """Constraints on the entries of a model's flat buffer vector, as masks of shape [R].

    Args:
        variances: True for running variances. They must not be negative, because every prediction
            takes their square root.
        frozen: True for parameters that are not trained but differ between modes, and are therefore
            sent. Clients must not change them.
    """

    variances: Tensor
    frozen: Tensor

    @classmethod
    def from_model(cls, functional_model: FunctionalModel, modes: int = 1) -> BufferRules:
        """Returns the rules of a model.

        Args:
            modes: number of modes whose buffers are sent as one vector, see `core/visits/joint.py`.
        """
        model, layout = functional_model.training_model, functional_model.buffer_layout
        norms = [
            name for name, module in model.named_modules() if isinstance(module, norm_layers())
        ]
        variances = {f"{name}.running_var".lstrip(".") for name in norms}
        frozen = {
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        return cls(
            *(
                _make_mask(names, layout.names, layout.sizes).repeat(modes)
                for names in (variances, frozen)
            )
        )

    def check_change(self, before: Tensor, change: Tensor) -> None:
        """Raises UnreadableError if a client's change of a mode's buffers, [R], is impossible."""
        if bool((change[self.frozen] != 0).any()):
            raise UnreadableError("'buffers' changes parameters that are not trained")
        variance = before[self.variances]
        # A client uploads the difference of two variances. If its own variance is tiny, adding the
        # difference to the server's value can end slightly below zero through rounding alone. This
        # much is allowed here; `clamp_variances` sets such entries to zero.
        tolerance = 8 * torch.finfo(variance.dtype).eps * variance.abs()
        if bool((variance + change[self.variances] < -tolerance).any()):
            raise UnreadableError("'buffers' makes a running variance negative")

    def clamp_variances(self, buffers: Tensor) -> Tensor:
        """Returns buffers of all modes, [K, R], with negative variances set to zero."""
        return torch.where(self.variances & (buffers < 0), torch.zeros_like(buffers), buffers)


def _make_mask(selected: set[str], names: tuple[str, ...], sizes: list[int]) -> Tensor:
    masks = [torch.full((size,), name in selected) for name, size in zip(names, sizes, strict=True)]
    return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)
