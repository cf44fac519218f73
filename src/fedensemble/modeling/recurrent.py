"""Recurrent layers in plain operations: torch's fused ones know neither `vmap` nor keyed
dropout.
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
# (given, state, what the state adds) -> next state
Cell = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]


def _lstm_cell(given: Tensor, state: list[Tensor], fed: Tensor) -> list[Tensor]:
    i, f, g, o = (given + fed).chunk(4, dim=-1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return [torch.sigmoid(o) * torch.tanh(c), c]


def _gru_cell(given: Tensor, state: list[Tensor], fed: Tensor) -> list[Tensor]:
    r, z, n = given.chunk(3, dim=-1)
    hr, hz, hn = fed.chunk(3, dim=-1)
    z = torch.sigmoid(z + hz)
    return [(1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * state[0]]


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda given, state, fed: [activation(given + fed)]


def _layer(
    x: Tensor,
    state: list[Tensor],
    weights: Sequence[Tensor],
    cell: Cell,
    backwards: bool,
    linear: Linear,
    projection: Tensor | None = None,
) -> Any:
    """One direction of one layer: outputs [B, T, H] and the last state."""
    bias_in, bias_state = (weights[2], weights[3]) if len(weights) == 4 else (None, None)
    # all time steps at once; one unbind has one backward
    given = linear(x, weights[0], bias_in).unbind(1)
    outputs = []
    for now in reversed(given) if backwards else given:
        state = cell(now, state, linear(state[0], weights[1], bias_state))
        if projection is not None:
            state = [linear(state[0], projection, None), *state[1:]]
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, dim=1), state


def _packed(whole: Callable[..., Any], linear: Linear, *given: Any) -> Any:
    """Packed sequences as torch does them, for one client; `given` are its own arguments."""
    _, _, _, weights, _, layers, dropout, training, *_ = given
    if linear is not F.linear or is_batched(weights[0]):
        raise NotImplementedError(
            "packed sequences are of other lengths for every client; pad them to one"
        )
    if dropout > 0 and training and layers > 1:
        raise InputError(
            "Dropout between the layers of packed sequences cannot be repeated on every engine: set it to 0, or pad "
            "sequences to one length."
        )
    return whole(*given)


def _network(whole: Callable[..., Any], cell: Cell, states: int) -> Callable[..., Any]:
    """A stand-in for `whole`: torch.lstm, torch.gru, torch.rnn_tanh or torch.rnn_relu."""

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
        layer_of: Any = None,
    ) -> Any:
        if not isinstance(biases, bool):
            given = (x, initial, weights, biases, layers, p, training, bidirectional, batch_first)
            return _packed(whole, linear, *given)
        initial = list(initial) if states > 1 else [initial]
        few, directions = (4 if biases else 2), (2 if bidirectional else 1)
        per = len(weights) // (layers * directions)  # one more with a projection (proj_size)
        x = x if batch_first else x.transpose(0, 1)
        finals: list[list[Tensor]] = []
        for layer in range(layers):
            if layer > 0:
                x = dropout(x, p, training)
            outputs = []
            for direction in range(directions):
                at = layer * directions + direction
                start, own = [s[at] for s in initial], weights[at * per : (at + 1) * per]
                if per > few:
                    y, last = _layer(x, start, own[:few], cell, direction == 1, linear, own[few])
                else:
                    y, last = (layer_of or _layer)(x, start, own, cell, direction == 1, linear)
                outputs.append(y)
                finals.append(last)
            x = torch.cat(outputs, dim=-1) if directions == 2 else outputs[0]
        hidden = [torch.stack([f[s] for f in finals]) for s in range(states)]
        return (x if batch_first else x.transpose(0, 1), *hidden)

    return run


_CELLS: dict[Callable[..., Any], tuple[Cell, int]] = {
    torch.lstm: (_lstm_cell, 2),
    torch.gru: (_gru_cell, 1),
    torch.rnn_tanh: (_plain_cell(torch.tanh), 1),
    torch.rnn_relu: (_plain_cell(torch.relu), 1),
}
RECURRENT: dict[Any, Callable[..., Any]] = {
    whole: _network(whole, *cell) for whole, cell in _CELLS.items()
}
