"""LSTM, GRU and plain RNN layers with stacked parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...modeling.recurrent import RECURRENT
from . import dispatch
from .handlers import handles
from .linear import linear

if TYPE_CHECKING:
    from .forward import StackedForward


def _register(func: Any) -> None:
    @handles(func, takes_frozen=True)
    def run(
        forward: StackedForward,
        x: Tensor,
        initial: Any,
        weights: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        # Recurrent layers never compute below the parameters' precision, because rounding errors
        # accumulate over the time steps.
        compute, forward.compute = forward.compute, weights[0].dtype
        try:
            x = x.to(forward.compute)
            # Frozen weights of a CPU need no stack. The kernels of a GPU read stacks.
            if x.is_cuda:
                weights = [forward.expand_frozen(w) for w in weights]
            weights = [w.contiguous() if w.is_cuda else w for w in weights]
            initial = (
                [s.to(x.dtype) for s in initial] if func is torch.lstm else initial.to(x.dtype)
            )
            fused = dispatch.triton_supported(x) and x.dtype == torch.float32
            layer = _LAYERS[func] if fused else None
            named |= {"linear": lambda *args: linear(forward, *args), "run_layer": layer}
            return RECURRENT[func](forward.dropout, x, initial, weights, *others, **named)
        finally:
            forward.compute = compute


def _run_lstm_layer(
    x: Tensor, state: list[Tensor], weights: Any, cell: Any, backwards: bool, linear: Any
) -> tuple[Tensor, list[Tensor]]:
    """One direction of one LSTM layer by Triton kernels, one launch per time step."""
    from ..kernels.triton.lstm import TritonLSTM

    bias = weights[2] + weights[3] if len(weights) == 4 else None
    gates = linear(x, weights[0], bias)
    gates = gates.flip(1) if backwards else gates
    hidden, cells = (part.contiguous() for part in state)
    outputs, last = TritonLSTM.apply(gates, hidden, cells, weights[1])  # type: ignore[no-untyped-call]
    hidden = outputs[:, -1]
    return outputs.flip(1) if backwards else outputs, [hidden, last]


def _run_gru_layer(
    x: Tensor, state: list[Tensor], weights: Any, cell: Any, backwards: bool, linear: Any
) -> tuple[Tensor, list[Tensor]]:
    """One direction of one GRU layer, as `_run_lstm_layer`."""
    from ..kernels.triton.gru import TritonGRU

    bias = new_bias = None
    if len(weights) == 4:
        # Only the hidden bias of n is multiplied by a gate; the others are added to the inputs'.
        width = weights[1].shape[-1]
        bias = weights[2] + F.pad(weights[3][:, : 2 * width], (0, width))
        new_bias = weights[3][:, 2 * width :]
    gates = linear(x, weights[0], bias)
    gates = gates.flip(1) if backwards else gates
    outputs = TritonGRU.apply(gates, state[0], weights[1], new_bias)  # type: ignore[no-untyped-call]
    return outputs.flip(1) if backwards else outputs, [outputs[:, -1]]


def _rnn_layer(relu: bool) -> Any:
    def run(
        x: Tensor, state: list[Tensor], weights: Any, cell: Any, backwards: bool, linear: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """One direction of one plain RNN layer, as `_run_lstm_layer`."""
        from ..kernels.triton.rnn import TritonRNN

        bias = weights[2] + weights[3] if len(weights) == 4 else None
        inputs = linear(x, weights[0], bias)
        inputs = inputs.flip(1) if backwards else inputs
        outputs = TritonRNN.apply(inputs, state[0], weights[1], relu)  # type: ignore[no-untyped-call]
        return outputs.flip(1) if backwards else outputs, [outputs[:, -1]]

    return run


_LAYERS = {
    torch.lstm: _run_lstm_layer,
    torch.gru: _run_gru_layer,
    torch.rnn_tanh: _rnn_layer(relu=False),
    torch.rnn_relu: _rnn_layer(relu=True),
}
for _func in RECURRENT:
    _register(_func)
