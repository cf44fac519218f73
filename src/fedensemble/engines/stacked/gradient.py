"""The gradient of J models in one pass, by folding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...modeling.functional_model import FunctionalModel, GradientFn
from ...modeling.model_checks import require_tensor
from ...modeling.parameter_swap import swap_parameters
from .forward import Folded
from .fusion import OTHER_WAYS, Fusion, Watch
from .normalization import NotStackable
from .stacked_params import StackedParams


def folded_gradient(
    learner: FunctionalModel,
    compute: torch.dtype | None = None,
    fates: Sequence[Fusion] = (),
    watch: Watch | None = None,
) -> GradientFn:
    """The learner's batched gradient function, by folding: the same arguments and results as by
    `vmap`.

    Args:
        fates: for each norm and convolution of a pass, what is done with it and nothing else: it
            does that, too.
        watch: finds those.
    """
    working = compute or learner.dtype
    # errors add up over time steps; an embedding is no product
    kept = (torch.nn.RNNBase, torch.nn.Embedding)
    exact = {
        id(p)
        for m in learner.training_model.modules()
        if isinstance(m, kept)
        for p in m.parameters()
    }
    precise = {n for n, p in learner.training_model.named_parameters() if id(p) in exact}

    def gradient(
        theta: Tensor, buffers: Tensor, x: Tensor, y: Tensor, weight: Tensor, key: Tensor
    ) -> Any:
        visits, batch = weight.shape
        theta = theta.detach()
        with torch.enable_grad():
            pieces = StackedParams(learner, theta, working, precise)
            moving = pieces.leaves
            fixed = learner.buffer_layout.unflatten(buffers)
            counters = {name: count.clone() for name, count in learner.counters.items()}
            mode = Folded(key, {**moving, **fixed}, working, pieces.of, fates, watch)
            with mode, swap_parameters(learner.training_model, {**moving, **fixed, **counters}):
                outputs = require_tensor(learner.training_model(x.flatten(0, 1)))
            if outputs.shape[:1] != (visits * batch,):
                raise NotStackable(
                    f"outputs have shape {tuple(outputs.shape)} for a batch of {visits * batch}"
                )
            if mode.unmet:
                raise InputError(OTHER_WAYS)
            if watch is not None:
                watch.used(None, (outputs,), {})
            losses = learner.loss(outputs.to(learner.dtype), y.flatten(0, 1)).reshape(visits, batch)
            share = weight.to(losses.dtype)
            value = (losses * share).sum(1) / share.sum(1).clamp(min=1)
            slope = pieces.gather(value.sum())
        if fixed:
            named = {
                name: mode.statistics.get(id(tensor), tensor) for name, tensor in fixed.items()
            }
            buffers = learner.buffer_layout.flatten(named)
        return slope, (value.detach(), buffers)

    return gradient
