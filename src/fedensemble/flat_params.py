"""A model's weights as one vector: the names, shapes and places of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# named tensors of shape [..., P]; in an algorithm, "theta" is always the model
Tree = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a vector of length `total`.

    Tensors lie there one after another, filters [O, C, h, w] as [h, w, C, O]: the matrix that a
    convolution multiplies patches with.

    >>> layout = Layout.of({"w": torch.ones(2, 3), "b": torch.zeros(2)})
    >>> vector = layout.flatten({"w": torch.ones(2, 3), "b": torch.zeros(2)})
    >>> vector.shape, layout.unflatten(vector)["w"].shape
    (torch.Size([8]), torch.Size([2, 3]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """The layout of some named tensors, in their order."""
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
        """One vector [..., P] from named tensors [..., *shape]."""
        lead = [
            tensors[n].shape[: tensors[n].dim() - len(s)]
            for n, s in zip(self.names, self.shapes, strict=True)
        ]
        if not lead:
            return torch.empty(0)
        pieces = (
            stored(tensors[n], s).reshape(*d, -1)
            for n, s, d in zip(self.names, self.shapes, lead, strict=True)
        )
        return torch.cat(list(pieces), dim=-1)

    def unflatten(self, vector: Tensor) -> Tree:
        """Named tensors [..., *shape] from a vector [..., P]; one split, so that its backward is
        one concatenation.
        """
        pieces = torch.split(vector, self.sizes, dim=-1)
        lead = vector.shape[:-1]
        return {
            n: _shaped(p, (*lead, *s), s)
            for n, s, p in zip(self.names, self.shapes, pieces, strict=True)
        }


def stored(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A tensor [..., *shape] with its last dimensions in the order in which they lie in the
    vector.
    """
    return tensor.movedim((-2, -1, -3, -4), (-4, -3, -2, -1)) if len(shape) == 4 else tensor


def _shaped(piece: Tensor, whole: tuple[int, ...], shape: torch.Size) -> Tensor:
    """A piece of a vector as the tensor that lies there."""
    if len(shape) != 4:
        return piece.reshape(whole)
    outputs, channels, tall, wide = shape
    filters = piece.reshape(*whole[:-4], tall, wide, channels, outputs)
    return filters.movedim((-4, -3, -2, -1), (-2, -1, -3, -4))


def payload_bytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of one row of a tree of [..., P] tensors: what one client sends or receives,
    uncompressed.
    """
    return sum(t.shape[-1] * t.element_size() for t in tree.values())


def rows(tree: Mapping[str, Tensor], index: Tensor | slice | int) -> Tree:
    """The rows of every tensor at `index`."""
    if isinstance(index, Tensor) and index.dtype == torch.int64 and index.dim() == 1:
        # on a GPU half the time of t[index]
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
