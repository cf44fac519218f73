"""How much work a model's forward pass is."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.num_threads import num_threads
from .local_engine import LocalEngine


@num_threads(1)
def operations(engine: LocalEngine) -> int:
    """Multiplications and additions of one example's forward pass, those with weights; torch's
    counter loads slowly.
    """
    pair = engine.data.x[[0, -1]]  # two examples: a norm without running statistics refuses one
    x = engine.data.inputs(pair, engine.learner.dtype)
    total = 0

    def count(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal total
        out = output[0] if isinstance(output, tuple) else output
        if isinstance(module, nn.Embedding) or not isinstance(out, Tensor) or out.dim() < 2:
            return
        weights = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        # as often as there are places
        total += 2 * weights * (out.numel() // out.shape[1 if out.dim() > 3 else -1])

    # no hooks
    modules = [
        m for m in engine.learner.eval_model.modules() if not isinstance(m, torch.jit.ScriptModule)
    ]
    hooks = [module.register_forward_hook(count) for module in modules]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # lie apart, which costs this one pass little
            warnings.filterwarnings("ignore", "RNN module weights")
            engine.learner.eval_model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return total // 2
