"""The local steps of joint visits (`core/visits/joint.py`), which have all K modes.

The K models of a visit are trained like K visits: on the same minibatch, each with weights of its
own for the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import prng
from ...data.federated import FederatedData
from ...modeling.functional_model import FunctionalModel, GradientFn
from .block import BlockInputs, Minibatches

_CHUNK = 1024  # rows per forward pass


class JointMinibatches(Minibatches):
    """The local steps of a block of joint visits.

    Parameters of width P belong to one model, as in other visits; parameters of width K * P to K
    models.

    Args:
        model: the model as a function, in addition to the arguments of `Minibatches`.
    """

    def __init__(
        self,
        data: FederatedData,
        dtype: torch.dtype,
        gradient: GradientFn,
        inputs: BlockInputs,
        ragged: bool,
        model: FunctionalModel,
    ) -> None:
        super().__init__(data, dtype, gradient, inputs, ragged)
        self.model = model
        self.row_weight: Tensor | None = None  # [..., K, n]

    def weigh_rows(self, weight: Tensor) -> None:
        """Sets the weight of each row for each model, [..., K, n]."""
        self.row_weight = weight

    def row_losses(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row under K models in eval mode, [..., K, n], and which are rows."""
        first, sizes = self.inputs.rows["first"], self.inputs.sizes
        if theta.dim() == 2:  # a single visit, without leading dimension
            losses = self._losses_of_client(theta, buffers, int(first), int(sizes))
            return losses, torch.ones_like(losses[0])
        counts = sizes[:, 0].long()
        table = theta.new_zeros(*theta.shape[:2], int(counts.max()))
        for j, (start, size) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
            table[j, :, :size] = self._losses_of_client(theta[j], buffers[j], start, size)
        inside = torch.arange(table.shape[-1], device=table.device) < counts.unsqueeze(1)
        return table, inside.to(table.dtype)

    def _losses_of_client(self, theta: Tensor, buffers: Tensor, first: int, size: int) -> Tensor:
        """The loss of each row of a client under K models, [K, n]."""
        parts = []
        for start in range(first, first + size, _CHUNK):
            index = torch.arange(start, min(start + _CHUNK, first + size), device=theta.device)
            x, y = self.examples(index)
            # A copy of the inputs, because a model may write to them.
            pairs = zip(theta, buffers, strict=True)
            parts.append(
                torch.stack([self.model.row_losses(*pair, x.clone(), y) for pair in pairs])
            )
        return torch.cat(parts, 1)

    def on_batch(
        self, index: Tensor, weight: Tensor, key: Tensor, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradient, loss and new buffers on the examples in rows `index` of the data, [..., B].

        The loss of a visit is the sum over its models of their weighted losses.
        """
        width = self.model.theta_layout.total
        if theta.shape[-1] == width:
            return super().on_batch(index, weight, key, theta, buffers)
        modes, lead = theta.shape[-1] // width, theta.shape[:-1]
        theta, buffers = theta.reshape(*lead, modes, width), buffers.reshape(*lead, modes, -1)
        x, y = self.examples(index)
        weights = self._weights(index, weight, modes).to(theta.dtype)  # [..., K, B]
        keys = torch.as_tensor(
            prng.fold_in(key.unsqueeze(-1), torch.arange(modes, device=key.device))
        )
        if lead:
            x, y = (
                part.unsqueeze(1).expand(-1, modes, *part.shape[1:]).flatten(0, 1)
                for part in (x, y)
            )
            flat, statistics = theta.flatten(0, 1), buffers.flatten(0, 1)
            gradient, (loss, new) = self._gradient(
                flat, statistics, x, y, weights.flatten(0, 1), keys.flatten()
            )
        else:
            each = [
                self._gradient(theta[k], buffers[k], x.clone(), y, weights[k], keys[k])
                for k in range(modes)
            ]
            gradient = torch.stack([part for part, _ in each])
            loss, new = (torch.stack([part[n] for _, part in each]) for n in (0, 1))
        # The gradient function divides by the sum of the weights, or by 1 if that is smaller. A
        # joint visit divides by the number of rows, so that weights also scale the gradient.
        rows = weight.sum(-1, keepdim=True).clamp(min=1)
        scale = weights.sum(-1).clamp(min=1) / rows.to(theta.dtype)  # [..., K]
        gradient = gradient.reshape(*lead, modes, width) * scale.unsqueeze(-1)
        loss = (loss.reshape(*lead, modes) * scale).sum(-1)
        return gradient.reshape(*lead, -1), (loss, new.reshape(*lead, -1))

    def _weights(self, index: Tensor, weight: Tensor, modes: int) -> Tensor:
        """The weight of each example of a minibatch for each model, [..., K, B]."""
        counted = weight.unsqueeze(-2).expand(*weight.shape[:-1], modes, weight.shape[-1])
        if self.row_weight is None:
            return counted
        # Padding has indices of other rows, or of none; its weight is 0 in any case.
        first = self.inputs.rows["first"].unsqueeze(-1)
        row = (index - first).clamp(0, self.row_weight.shape[-1] - 1)
        return self.row_weight.gather(-1, row.unsqueeze(-2).expand_as(counted)) * counted
