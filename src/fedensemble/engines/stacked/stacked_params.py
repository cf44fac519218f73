"""Stacked parameters of J visits: what matmuls read, and where kernels write the gradient.

The master copy is one float32 matrix [J, P]. Matmuls read a copy of it in their own dtype, made in
one pass. Kernels that know where the gradient of their parameter belongs write it directly into the
gradient matrix [J, P]; otherwise autograd would return one tensor per parameter, and putting them
together would read and write all gradients once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...flat_params import Layout, Tree
from ...modeling.functional_model import FunctionalModel
from .aligned_rows import copy_rows, empty_aligned

_ALIGNMENT = 16  # bytes; cuBLAS uses slower kernels for matrices that start at other addresses


class StackedParam:
    """One parameter of J visits.

    Args:
        weight: what matmuls read, [J, *shape].
        grad: where its gradient goes, [J, *shape], or None where autograd is to return it.
    """

    def __init__(self, weight: Tensor, grad: Tensor | None) -> None:
        self.weight, self._grad = weight, grad
        self.written = False

    def grad_buffer(self) -> Tensor | None:
        """The tensor to write the gradient to, or None.

        It is None if the gradient is not wanted, or if it was asked for before: a parameter that is
        used twice has two gradients, of which autograd adds the second.
        """
        if self._grad is None or self.written:
            return None
        self.written = True
        return self._grad


class StackedParams:
    """All parameters of J visits, and their gradient.

    Args:
        theta: parameters, [J, P].
        compute: dtype of matmuls.
        full_precision: names of parameters that keep their own dtype.
    """

    def __init__(
        self,
        model: FunctionalModel,
        theta: Tensor,
        compute: torch.dtype,
        full_precision: Collection[str],
    ) -> None:
        layout = model.theta_layout
        if theta.is_contiguous():
            self.grad = torch.empty_like(theta)
        else:
            self.grad = empty_aligned(theta)[:, : theta.shape[1]]
        params = layout.unflatten(theta)
        self.leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        self._grads = layout.unflatten(self.grad)
        on_gpu = theta.is_cuda
        copies = _cast_for_matmul(layout, theta, compute) if on_gpu else {}
        self.by_id = {}
        for name, leaf in self.leaves.items():
            weight = leaf if name in full_precision else copies.get(name, leaf)
            self.by_id[id(leaf)] = StackedParam(weight, self._grads[name] if on_gpu else None)

    def gather_grad(self, value: Tensor) -> Tensor:
        """The gradient of `value` w.r.t. all parameters, [J, P]."""
        grads = torch.autograd.grad(value, list(self.leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(self.leaves.items(), grads, strict=True):
            buffer = self._grads[name]
            if not self.by_id[id(leaf)].written:
                buffer.zero_() if grad is None else buffer.copy_(grad)
            elif grad is not None:
                buffer.add_(grad)
        return self.grad


class FrozenParams:
    """Parameters that are not trained, in one pass: one copy for all visits, without a stack.

    `tensors` are new objects in each pass, which share the memory of the model's. nn.LSTM and its
    like call other functions if their weights are the same objects as in the last pass, and a pass
    has to make the recorded calls.

    Args:
        frozen: parameters by name, each [*shape].
        copies: of matrices, as matmuls read them, see `copy_matrices`.
    """

    def __init__(self, frozen: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        self.tensors = {name: value.detach() for name, value in frozen.items()}
        self._copies = {id(t): copies.get(name, t) for name, t in self.tensors.items()}

    def __contains__(self, value: object) -> bool:
        return id(value) in self._copies

    def cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in this dtype; that of a frozen matrix is the copy for matmuls, if it fits."""
        return self._copies.get(id(value), value).to(dtype)


def copy_matrices(
    frozen: Mapping[str, Tensor], compute: torch.dtype, full_precision: Collection[str]
) -> Tree:
    """The frozen matrices in the dtype of matmuls, so that no step has to cast them.

    Args:
        full_precision: names of parameters that keep their own dtype.
    """
    return {
        name: value.to(compute)
        for name, value in frozen.items()
        if value.is_floating_point() and value.dim() > 1 and name not in full_precision
    }


def _cast_for_matmul(layout: Layout, theta: Tensor, compute: torch.dtype) -> Tree:
    """The parameters as matmuls read them: in dtype `compute`, each at an aligned address."""
    if not _is_aligned(layout, compute):
        params = layout.unflatten(theta).items()
        return {
            name: param.to(compute, copy=param.dim() == 3, memory_format=torch.contiguous_format)
            for name, param in params
        }
    if theta.data_ptr() in _CAST_COPIES:
        copy: Tensor | None = _CAST_COPIES[theta.data_ptr()]
    else:
        copy = cast_copy(layout, theta, compute)
    return layout.unflatten(theta if copy is None else copy[:, : theta.shape[1]])


def _is_aligned(layout: Layout, compute: torch.dtype) -> bool:
    """True if all matrices start at multiples of 16 bytes, so that one copy serves them all."""
    step = _ALIGNMENT // compute.itemsize
    return not any(
        sum(layout.sizes[:n]) % step for n, shape in enumerate(layout.shapes) if len(shape) > 1
    )


def cast_copy(layout: Layout, theta: Tensor, compute: torch.dtype) -> Tensor | None:
    """A copy of parameters [J, P] in dtype `compute` with aligned rows; None if none is needed."""
    readable = compute == theta.dtype and theta.stride(0) * compute.itemsize % _ALIGNMENT == 0
    if readable or not _is_aligned(layout, compute):
        return None
    copy_rows(theta, wide := empty_aligned(theta, compute))
    return wide


# Copies that captured training keeps up to date, by the address of the parameters. A CUDA graph
# records addresses, so that within one capture the parameters always lie at the same address. The
# SGD kernel writes new parameters and their bf16 copy in one pass; without this table each gradient
# would cast all parameters again.
_CAST_COPIES: dict[int, Tensor] = {}


@contextmanager
def use_cast_copy(theta: Tensor, copy: Tensor | None) -> Iterator[None]:
    """Matmuls with these parameters read `copy` inside; the caller keeps it up to date."""
    if copy is not None:
        _CAST_COPIES[theta.data_ptr()] = copy
    try:
        yield
    finally:
        _CAST_COPIES.pop(theta.data_ptr(), None)
