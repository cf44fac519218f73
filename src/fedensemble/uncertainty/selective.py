"""Selective prediction: the error among the surest predictions, and areas under this curve."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .ties import cumulative


class RiskCoverage(NamedTuple):
    """Errors among the i surest of n predictions, for i = 0, ..., n.

    Predictions of equal uncertainty count in all their orders, so that the order of the rows does
    not matter.

    Args:
        errors: number of errors among the i surest predictions, [n + 1].
        reached: the i that a threshold on the uncertainty can select: all except those that divide
            predictions of equal uncertainty.
    """

    errors: Tensor
    reached: Tensor

    @property
    def risk(self) -> Tensor:
        """Share of errors among the i surest predictions, for i = 1, ..., n."""
        rank = torch.arange(1, len(self.errors), device=self.errors.device)
        return self.errors[1:] / rank

    def aurc(self) -> float:
        """Area under the risk-coverage curve: the mean risk over all coverages 1/n, ..., 1."""
        return float(self.risk.mean())

    def augrc(self) -> float:
        """Area under the generalized risk-coverage curve (Traub et al. 2024).

        The generalized risk is the share of all predictions that are errors and answered.
        """
        return float(torch.trapezoid(self.errors) / (len(self.errors) - 1) ** 2)

    def coverage_at_risk(self, risk: float) -> float:
        """Largest share of predictions that a threshold answers with at most this risk; 0 if none.

        This is the empirical value: on other data, the risk at this threshold can be higher.
        """
        allowed = self.reached[self.risk[self.reached - 1] <= risk]
        return float(allowed.max()) / (len(self.errors) - 1) if len(allowed) else 0.0


def risk_coverage(uncertainty: Tensor, wrong: Tensor) -> RiskCoverage:
    """Errors among the surest predictions.

    Args:
        uncertainty: of each prediction, [n]; the lower, the surer.
        wrong: whether each prediction is wrong, [n].

    >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([False, False, True]))
    >>> [round(value, 3) for value in (curve.aurc(), curve.augrc(), curve.coverage_at_risk(0.05))]
    [0.111, 0.056, 0.667]
    """
    uncertainty, wrong = uncertainty.reshape(-1).double(), wrong.reshape(-1)
    if len(uncertainty) != len(wrong) or not len(wrong):
        raise InputError(
            "risk_coverage() needs one 'wrong' per uncertainty and at least one; got "
            f"{len(wrong)} for {len(uncertainty)}."
        )
    _, size = torch.unique(uncertainty, return_counts=True)
    return RiskCoverage(cumulative(uncertainty, wrong.long()), size.cumsum(0))
