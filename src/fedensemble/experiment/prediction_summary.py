"""Summaries of a run's data and predictions for its report; of bounded size, and without inputs.

They hold the clients' names, sizes and label counts, and for regression up to `MAX_POINTS` targets
of the test set with their predictions. Both can be disabled in the table `report` of the config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data import FederatedData
from ..prediction import Prediction
from ..uncertainty.selective import risk_coverage

CALIBRATION_BINS = 15  # of the calibration diagram; the same as for the calibration error
HISTOGRAM_BINS = 30
CURVE_POINTS = 100  # of the risk-coverage curve: one per percent
SPREAD_GROUPS = 10  # groups of equal size, from the most to the least certain prediction
# More would make the report larger, but not clearer.
MAX_CLASSES, MAX_CLIENTS, MAX_POINTS = 100, 200, 1000


def describe_clients(data: FederatedData, publish: bool = True) -> dict[str, Any]:
    """Returns sizes of the first clients and, for classification, their label counts.

    Args:
        data: of all clients.
        publish: whether to include values of single clients; otherwise only totals are returned.
    """
    shown = min(len(data), MAX_CLIENTS)
    summary: dict[str, Any] = {
        "clients": len(data),
        "examples": int(data.size.sum()),
        "test_examples": 0 if data.x_test is None else len(data.x_test),
        "source": str(data.info.get("source", "")),
        "partition": str(data.info.get("partition", "")),
    }
    if not publish:
        return {**summary, "published": False}
    summary |= {
        "size": data.size[:shown].tolist(),
        "names": list(data.names[:shown]) if data.names is not None else None,
    }
    if data.classes is None:
        return summary
    counts = torch.stack([_count(data.client(client)[1], data.classes) for client in range(shown)])
    row_of_class, labels = _group_classes(counts.sum(0), data.class_names)
    merged = torch.zeros(shown, len(labels), dtype=torch.int64).index_add_(1, row_of_class, counts)
    return {**summary, "labels": labels, "counts": merged.tolist()}


def describe_predictions(
    prediction: Prediction, targets: Tensor, publish: bool = True
) -> dict[str, Any]:
    """Returns what the report shows of predictions: counts, means and, if published, points.

    Args:
        prediction: for the test set.
        targets: of the test set.
        publish: for regression, whether to include single targets with their predictions; otherwise
            only counts and means over groups are returned.
    """
    if prediction.task == "regression":
        return _regression(prediction, targets.cpu(), publish)
    return _classification(prediction, targets.cpu())


def compact_bytes(content: Any) -> bytes:
    """Returns JSON on one line, without spaces: the arrays are long, and only code reads them."""
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def _classification(prediction: Prediction, targets: Tensor) -> dict[str, Any]:
    classes = prediction.mean.shape[-1]
    mean, target = prediction.mean.reshape(-1, classes), targets.reshape(-1).long()
    label = mean.argmax(-1)
    correct = label == target
    entropy, max_entropy = prediction.entropy.reshape(-1).double(), math.log(classes)
    entropy_bin = _bin_index(entropy / (max_entropy or 1))
    row_of_class, labels = _group_classes(_count(target, classes), prediction.class_names)
    # The confusion matrix [target, label], counted as one flat index per example.
    cell = row_of_class[target] * len(labels) + row_of_class[label]
    per_mode = [_calibration_sums(mode.reshape(-1, classes), target) for mode in prediction.modes]
    return {
        "task": "classification",
        "examples": len(target),
        "modes": len(prediction.modes),
        "calibration": _calibration(_calibration_sums(mean, target)),
        "calibration_modes": _calibration(torch.stack(per_mode).sum(0)),
        "entropy": {
            "most": max_entropy,
            "right": _count(entropy_bin[correct], HISTOGRAM_BINS).tolist(),
            "wrong": _count(entropy_bin[~correct], HISTOGRAM_BINS).tolist(),
        },
        "selective": _selective(mean, ~correct),
        "labels": labels,
        "confusion": _count(cell, len(labels) ** 2).reshape(len(labels), -1).tolist(),
    }


def _selective(probabilities: Tensor, wrong: Tensor) -> dict[str, Any]:
    """Returns the risk-coverage curve of the largest probability, and its summaries."""
    curve = risk_coverage(-probabilities.double().amax(-1), wrong)
    # Ranks are evenly spaced, and the last one is that of the last example.
    points = min(CURVE_POINTS, len(wrong))
    rank = torch.arange(1, points + 1) * len(wrong) // points
    return {
        "coverage": _round(rank / len(wrong)),
        "risk": _round(curve.risk[rank - 1]),
        "errors": int(wrong.sum()),
        "aurc": curve.aurc(),
        "augrc": curve.augrc(),
        "coverage_at_5_risk": curve.coverage_at_risk(0.05),
    }


def _bin_index(fraction: Tensor) -> Tensor:
    """Returns the bin of a histogram over [0, 1] that each value falls into."""
    return (fraction * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1)


def _calibration_sums(probabilities: Tensor, target: Tensor) -> Tensor:
    """Returns examples, summed confidence and correct predictions, [3, CALIBRATION_BINS]."""
    confidence, label = probabilities.double().max(-1)
    index = (confidence * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, (label == target).double()])
    return torch.zeros(3, CALIBRATION_BINS, dtype=torch.double).index_add_(1, index, values)


def _calibration(sums: Tensor) -> dict[str, list[Any]]:
    """Returns the number of examples, mean confidence and accuracy per bin."""
    count = sums[0].clamp(min=1)
    return {
        "count": sums[0].long().tolist(),
        "confidence": _round(sums[1] / count),
        "accuracy": _round(sums[2] / count),
    }


def _regression(prediction: Prediction, targets: Tensor, publish: bool) -> dict[str, Any]:
    mean = prediction.mean.double().reshape(-1)
    spread = prediction.variance.double().sqrt().reshape(-1)
    target = targets.double().reshape(-1)
    error = mean - target
    max_error = float(error.abs().max()) or 1.0  # the histogram covers [-max_error, max_error]
    residual_bin = _bin_index((error / max_error + 1) / 2)
    step = -(-len(mean) // MAX_POINTS)
    summary: dict[str, Any] = {
        "task": "regression",
        "examples": len(mean),
        "modes": len(prediction.modes),
        "residuals": {"reach": max_error, "count": _count(residual_bin, HISTOGRAM_BINS).tolist()},
    }
    if publish:
        columns = {"target": target, "mean": mean, "spread": spread}
        summary["points"] = {name: _round(values[::step]) for name, values in columns.items()}
    if len(prediction.members) > 1:
        groups = torch.tensor_split(spread.argsort(), min(SPREAD_GROUPS, len(spread)))
        summary["spreads"] = {
            "spread": _round(torch.stack([_root_mean_square(spread[group]) for group in groups])),
            "error": _round(torch.stack([_root_mean_square(error[group]) for group in groups])),
            "count": [len(group) for group in groups],
        }
    return summary


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _group_classes(totals: Tensor, names: Sequence[str] | None = None) -> tuple[Tensor, list[str]]:
    """Returns each class's row in the report, and the labels of the rows.

    If there are more than `MAX_CLASSES` classes, the rarest ones share the last row, "others".

    Args:
        totals: number of examples per class.
        names: of the classes; by default their numbers.
    """
    classes = len(totals)
    names = names or [str(c) for c in range(classes)]
    if classes <= MAX_CLASSES:
        return torch.arange(classes), list(names)
    frequent = totals.argsort(descending=True, stable=True)[: MAX_CLASSES - 1].sort().values
    row_of_class = torch.full((classes,), MAX_CLASSES - 1)
    row_of_class[frequent] = torch.arange(len(frequent))
    return row_of_class, [*(names[c] for c in frequent.tolist()), "others"]


def _count(values: Tensor, length: int) -> Tensor:
    """Returns how often each of 0, ..., `length` - 1 occurs."""
    return torch.bincount(values.cpu().reshape(-1).long(), minlength=length)


def _round(values: Tensor) -> list[float]:
    """Returns the values with five significant digits, which keeps the file small."""
    return [float(f"{value:.5g}") for value in values.tolist()]
