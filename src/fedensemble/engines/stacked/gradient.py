"""The minibatch gradients of J visits from one stacked forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...modeling.frozen import check_unchanged, write_counts
from ...modeling.functional_model import FunctionalModel, GradientFn
from ...modeling.model_checks import require_tensor
from ...modeling.parameter_swap import swap_parameters
from .call_log import Call
from .errors import PATH_CHANGED, NotStackable
from .forward import StackedForward
from .fusion import FusedNorms, Fusion, FusionTracer
from .stacked_params import FrozenParams, StackedParams, copy_matrices


def stacked_gradient(
    model: FunctionalModel,
    compute: torch.dtype | None = None,
    fusions: Sequence[Fusion] = (),
    tracer: FusionTracer | None = None,
    calls: Sequence[Call | None] | None = None,
    needed: set[int] | None = None,
) -> GradientFn:
    """The model's batched gradient function; arguments and results are those of the `vmap` one.

    Args:
        compute: dtype of matmuls; None is the model's own.
        fusions: of each norm of the pass, see `FusedNorms`.
        tracer: records which norms could be fused.
        calls: the calls of the pass, see `StackedForward`.
        needed: gets the positions of those calls that have to be known.
    """
    compute = compute or model.dtype
    full_precision = _full_precision_names(model.training_model)
    copies = copy_matrices(model.frozen, compute, full_precision)

    def gradient(
        theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
    ) -> Any:
        visits, batch = weight.shape
        theta = theta.detach()
        with torch.enable_grad():
            params = StackedParams(model, theta, compute, full_precision)
            statistics = model.buffer_layout.unflatten(buffers)
            counters = {name: count.clone() for name, count in model.non_float_buffers.items()}
            stacked = {**params.leaves, **statistics}
            fused, frozen = FusedNorms(fusions), FrozenParams(model.frozen, copies)
            forward = StackedForward(
                key, stacked, compute, params.by_id, fused, tracer, calls, frozen
            )
            tensors = {**stacked, **counters, **frozen.tensors}
            writes = write_counts(frozen.tensors)
            examples = x.flatten(0, 1)
            # The gradient is taken while the parameters are swapped in, because activation
            # checkpointing runs parts of the module again for it.
            with swap_parameters(model.training_model, tensors):
                with forward:
                    outputs = require_tensor(model.training_model(examples))
                if outputs.shape[:1] != (visits * batch,):
                    raise NotStackable(
                        f"outputs have shape {tuple(outputs.shape)} for a batch of {visits * batch}"
                    )
                if fused.unfinished or (forward.direct is not None and forward.direct.unfinished):
                    raise InputError(PATH_CHANGED)
                if needed is not None and forward.direct is not None:
                    needed.update(forward.direct.needed)
                if tracer is not None:
                    tracer.record_use(None, (outputs,), {})
                losses = model.loss(outputs.to(model.dtype), y.flatten(0, 1)).reshape(visits, batch)
                # Padding has weight 0, so that it enters neither a visit's loss nor its gradient.
                counts = weight.to(losses.dtype)
                loss = (losses * counts).sum(1) / counts.sum(1).clamp(min=1)
                grad = params.gather_grad(loss.sum())
            check_unchanged(frozen.tensors, writes, tensors)
        # Buffers that no layer has changed are not copied at each step.
        if forward.statistics:
            new = {name: forward.statistics.get(id(t), t) for name, t in statistics.items()}
            buffers = model.buffer_layout.flatten(new)
        return grad, (loss.detach(), buffers)

    return gradient


def _full_precision_names(module: torch.nn.Module) -> set[str]:
    """Names of parameters that are never cast to bf16.

    Rounding errors of recurrent layers accumulate over time steps, and an embedding is no matmul:
    casting its whole table costs more than it saves.
    """
    layers = (torch.nn.RNNBase, torch.nn.Embedding)
    ids = {id(p) for m in module.modules() if isinstance(m, layers) for p in m.parameters()}
    return {name for name, p in module.named_parameters() if id(p) in ids}
