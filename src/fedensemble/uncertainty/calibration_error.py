"""How well confidences agree with accuracies: reliability data and calibration errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments import require_integer
from ..errors import InputError
from .ties import FIXED_POINT, cumulative, fixed_point

BINS = 15  # as in Guo et al. 2017
_CHUNK = 2**22  # probabilities that are binned at a time, which bounds the memory


@dataclass(frozen=True)
class ReliabilityBins:
    """Mean confidence, accuracy and number of examples per bin; 0 for an empty bin."""

    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    def error(self) -> float:
        """The calibration error: the mean of |accuracy - confidence| over all examples."""
        gaps = self.count * (self.accuracy - self.confidence).abs()
        return float(gaps.sum() / self.count.sum())


def reliability(
    confidence: Tensor, correct: Tensor, bins: int = BINS, *, equal_count: bool = False
) -> ReliabilityBins:
    """Confidence and accuracy per bin of the confidence.

    Args:
        confidence: probability of the predicted class, [n].
        correct: whether the predicted class is the target, [n].
        bins: number of bins.
        equal_count: whether the bins have equally many examples (within one). Otherwise they have
            equal width, and a bin contains its lower edge. Examples of equal confidence on an edge
            between bins of equal count are divided between them in proportion.

    >>> reliability(torch.tensor([0.6, 0.9]), torch.tensor([True, False]), 2).count.tolist()
    [0, 2]
    """
    bins = require_integer("reliability()", "bins", bins, minimum=1)
    confidence, correct = confidence.reshape(-1).double(), correct.reshape(-1).long()
    if len(confidence) != len(correct) or not len(confidence):
        raise InputError(
            "reliability() needs one 'correct' per confidence and at least one; got "
            f"{len(correct)} for {len(confidence)}."
        )
    fixed = fixed_point(confidence)
    if equal_count:
        edges = torch.arange(bins + 1, device=confidence.device) * len(confidence) // bins
        count = edges.diff()
        sums, hits = (cumulative(confidence, each)[edges].diff() for each in (fixed, correct))
    else:
        index = _bin(confidence, bins)
        count, sums, hits = (
            index.new_zeros(bins).scatter_add_(0, index, each)
            for each in (torch.ones_like(index), fixed, correct)
        )
    divisor = count.clamp(min=1).double()
    return ReliabilityBins(sums / divisor / FIXED_POINT, hits / divisor, count)


def expected_calibration_error(probabilities: Tensor, target: Tensor, bins: int = BINS) -> float:
    """Expected calibration error of the predicted class, the `ece` of `evaluate`.

    The bins are those of torchmetrics' `multiclass_calibration_error`, see `top_bin`. torchmetrics
    itself is not used, because importing it takes most of a second.

    Args:
        probabilities: of each class, [n, C].
        target: labels, [n].
    """
    confidence, label = probabilities.max(-1)
    gaps = confidence.new_zeros(bins + 1, dtype=torch.int64)  # in fixed point: any order will do
    each = (label == target).long() * FIXED_POINT - fixed_point(confidence)
    gaps.scatter_add_(0, top_bin(confidence, bins), each)
    return float(gaps.abs().sum().double() / FIXED_POINT / len(probabilities))


def top_bin(confidence: Tensor, bins: int = BINS) -> Tensor:
    """The bin of each confidence: of equal width with edges in float32, and one more for 1.

    Confidences on an edge then count as in torchmetrics, whatever their dtype.
    """
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    return torch.bucketize(confidence.float(), edges[1:], right=True)


def adaptive_calibration_error(probabilities: Tensor, target: Tensor, bins: int = BINS) -> float:
    """Expected calibration error with bins of equally many examples.

    Args:
        probabilities: of each class, [n, C].
        target: labels, [n].
    """
    confidence, label = probabilities.max(-1)
    return reliability(confidence, label == target, bins, equal_count=True).error()


def classwise_calibration_error(probabilities: Tensor, target: Tensor, bins: int = BINS) -> float:
    """Mean over classes of the calibration error of that class's probability.

    The probability of class c, in bins of equal width, is compared with how often c is the target
    (Kull et al. 2019). A class that never occurs counts: its probabilities should be 0.

    Args:
        probabilities: of each class, [n, C].
        target: labels, [n].
    """
    count, classes = probabilities.shape
    offset = torch.arange(classes, device=probabilities.device) * bins
    gaps = offset.new_zeros(classes * bins)  # hits less probabilities, in fixed point
    rows = max(1, _CHUNK // classes)
    for part, label in zip(
        torch.split(probabilities, rows), torch.split(target, rows), strict=True
    ):
        index = _bin(part.double(), bins) + offset
        gaps.scatter_add_(0, index.reshape(-1), -fixed_point(part).reshape(-1))
        hit = index.gather(1, label.unsqueeze(1)).squeeze(1)
        gaps.scatter_add_(0, hit, torch.full_like(hit, FIXED_POINT))
    return float(gaps.abs().sum().double() / FIXED_POINT / (count * classes))


def _bin(fraction: Tensor, bins: int) -> Tensor:
    """The bin of equal width over [0, 1] that each fraction falls into."""
    return (fraction * bins).long().clamp(0, bins - 1)
