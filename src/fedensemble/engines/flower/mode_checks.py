"""Checks after the server's step that a mode's state and predictions are finite.

NaN in a client's reply is rejected earlier, in `reply_validation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.types import EnsembleState
from ...modeling.functional_model import FunctionalModel


class FiniteModeCheck:
    """Finds modes that must not replace their last good state.

    Each reply is validated on arrival. This is the last check before a checkpoint is written: sums
    of plausible values can still overflow, and a mode with finite weights can make predictions that
    are not finite.

    Args:
        functional_model: the model as a function; None checks only the state.
        shape: shape of one input.
    """

    def __init__(self, model: FunctionalModel | None = None, shape: tuple[int, ...] = ()) -> None:
        self.model, self.example = model, None
        if model is not None:
            theta, buffers = model.init_params(0, 1)
            self.example = _find_example_input(model, theta[0], buffers[0], shape)

    def find_broken(self, state: EnsembleState, modes: Iterable[int]) -> list[int]:
        """Returns those of the given modes that are not finite, in ascending order."""
        return [mode for mode in sorted(set(modes)) if not self._is_finite(state, mode)]

    def _is_finite(self, state: EnsembleState, mode: int) -> bool:
        tensors = [*(value[mode] for value in state.modes.values()), state.buffers[mode]]
        if not all(bool(value.isfinite().all()) for value in tensors if value.is_floating_point()):
            return False
        if self.model is None or self.example is None:
            return True
        outputs = self.model.outputs(state.modes["theta"][mode], state.buffers[mode], self.example)
        return bool(outputs.isfinite().all())


def _find_example_input(
    model: FunctionalModel, theta: Tensor, buffers: Tensor, shape: tuple[int, ...]
) -> Tensor | None:
    """Returns an all-zero input that a fresh model accepts, or None if it accepts none.

    The server has no data, so it does not know whether inputs are floats or token ids; both are
    tried.
    """
    for dtype in (model.dtype, torch.int64):
        example = torch.zeros(1, *shape, dtype=dtype, device=model.device)
        try:
            outputs = model.outputs(theta, buffers, example)
        except Exception:  # a module can raise anything for an input of the wrong type
            continue
        if isinstance(outputs, Tensor) and bool(outputs.isfinite().all()):
            return example
    return None
