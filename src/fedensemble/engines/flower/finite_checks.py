"""Whether modes can be used after the server's step: finite state, finite predictions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.types import EnsembleState
from ...modeling.functional_model import FunctionalModel


class Soundness:
    """Looks for modes that must not replace the ones before.

    Single answers are checked when they come in. This is the last check, before a checkpoint is
    written: sums of plausible values can still overflow, and a mode of finite weights can have
    predictions that are not.

    Args:
        learner: the model's structure; without one only the state is looked at.
        shape: of one input.
    """

    def __init__(self, learner: FunctionalModel | None = None, shape: tuple[int, ...] = ()) -> None:
        self.learner, self.example = learner, None
        if learner is not None:
            theta, buffers = learner.initial(0, 1)
            self.example = _example(learner, theta[0], buffers[0], shape)

    def broken(self, state: EnsembleState, modes: Iterable[int]) -> list[int]:
        """Those of the given modes that are not usable, in ascending order."""
        return [mode for mode in sorted(set(modes)) if not self._sound(state, mode)]

    def _sound(self, state: EnsembleState, mode: int) -> bool:
        tensors = [*(value[mode] for value in state.modes.values()), state.buffers[mode]]
        if not all(bool(value.isfinite().all()) for value in tensors if value.is_floating_point()):
            return False
        if self.learner is None or self.example is None:
            return True
        outputs = self.learner.outputs(
            state.modes["theta"][mode], state.buffers[mode], self.example
        )
        return bool(outputs.isfinite().all())


def _example(
    learner: FunctionalModel, theta: Tensor, buffers: Tensor, shape: tuple[int, ...]
) -> Tensor | None:
    """One input of zeros, as numbers or as tokens, that a fresh model takes; None if it takes
    neither.
    """
    for dtype in (learner.dtype, torch.int64):
        example = torch.zeros(1, *shape, dtype=dtype, device=learner.device)
        try:
            outputs = learner.outputs(theta, buffers, example)
        except Exception:  # whatever a module raises for inputs of another type
            continue
        if isinstance(outputs, Tensor) and bool(outputs.isfinite().all()):
            return example
    return None
