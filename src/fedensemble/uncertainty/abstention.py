"""Abstention: which predictions are sure enough to be answered, and thresholds that decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ..errors import InputError

UNANSWERED = -1  # the label of a row without an answer
LEVELS = 20  # coverages that `risk_threshold` tests: 5 %, 10 %, ..., 100 %


@dataclass(frozen=True)
class Abstention:
    """Which rows an ensemble answers.

    Args:
        answered: whether each row is answered, bool [B, ...]: its uncertainty is at most the
            threshold.
        label: the most probable class, [B, ...]; -1 for rows without an answer.
        uncertainty: the score of each row, [B, ...].
        threshold: largest uncertainty that is answered; -inf if nothing is.
        score: name of the score.
    """

    answered: Tensor
    label: Tensor
    uncertainty: Tensor
    threshold: float
    score: str

    @property
    def coverage(self) -> float:
        """Share of rows that are answered."""
        return float(self.answered.double().mean())

    def __repr__(self) -> str:
        """The number of answered rows and the threshold, on one line."""
        rows, total = int(self.answered.sum()), self.answered.numel()
        return f"Abstention({rows} of {total} rows answered, {self.score} <= {self.threshold:.4g})"


def abstain_above(threshold: float, uncertainty: Tensor, label: Tensor, score: str) -> Abstention:
    """The answers of the rows whose uncertainty is at most the threshold."""
    answered = uncertainty <= threshold
    label = label.masked_fill(~answered, UNANSWERED)
    return Abstention(answered, label, uncertainty, threshold, score)


def coverage_threshold(uncertainty: Tensor, coverage: float) -> float:
    """The smallest threshold that answers at least this share of rows; ties can make it more."""
    # The tolerance is for products such as 0.07 * 100, which is above 7 in floating point.
    rank = math.ceil(coverage * uncertainty.numel() - 1e-9)
    return float(uncertainty.reshape(-1).kthvalue(max(rank, 1)).values)


def risk_threshold(
    uncertainty: Tensor, wrong: Tensor, risk: float, confidence: float = 0.95
) -> float:
    """The largest threshold whose risk is certified by calibration data; -inf if there is none.

    For new independent rows from the same distribution, the share of errors among the answered
    rows is at most `risk`, for at least a share `confidence` of all calibration sets. The threshold
    whose risk is just `risk` on the calibration data would be too high about every second time.

    The candidates are the thresholds that answer 5 %, 10 %, ..., 100 % of the calibration rows. A
    candidate is accepted if the upper Clopper-Pearson bound of its error rate is at most `risk`, at
    the confidence 1 - (1 - confidence) / 20: by the union bound, all 20 bounds hold together.

    Args:
        uncertainty: of each calibration row, [n].
        wrong: whether the prediction of each calibration row is wrong, [n].
        risk: largest share of errors among answered rows.
        confidence: of the guarantee.
    """
    uncertainty, wrong = uncertainty.reshape(-1).cpu(), wrong.reshape(-1).cpu()
    miss = (1 - confidence) / LEVELS
    # Without any error, the bound for n rows is 1 - miss ** (1 / n).
    needed = math.ceil(math.log(miss) / math.log1p(-risk) - 1e-9) + 1
    if len(wrong) < needed:
        raise InputError(
            f"{len(wrong)} calibration rows cannot show a risk of at most {risk:g} with confidence "
            f"{confidence:g}: that takes {needed} rows even without an error. Give more rows, or "
            "raise risk or lower confidence."
        )
    accepted = -math.inf
    for level in range(1, LEVELS + 1):
        threshold = coverage_threshold(uncertainty, level / LEVELS)
        answered = uncertainty <= threshold
        # Given the row that sets the threshold, the rows below it are an independent sample. That
        # row is left out of the sample, and an error in it still counts.
        trials, errors = int(answered.sum()) - 1, int(wrong[answered].sum())
        if _upper_bound(errors, trials, miss) <= risk:
            accepted = threshold
    return accepted


def _upper_bound(errors: int, trials: int, miss: float) -> float:
    """The Clopper-Pearson bound: higher error rates give so few errors with at most this chance."""
    from scipy.special import betaincinv

    return 1.0 if errors >= trials else float(betaincinv(errors + 1, trials - errors, 1 - miss))


def require_share(name: str, value: object, *, or_one: bool = False) -> float:
    """A share above 0 and below 1, or up to 1 if `or_one`; raises otherwise."""
    # A number that is no share, as nan is, fails the comparisons.
    share = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if not (0 < share < 1 or (or_one and share == 1)):
        allowed = "above 0 and at most 1" if or_one else "above 0 and below 1"
        raise InputError(f"abstain() needs {name} to be {allowed}; got {name}={value!r}.")
    return share


def check_threshold(value: object) -> float:
    """A threshold; raises unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
        raise InputError(f"abstain() needs threshold to be a number; got threshold={value!r}.")
    return float(value)


def is_wrong(label: Tensor, target: Tensor) -> Tensor:
    """Whether each label differs from the target, [n]."""
    return torch.ne(label.reshape(-1), target.reshape(-1))
