"""LSTM, GRU and RNN layers in elementary operations.

torch's fused recurrent functions support neither `vmap` nor keyed dropout. `RECURRENT` maps each of
them (torch.lstm, torch.gru, ...) to a replacement with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..runtime.torch_compat import is_batched

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# (gates from the input, state, gates from the hidden state) -> next state
Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]


def _lstm_cell(from_input: Tensor, state: list[Tensor], from_hidden: Tensor) -> list[Tensor]:
    i, f, g, o = (from_input + from_hidden).chunk(4, dim=-1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def _gru_cell(from_input: Tensor, state: list[Tensor], from_hidden: Tensor) -> list[Tensor]:
    r, z, n = from_input.chunk(3, dim=-1)
    hr, hz, hn = from_hidden.chunk(3, dim=-1)
    z = torch.sigmoid(z + hz)
    return [(1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * state[0]]


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda from_input, state, from_hidden: [activation(from_input + from_hidden)]


def _run_layer(
    x: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    cell: Cell,
    reverse: bool,
    linear: Linear,
    projection: Tensor | None = None,
) -> Any:
    """Outputs [B, T, H] and the last state of one direction of one layer, for inputs [B, T, F]."""
    bias_ih, bias_hh = (weights[2], weights[3]) if len(weights) == 4 else (None, None)
    # One matmul for all time steps. `unbind` instead of indexing, because its backward is one
    # stack, while every index would add a zero-filled tensor.
    steps = linear(x, weights[0], bias_ih).unbind(1)
    outputs = []
    for from_input in reversed(steps) if reverse else steps:
        state = cell(from_input, state, linear(state[0], weights[1], bias_hh))
        if projection is not None:
            state = [linear(state[0], projection, None), *state[1:]]
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if reverse else outputs, dim=1), state


def _run_packed(function: Callable[..., Any], linear: Linear, *args: Any) -> Any:
    """Packed sequences by torch's own function, for one client; `args` are its arguments."""
    _, _, _, weights, _, layers, dropout, training, *_ = args
    if linear is not F.linear or is_batched(weights[0]):
        raise NotImplementedError(
            "packed sequences have different lengths for every client; pad them to one length"
        )
    if dropout > 0 and training and layers > 1:
        raise InputError(
            "Dropout between the layers of packed sequences is not reproducible across engines: "
            "set it to 0, or pad sequences to one length."
        )
    return function(*args)


def _replacement(function: Callable[..., Any], cell: Cell, states: int) -> Callable[..., Any]:
    """A replacement for torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu.

    Args:
        states: tensors in a state: 2 for an LSTM (h and c), else 1.
    """

    def run(
        dropout: Callable[..., Tensor],
        x: Tensor,
        initial: Any,
        weights: Sequence[Tensor],
        biases: Any,
        layers: Any = None,
        p: Any = None,
        training: Any = None,
        bidirectional: Any = None,
        batch_first: Any = None,
        linear: Linear = F.linear,
        run_layer: Any = None,
    ) -> Any:
        """As `function`; `dropout`, `linear` and `run_layer` implement its parts."""
        # torch's functions have two signatures. Only that for packed sequences has a tensor here.
        if not isinstance(biases, bool):
            args = (x, initial, weights, biases, layers, p, training, bidirectional, batch_first)
            return _run_packed(function, linear, *args)
        initial = list(initial) if states > 1 else [initial]
        unprojected, directions = (4 if biases else 2), (2 if bidirectional else 1)
        # Weights per layer and direction; with a projection (proj_size) there is one more.
        per_layer = len(weights) // (layers * directions)
        x = x if batch_first else x.transpose(0, 1)
        final_states: list[list[Tensor]] = []
        for layer in range(layers):
            if layer > 0:
                x = dropout(x, p, training)
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                start, own = [s[at] for s in initial], weights[at * per_layer :][:per_layer]
                reverse = direction == 1
                if per_layer > unprojected:
                    *own, projection = own
                    y, last = _run_layer(x, start, own, cell, reverse, linear, projection)
                else:
                    y, last = (run_layer or _run_layer)(x, start, own, cell, reverse, linear)
                outputs.append(y)
                final_states.append(last)
            x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
        hidden = [torch.stack([f[s] for f in final_states]) for s in range(states)]
        return (x if batch_first else x.transpose(0, 1), *hidden)

    return run


_CELLS: dict[Callable[..., Any], tuple[Cell, int]] = {
    torch.lstm: (_lstm_cell, 2),
    torch.gru: (_gru_cell, 1),
    torch.rnn_tanh: (_rnn_cell(torch.tanh), 1),
    torch.rnn_relu: (_rnn_cell(torch.relu), 1),
}
RECURRENT: dict[Any, Callable[..., Any]] = {
    function: _replacement(function, *cell) for function, cell in _CELLS.items()
}
