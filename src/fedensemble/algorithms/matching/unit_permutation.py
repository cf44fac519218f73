"""Which weights belong to which hidden unit, so that units can be put into another order.

A network here is a chain: linear, convolution and recurrent layers, each of which feeds the next. A
hidden unit (of a convolution, a channel) owns a row of its layer's weights and a column of the next
layer's. Every weight has at most one unit on either side, so that a new order of units is a new
place for every weight: arithmetic on [..., P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import prng
from ...errors import InputError
from ...flat_params import Layout, stored
from ...modeling.functional_model import FunctionalModel
from .layer_chain import Layer, find_chain

# of the outputs' size; float32 and some layers cost 1e-5, a wrong order of units about 1
_CLOSE = 1e-3


@dataclass(frozen=True, eq=False)
class Units:
    """The hidden units of one layer.

    Args:
        name: of the layer.
        first, width: its units are number `first` to `first + width - 1` of all.
        incoming: places in the weight vector of what feeds each unit (weights and biases, without
            the unit's connections to its own layer), [W, D].
        bias: those of them that are biases, [W, D].
        outgoing: places of the next layer's weights on the unit, [W, D].
    """

    name: str
    first: int
    width: int
    incoming: Tensor
    bias: Tensor
    outgoing: Tensor

    @property
    def all(self) -> slice:
        """Where its units are among all."""
        return slice(self.first, self.first + self.width)


class Structure:
    """The hidden units of a chain of layers; U are all of them together.

    Args:
        layers: in the order of the chain.
        names, shapes: of all parameters, as they lie in the weight vector.
    """

    def __init__(
        self, layers: Sequence[Layer], names: Sequence[str], shapes: Sequence[torch.Size]
    ) -> None:
        widths = [layer.width for layer in layers[:-1]]  # the last layer's are outputs, not hidden
        firsts = [sum(widths[:place]) for place in range(len(widths))]
        self.units, self.length = sum(widths), sum(shape.numel() for shape in shapes)
        none = [torch.full((shape.numel(),), self.units) for shape in shapes]
        rows, columns = dict(zip(names, none, strict=True)), dict(zip(names, none, strict=True))
        steps = {
            name: torch.zeros(shape.numel(), dtype=torch.int64)
            for name, shape in zip(names, shapes, strict=True)
        }
        row_steps, column_steps, stages = dict(steps), dict(steps), dict(steps)
        sizes = dict(zip(names, shapes, strict=True))
        for place, layer in enumerate(layers):
            for name in layer.parameters:
                stages[name] = torch.full_like(stages[name], place)
            if place < len(widths):
                for name in (*layer.feeding, *layer.own):
                    rows[name], row_steps[name] = _side(
                        sizes[name], 0, firsts[place], widths[place], after=1
                    )
                for name in layer.own:
                    columns[name], column_steps[name] = _side(
                        sizes[name], 1, firsts[place], widths[place], after=1
                    )
            if place > 0:
                # pixels of a channel, behind a convolution
                after = sizes[layer.weight][1] // widths[place - 1]
                columns[layer.weight], column_steps[layer.weight] = _side(
                    sizes[layer.weight], 1, firsts[place - 1], widths[place - 1], after
                )
        self.row, self.column = (
            torch.cat([side[name] for name in names]) for side in (rows, columns)
        )
        self.row_step, self.column_step = (
            torch.cat([t[n] for n in names]) for t in (row_steps, column_steps)
        )
        # [P] how many layers stand before a weight's own
        self.stage = torch.cat([stages[name] for name in names])
        # [P] biases
        self.flat = torch.cat([torch.full((shape.numel(),), len(shape) == 1) for shape in shapes])
        self.layers = tuple(
            self._units(layer.name, first, width)
            for layer, first, width in zip(layers, firsts, widths, strict=False)
        )

    def _units(self, name: str, first: int, width: int) -> Units:
        inside = (self.row >= first) & (self.row < first + width)
        below = (self.column >= first) & (self.column < first + width)
        places = []
        for side, chosen in (
            (self.row, inside & ~below),
            (self.row, inside & self.flat),
            (self.column, below & ~inside),
        ):
            found = torch.nonzero(chosen).flatten()
            places.append(found[torch.argsort(side[found], stable=True)].reshape(width, -1))
        return Units(name, first, width, *places)

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
        """The networks [J, P] with unit u of network j moved to place `slot[j, u]` of its layer's,
        [J, U] -> [J, P].

        Slots count over all units, as numbers of units do; every row is a permutation within each
        layer.
        """
        moved = torch.cat([slot, slot.new_full((len(slot), 1), self.units)], 1) - torch.arange(
            self.units + 1, device=slot.device
        )
        place = torch.arange(self.length, device=theta.device) + (
            moved[:, self.row] * self.row_step + moved[:, self.column] * self.column_step
        )
        return torch.zeros_like(theta).scatter(1, place, theta)

    def alive(self, theta: Tensor) -> Tensor:
        """Which units of networks [..., P] are in use: those with any weight but 0 into or out of
        them, [..., U].
        """
        if not self.layers:
            return theta.new_zeros(*theta.shape[:-1], 0, dtype=torch.bool)
        parts = [
            (theta[..., u.incoming] != 0).any(-1) | (theta[..., u.outgoing] != 0).any(-1)
            for u in self.layers
        ]
        return torch.cat(parts, -1)

    def held(self, used: Tensor) -> Tensor:
        """Which weights exist where only some units [..., U] are in use: both of its units must be,
        [..., P].
        """
        padded = torch.cat([used, used.new_ones(*used.shape[:-1], 1)], -1)
        return padded[..., self.row] & padded[..., self.column]


def _side(
    shape: torch.Size, axis: int, first: int, width: int, after: int
) -> tuple[Tensor, Tensor]:
    """The unit of each entry along an axis of [before * W * after] entries, and how far apart units
    lie, flat [n].
    """
    index = torch.arange(shape[axis]) // after % width + first
    form = [1] * len(shape)
    form[axis] = -1
    strides = (
        Layout(("",), (shape,)).unflatten(torch.empty(shape.numel(), device="meta"))[""].stride()
    )
    step = after * strides[axis]
    return stored(index.reshape(form).expand(shape), shape).flatten(), torch.full(
        (shape.numel(),), step
    )


def find_structure(learner: FunctionalModel, examples: Tensor, method: str) -> Structure:
    """The units of a model, tried out on some inputs.

    Args:
        examples: inputs as the model sees them.
        method: who asks, for messages.

    Raises:
        InputError: naming the layer whose units cannot be told apart or change places, and why.
    """
    layers = find_chain(learner, examples, method)
    structure = Structure(layers, learner.theta_layout.names, learner.theta_layout.shapes).to(
        learner.device
    )
    theta, buffers = (tensor[0] for tensor in learner.initial(0, 1))
    # With no weight at 0, behind which a connection could hide.
    theta = theta + 0.05 * prng.normal(prng.key(0, "structure"), len(theta)).to(theta)
    before = learner.outputs(theta, buffers, examples.clone())
    for units, following in zip(structure.layers, layers[1:], strict=True):
        slot = torch.arange(structure.units, device=theta.device)
        slot[units.all] = slot[units.all].roll(1)
        after = learner.outputs(
            structure.reorder(theta[None], slot[None])[0], buffers, examples.clone()
        )
        if not torch.allclose(after, before, rtol=0, atol=_CLOSE * float(before.abs().max())):
            raise InputError(
                f"{method} cannot match layer '{units.name}': its units reach the outputs by another way than layer "
                f"'{following.name}' alone (a residual connection, a sum, a concatenation or a reshape), so they "
                "cannot change places. Use a model whose layers form a chain, or another algorithm."
            )
    return structure
