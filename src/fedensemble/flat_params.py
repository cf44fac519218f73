"""Flat parameter vectors: which named tensor of a model is where in one vector of length P.

A model's parameters are one vector [P], those of K models one matrix [K, P]. Algorithms then are
arithmetic on matrices and need not know the layers of a model.

Storage order: a vector holds its tensors one after another, each in row-major order, except
convolution weights. A 2-d convolution weight [O, C, h, w] is stored as [h, w, C, O], because a
convolution is then one matmul of patches [h * w * C] with a slice of the vector that needs no copy.
Checkpoints store vectors in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Named tensors of shape [..., P]; in an algorithm, "theta" always holds the model's parameters.
Tree = dict[str, Tensor]

# Tensors with this many dimensions are convolution weights and have their own storage order.
_CONV_WEIGHT_DIMS = 4


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors that a vector of length `total` consists of, in their order.

    >>> layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(2)})
    >>> vector = layout.flatten({"w": torch.ones(2, 3), "b": torch.zeros(2)})
    >>> vector.shape, layout.unflatten(vector)["w"].shape
    (torch.Size([8]), torch.Size([2, 3]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of some named tensors, in the order of the mapping."""
        return cls(tuple(tensors), tuple(t.shape for t in tensors.values()))

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes]

    @property
    def total(self) -> int:
        """Length of the vector, P."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One vector [..., P] of named tensors [..., *shape]."""
        batch_shapes = [
            tensors[n].shape[: tensors[n].dim() - len(s)]
            for n, s in zip(self.names, self.shapes, strict=True)
        ]
        if not batch_shapes:
            return torch.empty(0)
        slices = (
            to_storage_order(tensors[n], s).reshape(*b, -1)
            for n, s, b in zip(self.names, self.shapes, batch_shapes, strict=True)
        )
        return torch.cat(list(slices), dim=-1)

    def unflatten(self, vector: Tensor) -> Tree:
        """Named tensors [..., *shape] of a vector [..., P]; they are views of it."""
        # One `split` instead of a slice per tensor: its backward is one concatenation, while each
        # slice would add a zero-filled vector [..., P].
        slices = torch.split(vector, self.sizes, dim=-1)
        batch_shape = vector.shape[:-1]
        return {
            n: from_storage_order(piece, (*batch_shape, *s), s)
            for n, s, piece in zip(self.names, self.shapes, slices, strict=True)
        }


def to_storage_order(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A view of a tensor [..., *shape] with its dimensions in the order of the vector."""
    if len(shape) != _CONV_WEIGHT_DIMS:
        return tensor
    return tensor.movedim((-2, -1, -3, -4), (-4, -3, -2, -1))


def from_storage_order(piece: Tensor, full_shape: tuple[int, ...], shape: torch.Size) -> Tensor:
    """The tensor of shape `full_shape` = [..., *shape] that a slice [..., n] of a vector holds."""
    if len(shape) != _CONV_WEIGHT_DIMS:
        return piece.reshape(full_shape)
    out_channels, in_channels, height, width = shape
    weight = piece.reshape(*full_shape[:-4], height, width, in_channels, out_channels)
    return weight.movedim((-4, -3, -2, -1), (-2, -1, -3, -4))


def payload_bytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of one row of a tree of [..., P] tensors: one client's uncompressed message.

    A number counts as one value: the contract's checks say that an upload must be [..., P].
    """
    return sum((t.shape[-1] if t.dim() else 1) * t.element_size() for t in tree.values())


def select_rows(tree: Mapping[str, Tensor], index: Tensor | slice | int) -> Tree:
    """The rows of every tensor at `index`."""
    if isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1:
        # On a GPU, `index_select` takes half the time of t[index].
        return {name: t.index_select(0, index) for name, t in tree.items()}
    return {name: t[index] for name, t in tree.items()}


def tensor_leaves(values: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries.

    >>> len(tensor_leaves((torch.ones(1), [{"a": torch.ones(2)}, 3])))
    2
    """
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [leaf for value in values for leaf in tensor_leaves(value)]
