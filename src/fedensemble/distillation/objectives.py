"""What a student learns from a teacher's predictions: losses per example, [B].

Outputs of the student are [B, ..., C]: logits, or for regression values. For sequences, a loss is
the mean over positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..modeling.losses import Loss, class_logits

# Share of the uniform distribution that is mixed into each member's probabilities. A Dirichlet
# distribution has no density at a probability of 0, to which floating point rounds.
SMOOTHING = 1e-4


@dataclass
class SoftCrossEntropy:
    """Cross-entropy between the teacher's probabilities and the student's, both at a temperature.

    L = -T^2 sum_c q_c log softmax(z / T)_c with q = softmax(log p / T), where p are the teacher's
    probabilities; T^2 keeps the gradients' scale (Hinton, Vinyals and Dean 2015).

    Args:
        user_loss: of the modes; it says how outputs become logits.
        temperature: T.
    """

    user_loss: str | Loss
    temperature: float = 1.0

    def __call__(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The loss per example; `teacher` are the ensemble's probabilities, [B, ..., C]."""
        logits = class_logits(self.user_loss, outputs)
        target = _log(teacher).div(self.temperature).softmax(-1)
        loss = -(target * (logits / self.temperature).log_softmax(-1)).sum(-1)
        return _mean_over_positions(loss) * self.temperature**2


@dataclass
class DirichletLikelihood:
    """Negative log-likelihood of the members' probabilities under the student's Dirichlet.

    The student's logits z are log concentrations, alpha_c = exp(z_c / T), alpha_0 = sum_c alpha_c:

        L = -log Gamma(alpha_0) + sum_c log Gamma(alpha_c)
            - 1/M sum_m sum_c (alpha_c - 1) log pi_mc,

    where pi_m are the probabilities of member m at temperature T, smoothed. Reference: Malinin,
    Mlodozeniec and Gales, "Ensemble distribution distillation", ICLR 2020.

    Args:
        user_loss: of the modes; it says how outputs become logits.
        temperature: T; it falls to 1 during training, because the members' almost certain
            predictions are far from what a new student can represent.
    """

    user_loss: str | Loss
    temperature: float = 1.0

    def __call__(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The loss per example; `teacher` are the members' probabilities, [B, M, ..., C]."""
        alpha = (class_logits(self.user_loss, outputs) / self.temperature).exp()
        members = _log(teacher).div(self.temperature).softmax(-1)
        members = (1 - SMOOTHING) * members + SMOOTHING / members.shape[-1]
        mean_log = members.log().mean(1)
        log_normalizer = alpha.lgamma().sum(-1) - alpha.sum(-1).lgamma()
        return _mean_over_positions(log_normalizer - ((alpha - 1) * mean_log).sum(-1))


@dataclass
class SquaredError:
    """Squared difference between the student's outputs and the teacher's mean."""

    temperature: float = 1.0  # unused

    def __call__(self, outputs: Tensor, teacher: Tensor) -> Tensor:
        """The loss per example; `teacher` is the ensemble's mean, of the outputs' shape."""
        return _mean_over_positions((outputs - teacher) ** 2)


Objective = SoftCrossEntropy | DirichletLikelihood | SquaredError


def _log(probabilities: Tensor) -> Tensor:
    return probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()


def _mean_over_positions(loss: Tensor) -> Tensor:
    """Values [B, ...] to [B]."""
    return loss.reshape(len(loss), -1).mean(1)
