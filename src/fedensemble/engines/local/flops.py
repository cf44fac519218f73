"""Estimates the FLOPs of a model's forward pass."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.num_threads import num_threads
from .local_engine import LocalEngine


@num_threads(1)
def count_flops(engine: LocalEngine) -> int:
    """FLOPs of the forward pass of one example, counting only operations with weights.

    Forward hooks on the modules count them. torch.utils.flop_counter is more exact but slow to
    import, and an order of magnitude is enough here.
    """
    # Two examples, because BatchNorm without running statistics rejects a batch of one.
    pair = engine.data.x[[0, -1]]
    x = engine.data.inputs(pair, engine.model.dtype)
    total = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal total
        out = output[0] if isinstance(output, tuple) else output
        if isinstance(module, nn.Embedding) or not isinstance(out, Tensor) or out.dim() < 2:
            return
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        # Each weight is used once per output position. Channels are dimension 1 of the output of a
        # convolution, otherwise the last dimension.
        total += 2 * weights * (out.numel() // out.shape[1 if out.dim() > 3 else -1])

    # Script modules do not support hooks.
    modules = [
        m for m in engine.model.eval_model.modules() if not isinstance(m, torch.jit.ScriptModule)
    ]
    hooks = [module.register_forward_hook(count) for module in modules]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # cuDNN warns that RNN weights are not contiguous. That only slows down this one pass.
            warnings.filterwarnings("ignore", "RNN module weights")
            engine.model.eval_model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return total // 2
