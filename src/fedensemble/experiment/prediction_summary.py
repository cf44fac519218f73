"""What is kept of a run's data and predictions for its report: numbers of bounded size, never
inputs.

Of clients it is their names, sizes and label counts; of a regression's test set up to `MOST_POINTS`
targets with what was predicted for them. Both can be left out, see the table `report` of the
config.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..data import FederatedData
from ..predict import Prediction

BINS = 15  # of the calibration diagram, as of the calibration error
BARS = 30  # of a histogram
GROUPS = 10  # of equal size, from the surest prediction to the least sure
# what is beyond would make the report heavy, not clearer
MOST_CLASSES, MOST_CLIENTS, MOST_POINTS = 100, 200, 1000


def describe_clients(data: FederatedData, publish: bool = True) -> dict[str, Any]:
    """Sizes of the first clients, and their labels where the targets are labels.

    Args:
        publish: tell of single clients; otherwise only how many they are, and totals.
    """
    shown = min(len(data), MOST_CLIENTS)
    found: dict[str, Any] = {
        "clients": len(data),
        "examples": int(data.size.sum()),
        "test_examples": 0 if data.x_test is None else len(data.x_test),
        "source": str(data.info.get("source", "")),
        "partition": str(data.info.get("partition", "")),
    }
    if not publish:
        return {**found, "published": False}
    found |= {
        "size": data.size[:shown].tolist(),
        "names": list(data.names[:shown]) if data.names is not None else None,
    }
    if data.classes is None:
        return found
    counts = torch.stack([_count(data.client(client)[1], data.classes) for client in range(shown)])
    place, labels = _shown_classes(counts.sum(0))
    merged = torch.zeros(shown, len(labels), dtype=torch.int64).index_add_(1, place, counts)
    return {**found, "labels": labels, "counts": merged.tolist()}


def describe_predictions(
    prediction: Prediction, targets: Tensor, publish: bool = True
) -> dict[str, Any]:
    """Calibration, entropies and confusions, or residuals and spreads for regression.

    Args:
        publish: for regression, tell single targets; otherwise only counts and means over groups.
    """
    if prediction.task == "regression":
        return _regression(prediction, targets.cpu(), publish)
    return _classification(prediction, targets.cpu())


def compact_bytes(content: Any) -> bytes:
    """JSON on one line: there are many numbers, and no person reads them here."""
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def _classification(prediction: Prediction, targets: Tensor) -> dict[str, Any]:
    classes = prediction.mean.shape[-1]
    mean, target = prediction.mean.reshape(-1, classes), targets.reshape(-1).long()
    label = mean.argmax(-1)
    right = label == target
    uncertainty, most = prediction.entropy.reshape(-1).double(), math.log(classes)
    bar = (uncertainty / (most or 1) * BARS).long().clamp(0, BARS - 1)
    place, labels = _shown_classes(_count(target, classes))
    pairs = place[target] * len(labels) + place[label]
    apart = [_calibration(mode.reshape(-1, classes), target) for mode in prediction.modes]
    return {
        "task": "classification",
        "examples": len(target),
        "modes": len(prediction.modes),
        "calibration": _binned(_calibration(mean, target)),
        "calibration_modes": _binned(torch.stack(apart).sum(0)),
        "entropy": {
            "most": most,
            "right": _count(bar[right], BARS).tolist(),
            "wrong": _count(bar[~right], BARS).tolist(),
        },
        "labels": labels,
        "confusion": _count(pairs, len(labels) ** 2).reshape(len(labels), -1).tolist(),
    }


def _calibration(probabilities: Tensor, target: Tensor) -> Tensor:
    """Examples, summed confidence and right answers by confidence, [3, BINS]."""
    confidence, label = probabilities.double().max(-1)
    place = (confidence * BINS).long().clamp(max=BINS - 1)
    weights = torch.stack([torch.ones_like(confidence), confidence, (label == target).double()])
    return torch.zeros(3, BINS, dtype=torch.double).index_add_(1, place, weights)


def _binned(sums: Tensor) -> dict[str, list[Any]]:
    count = sums[0].clamp(min=1)
    return {
        "count": sums[0].long().tolist(),
        "confidence": _short(sums[1] / count),
        "accuracy": _short(sums[2] / count),
    }


def _regression(prediction: Prediction, targets: Tensor, publish: bool) -> dict[str, Any]:
    mean, spread = (
        prediction.mean.double().reshape(-1),
        prediction.variance.double().sqrt().reshape(-1),
    )
    target = targets.double().reshape(-1)
    error = mean - target
    reach = float(error.abs().max()) or 1.0
    bar = ((error / reach + 1) / 2 * BARS).long().clamp(0, BARS - 1)
    step = -(-len(mean) // MOST_POINTS)
    found: dict[str, Any] = {
        "task": "regression",
        "examples": len(mean),
        "modes": len(prediction.modes),
        "residuals": {"reach": reach, "count": _count(bar, BARS).tolist()},
    }
    if publish:
        shown = {"target": target, "mean": mean, "spread": spread}
        found["points"] = {name: _short(values[::step]) for name, values in shown.items()}
    if len(prediction.members) > 1:
        groups = torch.tensor_split(spread.argsort(), min(GROUPS, len(spread)))
        found["spreads"] = {
            "spread": _short(
                torch.stack([spread[group].square().mean().sqrt() for group in groups])
            ),
            "error": _short(torch.stack([error[group].square().mean().sqrt() for group in groups])),
            "count": [len(group) for group in groups],
        }
    return found


def _shown_classes(totals: Tensor) -> tuple[Tensor, list[str]]:
    """For each class the row it is shown in, and the rows' labels: where classes are many, the
    rarest share one.
    """
    classes = len(totals)
    if classes <= MOST_CLASSES:
        return torch.arange(classes), [str(c) for c in range(classes)]
    kept = totals.argsort(descending=True, stable=True)[: MOST_CLASSES - 1].sort().values
    place = torch.full((classes,), MOST_CLASSES - 1)
    place[kept] = torch.arange(len(kept))
    return place, [*(str(c) for c in kept.tolist()), "others"]


def _count(values: Tensor, most: int) -> Tensor:
    return torch.bincount(values.cpu().reshape(-1).long(), minlength=most)


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
