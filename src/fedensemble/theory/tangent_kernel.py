"""The empirical neural tangent kernel (NTK) of an nn.Module, in two ways.

For a model f_w with parameters w and J(x) = df_w(x) / dw, [O, P], the kernel of two inputs is the
O x O matrix

    Theta(x, x') = J(x) J(x')^T.

Gradient descent on the squared loss changes the outputs by -lr Theta times the residuals, so that
this kernel describes training in function space (Jacot, Gabriel, Hongler, "Neural tangent kernel",
NeurIPS 2018).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp

from ..errors import InputError

Method = Literal["jacobian", "products"]
_GIB = 2**30


def ntk(
    model: nn.Module,
    x: Tensor,
    x2: Tensor | None = None,
    *,
    method: Method = "jacobian",
    memory: float = 1.0,
) -> Tensor:
    """The NTK of a model at its current parameters, [B1 * O, B2 * O].

    Row b * O + o belongs to output o of input b, where O counts all outputs of one input. The model
    is evaluated in eval mode, with its trainable parameters only.

    Args:
        model: any nn.Module that processes the examples of a batch independently in eval mode.
        x, x2: inputs as the model receives them, [B1, ...] and [B2, ...]; x2 is x by default.
        method: "jacobian" contracts the Jacobians of blocks of inputs and needs one backward pass
            per input and output. "products" multiplies the kernel by unit vectors, one backward and
            one forward pass per column, and never holds a Jacobian.
        memory: limit for the Jacobians of two blocks, in GiB; at least one input per block is held.
    """
    if method not in ("jacobian", "products"):
        raise InputError(f"ntk() needs method 'jacobian' or 'products'; got {method!r}.")
    other = x if x2 is None else x2
    if not len(x) or not len(other):
        raise InputError(f"ntk() needs at least one input; got {len(x)} and {len(other)}.")
    with _evaluating(model):
        params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        if not params:
            raise InputError(f"{type(model).__name__} has no trainable parameters.")
        if method == "products":
            with _without_onednn():
                return _by_products(model, params, x, other)
        return _by_jacobians(model, params, x, x2, memory)


def _outputs(model: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of each input in one row, [B, O]."""
    result: Tensor = functional_call(model, dict(params), (x,))
    return result.reshape(len(x), -1)


def jacobian(model: nn.Module, params: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Derivatives of the outputs by each parameter tensor, [B * O, size], input by input.

    Input by input, because torch's recurrent layers have no rule for `vmap` over examples, and the
    Jacobian of a whole batch would hold the zero blocks of other inputs.
    """
    rows: dict[str, list[Tensor]] = {name: [] for name in params}
    for row in x:
        parts = jacrev(lambda p, row=row: _outputs(model, p, row[None])[0])(dict(params))
        for name, part in parts.items():
            rows[name].append(part.detach().reshape(len(part), -1))
    return {name: torch.cat(parts) for name, parts in rows.items()}


def _by_jacobians(
    model: nn.Module, params: Mapping[str, Tensor], x: Tensor, x2: Tensor | None, memory: float
) -> Tensor:
    """The kernel from Jacobians of blocks of inputs; symmetric blocks are computed once."""
    size = _block_size(model, params, x, memory)
    blocks = torch.split(x, size)
    others = blocks if x2 is None else torch.split(x2, size)
    rows: list[list[Tensor]] = []
    for i, block in enumerate(blocks):
        left = jacobian(model, params, block)
        row = [rows[j][i].mT for j in range(i)] if x2 is None else []
        for j in range(len(row), len(others)):
            same = x2 is None and i == j
            right = left if same else jacobian(model, params, others[j])
            row.append(sum((left[n] @ right[n].mT for n in left), torch.zeros(())))
        rows.append(row)
    return torch.cat([torch.cat(row, 1) for row in rows])


def _block_size(model: nn.Module, params: Mapping[str, Tensor], x: Tensor, memory: float) -> int:
    """The number of inputs per block, so that the Jacobians of two blocks fit into `memory` GiB."""
    with torch.no_grad():
        outputs = _outputs(model, params, x[:1])
    row = sum(p.numel() for p in params.values()) * outputs.element_size() * outputs.shape[1]
    return max(1, int(memory * _GIB / (2 * row)))


def _by_products(model: nn.Module, params: Mapping[str, Tensor], x: Tensor, x2: Tensor) -> Tensor:
    """The kernel column by column: Theta(x, x'_o) = J(x) (J(x')^T e_o)."""
    columns = []
    for row in x2:
        # The outputs of one input, [O], and the function that multiplies by J(x')^T.
        pulled: Any = vjp(lambda p, row=row: _outputs(model, p, row[None])[0], dict(params))
        out, pull = pulled
        for unit in torch.eye(len(out), dtype=out.dtype, device=out.device):
            pushed: Any = jvp(lambda p: _outputs(model, p, x), (dict(params),), pull(unit))
            columns.append(pushed[1].detach().flatten())
    return torch.stack(columns, 1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards all its modules are as before."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Torch's own kernels on the CPU: the recurrent layers of oneDNN have no forward mode."""
    with warnings.catch_warnings():
        # Setting the flags warns that TF32 needs an Intel GPU, and the first use of forward mode
        # loads a module of torch that warns that torch.jit is deprecated.
        for category in (UserWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        with torch.backends.mkldnn.flags(enabled=False):
            yield
