"""Permutation of hidden units: which weights belong to which unit of a network.

A network here is a chain: linear, convolution and recurrent layers, each of which feeds the next. A
hidden unit (in a convolution: a channel) owns a row of its layer's weight matrix and a column of
the next layer's. Every weight has at most one hidden unit on its row side and one on its column
side. A permutation of units therefore moves every weight to a position that is computed from a few
index tables [P], for all layers and networks at once and without unflattening the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import prng
from ...errors import InputError
from ...flat_params import Layout, to_storage_order
from ...modeling.functional_model import FunctionalModel
from .layer_chain import Layer, find_layer_chain

# Relative to the size of the outputs: float32 rounding over some layers is about 1e-5, a wrong
# permutation about 1.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class Units:
    """The hidden units of one layer, with positions of their weights in the parameter vector.

    Args:
        name: of the layer.
        first, width: the layer's units are numbers `first` to `first + width - 1` of all units.
        incoming: positions of the weights and biases that feed each unit, without recurrent
            weights, [W, D].
        bias: those of them that are biases, [W, D].
        outgoing: positions of the next layer's weights on each unit, [W, D].
    """

    name: str
    first: int
    width: int
    incoming: Tensor
    bias: Tensor
    outgoing: Tensor

    @property
    def all(self) -> slice:
        """Slice of the layer's units among all units."""
        return slice(self.first, self.first + self.width)


class Structure:
    """The hidden units of a chain of layers; U is their number over all layers.

    Index tables [P] say which unit is on the row side and on the column side of each weight (U if
    there is none), and by how many positions the weight moves if that unit moves by one.

    Args:
        layers: in the order of the chain.
        names, shapes: of all parameters, in the order of the parameter vector.
    """

    def __init__(
        self, layers: Sequence[Layer], names: Sequence[str], shapes: Sequence[torch.Size]
    ) -> None:
        widths = [layer.width for layer in layers[:-1]]  # the last layer's units are the outputs
        firsts = [sum(widths[:index]) for index in range(len(widths))]
        self.units, self.length = sum(widths), sum(shape.numel() for shape in shapes)
        no_unit = [torch.full((shape.numel(),), self.units) for shape in shapes]
        rows = dict(zip(names, no_unit, strict=True))
        columns = dict(zip(names, no_unit, strict=True))
        zeros = {
            name: torch.zeros(shape.numel(), dtype=torch.int64)
            for name, shape in zip(names, shapes, strict=True)
        }
        row_steps, column_steps, stages = dict(zeros), dict(zeros), dict(zeros)
        shape_of = dict(zip(names, shapes, strict=True))
        for index, layer in enumerate(layers):
            for name in layer.parameters:
                stages[name] = torch.full_like(stages[name], index)
            if index < len(widths):
                for name in (*layer.feeding, *layer.recurrent):
                    rows[name], row_steps[name] = _unit_table(
                        shape_of[name], 0, firsts[index], widths[index], per_unit=1
                    )
                for name in layer.recurrent:
                    columns[name], column_steps[name] = _unit_table(
                        shape_of[name], 1, firsts[index], widths[index], per_unit=1
                    )
            if index > 0:
                # After a convolution that was flattened, a unit has an entry per pixel.
                per_unit = shape_of[layer.weight][1] // widths[index - 1]
                columns[layer.weight], column_steps[layer.weight] = _unit_table(
                    shape_of[layer.weight], 1, firsts[index - 1], widths[index - 1], per_unit
                )
        self.row, self.column = (
            torch.cat([table[name] for name in names]) for table in (rows, columns)
        )
        self.row_step, self.column_step = (
            torch.cat([table[name] for name in names]) for table in (row_steps, column_steps)
        )
        # Index of each weight's layer in the chain, [P].
        self.stage = torch.cat([stages[name] for name in names])
        # True for biases, [P].
        self.is_bias = torch.cat(
            [torch.full((shape.numel(),), len(shape) == 1) for shape in shapes]
        )
        self.layers = tuple(
            self._find_units(layer.name, first, width)
            for layer, first, width in zip(layers, firsts, widths, strict=False)
        )

    def _find_units(self, name: str, first: int, width: int) -> Units:
        in_rows = (self.row >= first) & (self.row < first + width)
        in_columns = (self.column >= first) & (self.column < first + width)
        positions = []
        for table, mask in (
            (self.row, in_rows & ~in_columns),
            (self.row, in_rows & self.is_bias),
            (self.column, in_columns & ~in_rows),
        ):
            masked = torch.nonzero(mask).flatten()
            positions.append(masked[torch.argsort(table[masked], stable=True)].reshape(width, -1))
        return Units(name, first, width, *positions)

    def to(self, device: torch.device) -> Structure:
        """The same structure with its tables on a device."""
        moved = object.__new__(Structure)
        moved.__dict__ |= {
            n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.__dict__.items()
        }
        moved.layers = tuple(
            Units(
                u.name, u.first, u.width, *(t.to(device) for t in (u.incoming, u.bias, u.outgoing))
            )
            for u in self.layers
        )
        return moved

    def reorder(self, theta: Tensor, slot: Tensor) -> Tensor:
        """The networks [J, P] with unit u of network j moved to position `slot[j, u]`, [J, P].

        Positions count over all units, as in `Units.first`; every row of `slot` [J, U] permutes the
        units within each layer.
        """
        # By how many units each unit moves; 0 for "no unit", the last entry.
        no_unit = slot.new_full((len(slot), 1), self.units)
        shift = torch.cat([slot, no_unit], 1) - torch.arange(self.units + 1, device=slot.device)
        target = torch.arange(self.length, device=theta.device) + (
            shift[:, self.row] * self.row_step + shift[:, self.column] * self.column_step
        )
        return torch.zeros_like(theta).scatter(1, target, theta)

    def used_units(self, theta: Tensor) -> Tensor:
        """Which units of networks [..., P] have any incoming or outgoing weight but 0, [..., U]."""
        if not self.layers:
            return theta.new_zeros(*theta.shape[:-1], 0, dtype=torch.bool)
        parts = [
            (theta[..., u.incoming] != 0).any(-1) | (theta[..., u.outgoing] != 0).any(-1)
            for u in self.layers
        ]
        return torch.cat(parts, -1)

    def used_weights(self, used: Tensor) -> Tensor:
        """Which weights have only used units [..., U] on both sides, [..., P]."""
        padded = torch.cat([used, used.new_ones(*used.shape[:-1], 1)], -1)
        return padded[..., self.row] & padded[..., self.column]


def _unit_table(
    shape: torch.Size, axis: int, first: int, width: int, per_unit: int
) -> tuple[Tensor, Tensor]:
    """The unit of each entry of a parameter, and the stride between units in the vector, [n] each.

    Args:
        axis: of the parameter, of size gates * width * per_unit, that runs over units.
        first, width: as in `Units`.
        per_unit: entries per unit.
    """
    index = torch.arange(shape[axis]) // per_unit % width + first
    broadcast_shape = [1] * len(shape)
    broadcast_shape[axis] = -1
    units = index.reshape(broadcast_shape).expand(shape)
    # The strides in storage order, read off a tensor without data.
    vector = torch.empty(shape.numel(), device="meta")
    strides = Layout(("",), (shape,)).unflatten(vector)[""].stride()
    step = per_unit * strides[axis]
    return to_storage_order(units, shape).flatten(), torch.full((shape.numel(),), step)


def find_structure(model: FunctionalModel, examples: Tensor, caller: str) -> Structure:
    """The hidden units of a model, checked by permuting them on some inputs.

    Args:
        examples: inputs as the model receives them.
        caller: the algorithm, for messages.

    Raises:
        InputError: names the layer whose units cannot be identified or permuted, and why.
    """
    layers = find_layer_chain(model, examples, caller)
    structure = Structure(layers, model.theta_layout.names, model.theta_layout.shapes).to(
        model.device
    )
    theta, buffers = (tensor[0] for tensor in model.init_params(0, 1))
    # Noise, because a weight that is initialized to 0 would hide a connection from the check.
    theta = theta + 0.05 * prng.normal(prng.key(0, "structure"), len(theta)).to(theta)
    before = model.outputs(theta, buffers, examples.clone())
    for units, next_layer in zip(structure.layers, layers[1:], strict=True):
        slot = torch.arange(structure.units, device=theta.device)
        slot[units.all] = slot[units.all].roll(1)
        permuted = structure.reorder(theta[None], slot[None])[0]
        after = model.outputs(permuted, buffers, examples.clone())
        if not torch.allclose(after, before, rtol=0, atol=_TOLERANCE * float(before.abs().max())):
            raise InputError(
                f"{caller} cannot match layer '{units.name}': its units reach the outputs not only "
                f"through layer '{next_layer.name}' (but also through a residual connection, a "
                "sum, a concatenation or a reshape), so they cannot be permuted. Use a model whose "
                "layers form a chain, or another algorithm."
            )
    return structure
