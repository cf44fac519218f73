"""Activation checkpointing: a part of a model is computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from ..flat_params import tensor_leaves
from ..runtime.torch_compat import is_transformed
from .keyed_rng import active_randomness


def activation_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again instead of kept.

    As torch.utils.checkpoint.checkpoint with `use_reentrant=False`, for models that are trained by
    any engine: dropout draws the same numbers again, and running statistics are updated once. Use
    it in `forward`, for blocks whose activations take more memory than their inputs. Under `vmap`,
    which does not support it, the activations are kept.

    Args:
        function: a function or a module of tensors.
        args, kwargs: its arguments.
    """
    if any(map(is_transformed, tensor_leaves((args, kwargs)))):
        return function(*args, **kwargs)
    mode = active_randomness()
    keyed: dict[str, Any] = {}
    if mode is not None:
        keyed = {"context_fn": mode.checkpoint_contexts, "preserve_rng_state": False}
    # torch 2.8 to 2.11 leave their hooks for saved tensors in place if the part raises. The hooks
    # would then catch the tensors of all passes that follow: of the next attempt to stack the
    # model, or after running out of memory. So the part's error is raised after torch has removed
    # the hooks.
    errors: list[Exception] = []
    is_forward = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_forward
        if not is_forward:  # in the backward pass, which torch itself ends by an exception
            return function(*args, **kwargs)
        is_forward = False
        try:
            return function(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            return None

    out = checkpoint(run, *args, use_reentrant=False, **keyed, **kwargs)
    if errors:
        raise errors[0]
    return out
