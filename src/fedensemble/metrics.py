"""How good and how sure an ensemble is, as plain numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .data.convert import as_targets
from .data.label_checks import check_whole
from .errors import DataError, InputError
from .predict import Prediction

CLASSIFICATION = (
    "accuracy",
    "mode_accuracy_mean",
    "mode_accuracy_min",
    "mode_accuracy_max",
    "nll",
    "brier",
    "ece",
    "entropy",
    "mode_entropy",
    "mutual_information",
    "disagreement",
)
REGRESSION = ("mse", "mode_mse_mean", "mode_mse_min", "mode_mse_max", "variance")
_BINS = 15  # of the calibration error, as Guo et al. 2017
# probabilities below this count as this, or one confident mistake would make the likelihood
# infinite
_SMALLEST = 1e-12


def evaluate(prediction: Prediction, targets: Any) -> dict[str, float]:
    """All metrics of a prediction against targets [B, ...], by name."""
    targets = _targets(prediction, targets)
    if prediction.task == "regression":
        return _regression(prediction, targets)
    return _classification(prediction, targets)


def evaluate_modes(prediction: Prediction, targets: Any) -> dict[str, list[float]]:
    """Metrics of each mode alone (of all its members together), by name: accuracy and NLL, or
    MSE.
    """
    targets = _targets(prediction, targets)
    modes = prediction.modes
    if prediction.task == "regression":
        target = targets.to(modes.dtype).reshape(modes.shape[1:])
        return {"mse": [_short(((mode - target) ** 2).double().mean()) for mode in modes]}
    target = targets.reshape(-1).long()
    accuracy, nll = [], []
    for mode in modes:  # one at a time: a double copy of them all is large
        probabilities = mode.reshape(len(target), -1)
        chosen = probabilities.gather(1, target.unsqueeze(1)).double()
        accuracy.append(_short((probabilities.argmax(-1) == target).double().mean()))
        nll.append(_short(-chosen.clamp(min=_SMALLEST).log().mean()))
    return {"accuracy": accuracy, "nll": nll}


def _targets(prediction: Prediction, given: Any) -> Tensor:
    """The targets as a tensor beside the prediction; raises unless there is one for each."""
    if not isinstance(prediction, Prediction):
        raise InputError(
            f"evaluate takes what Ensemble.predict returns; got {type(prediction).__name__}."
        )
    targets, mean = as_targets(given), prediction.mean
    expected = mean.shape if prediction.task == "regression" else mean.shape[:-1]
    if targets.numel() != expected.numel() or (targets.dim() and len(targets) != len(mean)):
        raise InputError(
            f"The prediction is for {len(mean)} rows and needs targets of shape {tuple(expected)}; "
            f"got {tuple(targets.shape)}."
        )
    if prediction.task == "classification":
        targets = check_whole(targets, "Test labels")
        if targets.numel() and int(targets.min()) < 0:
            raise DataError(f"Test labels must be 0, 1, 2, ...; got {int(targets.min())}.")
    elif not bool(targets.isfinite().all()):
        raise DataError("Targets contain nan or infinity. Clean or drop such rows.")
    return targets.to(mean.device)


def _short(value: Tensor) -> float:
    return float(f"{float(value):.6g}")


def _classification(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    from torchmetrics.functional.classification import multiclass_calibration_error

    classes = prediction.mean.shape[-1]
    if classes < 2:
        raise InputError("These metrics need two classes or more, and the prediction has one.")
    if int(targets.max()) >= classes:
        raise DataError(
            f"Test labels go up to {int(targets.max())}, but the model has {classes} outputs."
        )
    mean = prediction.mean.reshape(-1, classes).double()
    modes = prediction.modes.reshape(len(prediction.modes), -1, classes).double()
    target = targets.reshape(-1).long()
    by_mode = (modes.argmax(-1) == target).double().mean(1)
    chosen = mean.gather(1, target.unsqueeze(1)).squeeze(1)
    onehot = torch.nn.functional.one_hot(target, classes)
    return {
        "accuracy": float((mean.argmax(-1) == target).double().mean()),
        "mode_accuracy_mean": float(by_mode.mean()),
        "mode_accuracy_min": float(by_mode.min()),
        "mode_accuracy_max": float(by_mode.max()),
        "nll": float(-chosen.clamp(min=_SMALLEST).log().mean()),
        "brier": float(((mean - onehot) ** 2).sum(1).mean()),
        "ece": float(multiclass_calibration_error(mean, target, num_classes=classes, n_bins=_BINS)),
        "entropy": float(prediction.entropy.double().mean()),
        "mode_entropy": float(prediction.member_entropy.double().mean()),
        "mutual_information": float(prediction.mutual_information.double().mean()),
        "disagreement": disagreement(modes),
    }


def disagreement(modes: Tensor) -> float:
    """Share of inputs on which two different modes choose different classes, the mean over pairs; 0
    for one mode.

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]]))
    1.0
    """
    count, _, classes = modes.shape
    if count == 1:
        return 0.0
    votes = torch.nn.functional.one_hot(modes.argmax(-1), classes).sum(0).double()  # [B, C]
    agreeing = (votes * (votes - 1)).sum(1) / (count * (count - 1))
    return float(1 - agreeing.mean())


def _regression(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    mean, modes = prediction.mean.double(), prediction.modes.double()
    target = targets.double().reshape(mean.shape)
    by_mode = ((modes - target) ** 2).reshape(len(modes), -1).mean(1)
    return {
        "mse": float(((mean - target) ** 2).mean()),
        "mode_mse_mean": float(by_mode.mean()),
        "mode_mse_min": float(by_mode.min()),
        "mode_mse_max": float(by_mode.max()),
        "variance": float(prediction.variance.double().mean()),
    }
