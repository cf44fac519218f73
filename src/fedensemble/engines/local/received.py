"""Loss and gradient of the model that a client received, before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import prng
from ...core.algorithm import Algorithm
from ...core.types import Plan
from ...flat_params import select_rows
from .block import BlockInputs, Minibatches, gather_sent, squeeze_single_visit
from .device_cache import to_device_async

if TYPE_CHECKING:
    from .local_engine import LocalEngine

# Keys of random layers, such as dropout, here: those of local steps are smaller.
_FIRST_KEY = 1 << 30


def measure_received(
    engine: LocalEngine, algorithm: Algorithm, plan: Plan, inputs: BlockInputs
) -> tuple[Tensor, Tensor]:
    """Mean loss and norm of its gradient on all rows of each visit's client, [J] each.

    The model is in train mode, as in local training. One pass over the rows takes as long as one
    local epoch.

    Args:
        plan: the visits of the block, on the CPU.
        inputs: of the block.
    """
    sent, device = gather_sent(inputs), engine.model.device
    sizes = to_device_async(engine.host_sizes[plan.client], device).unsqueeze(1)
    first = engine.starts[to_device_async(plan.client, device)].unsqueeze(1)
    memory, buffers = inputs.memory, inputs.buffers
    if not engine.batched:  # a block of one visit, without leading dimension
        inputs, sent, memory = (
            squeeze_single_visit(inputs),
            select_rows(sent, 0),
            select_rows(memory, 0),
        )
        sizes, first, buffers = sizes[0], first[0], buffers[0]
    theta, buffers = algorithm.received_model(sent, memory, buffers)
    minibatches = Minibatches(engine.data, engine.model.dtype, engine.gradient, inputs, False)
    total, loss = torch.zeros_like(theta), torch.zeros_like(theta[..., 0])
    batch = engine.work.batch_size
    with engine.settings():
        for step in range(-(-int(engine.host_sizes[plan.client].max()) // batch)):
            position = step * batch + torch.arange(batch, device=device)
            # Positions beyond the last row wrap around: other rows of the client fill the batch, so
            # that the batch statistics of BatchNorm have no padding. Their weight is 0.
            index, weight = first + position % sizes, position < sizes
            key = torch.as_tensor(prng.fold_in(inputs.model_key, _FIRST_KEY + step))
            gradient, (value, _) = minibatches.on_batch(index, weight, key, theta, buffers)
            rows = weight.sum(-1).to(theta.dtype)
            total = total + rows.unsqueeze(-1) * gradient
            loss = loss + rows * value
    count = sizes[..., 0].to(theta.dtype)
    norm = torch.linalg.vector_norm(total, dim=-1) / count
    return (loss / count).reshape(-1), norm.reshape(-1)
