"""Detects a training loss that explodes without becoming NaN.

A loss that is not finite ends a run (`core.round.check_losses_finite`). A learning rate of 1e9 may
instead give a loss of 3e35 in every round: the modes are worthless, but all numbers are finite.
Such a run counts as diverged if, in each of its last `PATIENCE` rounds, the mean training loss is
more than `FACTOR` times the loss of a model that has learned nothing. That reference is the larger
of two: the loss of an untrained model, and the loss of the best constant prediction. A noisy run
is far from it: a cross-entropy of `FACTOR` times log(10) means that the model gives the right class
a probability of e^-230, on average.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch

from ...data import FederatedData
from ...federation.federation import Federation
from ...federation.preflight import first_examples
from ...runtime.num_threads import num_threads

FACTOR = 100.0
PATIENCE = 5
_EXAMPLES = 8  # for the loss of an untrained model; as many as the checks before training use


class DivergenceMonitor:
    """Watches the mean training loss of each round.

    Args:
        reference: the loss of a model that has learned nothing.
        rounds: of the run; a run with fewer than `PATIENCE` rounds is judged by all of them.
        losses: of the rounds done before; None for a round without replies.
    """

    def __init__(self, reference: float, rounds: int, losses: Iterable[float | None] = ()) -> None:
        self.reference = reference
        self._latest: deque[float] = deque(maxlen=min(PATIENCE, rounds))
        for loss in losses:
            self.observe(loss)

    def observe(self, loss: float | None) -> None:
        """Takes the mean training loss of a round; None if no client replied."""
        if loss is not None:
            self._latest.append(loss)

    @property
    def message(self) -> str:
        """What is wrong, with advice; empty unless the latest rounds have diverged."""
        full = len(self._latest) == self._latest.maxlen
        if not full or min(self._latest) <= FACTOR * self.reference:
            return ""
        return (
            f"the training loss has exploded: {self._latest[-1]:.3g} in the latest round, more "
            f"than {FACTOR:g} times the loss of an untrained model ({self.reference:.3g}). "
            "Lower algorithm.lr, or set algorithm.optimizer.clip."
        )


@num_threads(1)
def untrained_loss(federation: Federation) -> float:
    """Returns the loss of a model that has learned nothing, on the first training examples."""
    model, data = federation.model, federation.data
    x, y = first_examples(model, data, _EXAMPLES)
    with torch.no_grad():
        outputs = model.build(federation.seed).eval().to(model.device)(x)
        untrained = float(model.loss(outputs, y).mean())
    losses = (untrained, _constant_loss(data))
    return max((loss for loss in losses if math.isfinite(loss)), default=1.0)


def _constant_loss(data: FederatedData) -> float:
    """Returns the loss of a constant prediction: log(C) for C classes, else the mean square."""
    if data.classes is not None:
        return math.log(max(2, data.classes))
    return float(data.y.double().square().mean())
