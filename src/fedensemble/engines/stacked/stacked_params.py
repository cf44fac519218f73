"""The weights of J visits while a gradient is taken: what products read, and where their slopes go.

Weights are one matrix [J, P] in float32. Products read a copy of it in their own type, made in one
pass; kernels that know where a parameter's slope belongs write it there, so that the slope [J, P]
need not be put together afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...flat_params import Layout, Tree
from ...modeling.functional_model import FunctionalModel
from .aligned_rows import copy_rows, empty_aligned

_ALIGNED = 16  # bytes; matrix products on weights that begin elsewhere take slow ways


class StackedParam:
    """One parameter of J visits.

    Args:
        weight: what products read, [J, *shape].
        slope: where its slope goes, [J, *shape], or None where autograd is to bring it.
    """

    def __init__(self, weight: Tensor, slope: Tensor | None) -> None:
        self.weight, self._slope = weight, slope
        self.written = False

    def place(self) -> Tensor | None:
        """Where to write the slope; None if that has been done before (a parameter used twice) or
        is not wanted.
        """
        if self._slope is None or self.written:
            return None
        self.written = True
        return self._slope


class StackedParams:
    """All parameters of J visits, and their slope.

    Args:
        theta: weights, [J, P].
        compute: the type of products.
        precise: names of parameters that keep their own type.
    """

    def __init__(
        self,
        learner: FunctionalModel,
        theta: Tensor,
        compute: torch.dtype,
        precise: Collection[str],
    ) -> None:
        layout = learner.theta_layout
        self.slope = (
            torch.empty_like(theta)
            if theta.is_contiguous()
            else empty_aligned(theta)[:, : theta.shape[1]]
        )
        self.leaves = {
            name: leaf.detach().requires_grad_() for name, leaf in layout.unflatten(theta).items()
        }
        self._places = layout.unflatten(self.slope)
        direct = theta.is_cuda
        read = _for_products(layout, theta, compute) if direct else {}
        self.of = {}
        for name, leaf in self.leaves.items():
            weight = leaf if name in precise else read.get(name, leaf)
            self.of[id(leaf)] = StackedParam(weight, self._places[name] if direct else None)

    def gather(self, value: Tensor) -> Tensor:
        """The slope of `value` along all weights, [J, P]."""
        found = torch.autograd.grad(value, list(self.leaves.values()), allow_unused=True)
        for (name, leaf), slope in zip(self.leaves.items(), found, strict=True):
            place = self._places[name]
            if not self.of[id(leaf)].written:
                place.zero_() if slope is None else place.copy_(slope)
            elif slope is not None:
                place.add_(slope)
        return self.slope


def _for_products(layout: Layout, theta: Tensor, compute: torch.dtype) -> Tree:
    """The weights as products like them: in their type, each parameter beginning at a multiple of
    16 bytes.
    """
    if _apart(layout, compute):
        named = layout.unflatten(theta).items()
        return {
            n: t.to(compute, copy=t.dim() == 3, memory_format=torch.contiguous_format)
            for n, t in named
        }
    copy = (
        _KEPT[theta.data_ptr()]
        if theta.data_ptr() in _KEPT
        else copy_for_products(layout, theta, compute)
    )
    return layout.unflatten(theta if copy is None else copy[:, : theta.shape[1]])


def _apart(layout: Layout, compute: torch.dtype) -> bool:
    """Whether parameters do not all begin at multiples of 16 bytes, so that each needs a copy of
    its own.
    """
    each = _ALIGNED // compute.itemsize
    return any(
        sum(layout.sizes[:n]) % each for n, shape in enumerate(layout.shapes) if len(shape) > 1
    )


def copy_for_products(layout: Layout, theta: Tensor, compute: torch.dtype) -> Tensor | None:
    """The copy of weights [J, P] that products read, in rows of a multiple of 16 bytes; None if
    there is no such.
    """
    if _apart(layout, compute) or (
        compute == theta.dtype and theta.stride(0) * compute.itemsize % _ALIGNED == 0
    ):
        return None
    copy_rows(theta, wide := empty_aligned(theta, compute))
    return wide


_KEPT: dict[int, Tensor] = {}  # by the address of weights


@contextmanager
def use_cast_copy(theta: Tensor, copy: Tensor | None) -> Iterator[None]:
    """Within it, products that need these weights read this copy, which the caller keeps up to
    date.
    """
    if copy is not None:
        _KEPT[theta.data_ptr()] = copy
    try:
        yield
    finally:
        _KEPT.pop(theta.data_ptr(), None)
