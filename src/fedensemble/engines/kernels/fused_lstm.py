"""An LSTM layer with J sets of weights on a GPU: fused cells, and the slope of its weights in one
product.

Left to autograd, every time step would add its own [J, 4H, H] slope to a sum; that was most of the
time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_cell = torch.ops.aten._thnn_fused_lstm_cell
_cell_backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl


class LSTMLayer(torch.autograd.Function):
    """Outputs [N, T, H] and the last cell [N, H] of one direction of one layer, N = J * B.

    Args:
        given: what the inputs add to the gates, [N, T, 4H], biases included.
        hidden, cell: the first state, [N, H].
        weight: of the state, [J, 4H, H].
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> Any:
        visits, turned = len(weight), weight.transpose(1, 2)
        hiddens, cells, gates = [hidden], [cell], []
        for now in given.unbind(1):
            fed = torch.bmm(hidden.reshape(visits, -1, hidden.shape[-1]), turned).reshape(now.shape)
            hidden, cell, gate = _cell(now.contiguous(), fed, cell)
            hiddens.append(hidden)
            cells.append(cell)
            gates.append(gate)
        ctx.save_for_backward(weight, torch.stack(hiddens[:-1], 1), *cells, *gates)
        return torch.stack(hiddens[1:], 1), cell

    @staticmethod
    def backward(ctx: Any, along_outputs: Tensor, along_last: Tensor) -> Any:
        weight, before, *kept = ctx.saved_tensors
        visits, steps, width = len(weight), before.shape[1], before.shape[2]
        cells, gates = kept[: steps + 1], kept[steps + 1 :]
        along_cell = along_last.contiguous()
        along_hidden = torch.zeros_like(along_cell)
        slopes = []
        for t in reversed(range(steps)):
            along_hidden = along_hidden + along_outputs[:, t]
            slope, along_cell, _ = _cell_backward(
                along_hidden, along_cell, cells[t], cells[t + 1], gates[t], False
            )
            slopes.append(slope)
            along_hidden = torch.bmm(slope.reshape(visits, -1, 4 * width), weight).reshape(
                -1, width
            )
        along_given = torch.stack(slopes[::-1], 1)  # [N, T, 4H]
        left = along_given.reshape(visits, -1, 4 * width).transpose(1, 2)
        return (
            along_given,
            along_hidden,
            along_cell,
            torch.bmm(left, before.reshape(visits, -1, width)),
        )
