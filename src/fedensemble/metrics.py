"""Metrics of predictions: accuracy, calibration, uncertainty and disagreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .prediction import Prediction
from .uncertainty.calibration_error import (
    adaptive_calibration_error,
    classwise_calibration_error,
    expected_calibration_error,
)
from .uncertainty.intervals import (
    gaussian_mixture_interval,
    interval_coverage,
    interval_score,
    interval_width,
)
from .uncertainty.out_of_distribution import detection_metrics
from .uncertainty.regression import crps, gaussian_mixture_nll
from .uncertainty.scores import SCORES
from .uncertainty.selective import risk_coverage
from .uncertainty.targets import check_below, check_targets

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
    "adaptive_ece",
    "classwise_ece",
    "aurc",
    "augrc",
    "coverage_at_5_risk",
)
REGRESSION = ("mse", "mode_mse_mean", "mode_mse_min", "mode_mse_max", "variance", "crps")
# Of a calibrated ensemble that makes prediction sets or intervals, besides the others.
SETS = ("set_coverage", "set_size", "empty_sets")
INTERVALS = ("interval_coverage", "interval_width", "interval_score")
BINS = 15  # of the expected calibration error, as in Guo et al. 2017
# Lower bound of probabilities in the negative log-likelihood. Without it one confident mistake
# would make the mean infinite.
MIN_PROBABILITY = 1e-12


def evaluate(
    prediction: Prediction,
    targets: Any,
    *,
    noise: Any = None,
    level: float = 0.9,
    ood: Mapping[str, Prediction] | None = None,
) -> dict[str, float]:
    """All metrics of a prediction for targets [B, ...], by name.

    Labels are the numbers of the classes, or their names if the prediction has class names. If the
    ensemble was calibrated with prediction sets or intervals, their coverage and size are included.

    Args:
        prediction: what `Ensemble.predict` returned.
        targets: [B, ...].
        noise: for regression: standard deviation of the targets around a member, a number or one
            per output, with which the members are a mixture of Gaussians. It adds the negative
            log-likelihood "nll" and, unless the ensemble has intervals of its own, those of the
            mixture; see `fedensemble.uncertainty.gaussian_mixture_noise`.
        level: probability of the intervals of the mixture.
        ood: the ensemble's predictions for inputs out of distribution, by a name for them. The
            metrics of `ood_metrics` are added as "ood/<name>/<score>/<metric>".
    """
    targets = _check_targets(prediction, targets)
    detection = _detection(prediction, {} if ood is None else ood)
    if prediction.task == "regression":
        intervals = _intervals(prediction, targets, noise, level)
        return _regression(prediction, targets) | intervals | detection
    if noise is not None:
        raise InputError("evaluate() needs noise for regression only; this is classification.")
    return _classification(prediction, targets) | _sets(prediction, targets) | detection


def evaluate_modes(prediction: Prediction, targets: Any) -> dict[str, list[float]]:
    """Metrics of each mode by itself, by name: accuracy and NLL, or MSE."""
    targets = _check_targets(prediction, targets)
    modes = prediction.modes
    if prediction.task == "regression":
        target = targets.to(modes.dtype).reshape(modes.shape[1:])
        return {
            "mse": [round_to_6_digits(((mode - target) ** 2).double().mean()) for mode in modes]
        }
    target = targets.reshape(-1).long()
    accuracy, nll = [], []
    for mode in modes:  # one at a time, to avoid a float64 copy of all modes
        probabilities = mode.reshape(len(target), -1)
        of_target = probabilities.gather(1, target.unsqueeze(1)).double()
        accuracy.append(round_to_6_digits((probabilities.argmax(-1) == target).double().mean()))
        nll.append(round_to_6_digits(-of_target.clamp(min=MIN_PROBABILITY).log().mean()))
    return {"accuracy": accuracy, "nll": nll}


def evaluate_classes(prediction: Prediction, targets: Any) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 score and number of examples of each class, by its name.

    The name of a class is its number if the prediction has no class names. A metric that is not
    defined, such as the recall of a class without examples, is 0, as in scikit-learn.

    >>> mean = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> prediction = Prediction(mean, mean.unsqueeze(0), class_names=("cat", "dog"))
    >>> evaluate_classes(prediction, ["cat", "dog", "dog"])["dog"]
    {'precision': 1.0, 'recall': 0.5, 'f1': 0.666667, 'examples': 2.0}
    """
    targets = _check_targets(prediction, targets)
    if prediction.task == "regression":
        raise InputError("Metrics per class need class labels, and this is regression.")
    classes = prediction.mean.shape[-1]
    check_below(targets, classes)
    target, label = targets.reshape(-1).long(), prediction.label.reshape(-1)
    correct, actual, predicted = (
        torch.bincount(values, minlength=classes).double()
        for values in (target[target == label], target, label)
    )
    recall, precision = correct / actual.clamp(min=1), correct / predicted.clamp(min=1)
    f1 = 2 * correct / (actual + predicted).clamp(min=1)
    names = prediction.class_names or [str(number) for number in range(classes)]
    return {
        name: {
            "precision": round_to_6_digits(precision[number]),
            "recall": round_to_6_digits(recall[number]),
            "f1": round_to_6_digits(f1[number]),
            "examples": float(actual[number]),
        }
        for number, name in enumerate(names)
    }


def _check_targets(prediction: Prediction, values: Any) -> Tensor:
    """The targets as a tensor on the prediction's device; raises unless their shape matches."""
    if not isinstance(prediction, Prediction):
        raise InputError(
            f"evaluate takes what Ensemble.predict returns; got {type(prediction).__name__}."
        )
    return check_targets(
        prediction.mean,
        values,
        regression=prediction.task == "regression",
        class_names=prediction.class_names,
    )


def _detection(prediction: Prediction, others: Mapping[str, Prediction]) -> dict[str, float]:
    """The metrics of `ood_metrics` for several sets of inputs, in one dict."""
    if not isinstance(others, Mapping):
        raise InputError(
            "ood is a dict of predictions by name, such as {'noise': ensemble.predict(noise)}; got "
            f"{type(others).__name__}."
        )
    found = {}
    for name, other in others.items():
        if not isinstance(other, Prediction):
            raise InputError(
                f"ood['{name}'] must be what the same ensemble predicts for these inputs; got "
                f"{type(other).__name__}. Federation.evaluate(ood=...) takes the inputs themselves."
            )
        for score, metrics in ood_metrics(prediction, other).items():
            for metric, value in metrics.items():
                found[f"ood/{name}/{score}/{metric}"] = value
    return found


def ood_metrics(
    prediction_in: Prediction, prediction_out: Prediction
) -> dict[str, dict[str, float]]:
    """How well each score of uncertainty finds inputs out of distribution, by score.

    Each value is a dict with "auroc", "aupr_in", "aupr_out" and "fpr95"; inputs out of distribution
    are the positive class. "energy" is left out if a prediction was made without logits.

    Args:
        prediction_in: for inputs like the training data, such as the test set.
        prediction_out: of the same ensemble, for inputs of another distribution.

    >>> sure, unsure = torch.tensor([[[0.9, 0.1]]]), torch.tensor([[[0.6, 0.4]]])
    >>> ood_metrics(Prediction(sure[0], sure), Prediction(unsure[0], unsure))["entropy"]
    {'auroc': 1.0, 'aupr_in': 1.0, 'aupr_out': 1.0, 'fpr95': 0.0}
    """
    both = (prediction_in, prediction_out)
    for prediction in both:
        if not isinstance(prediction, Prediction):
            raise InputError(
                "ood_metrics takes two results of Ensemble.predict; got "
                f"{type(prediction).__name__}."
            )
        if prediction.task == "regression":
            raise InputError("ood_metrics needs class probabilities, and this is regression.")
    inside, outside = ((len(p.members), *p.mean.shape[1:]) for p in both)
    if inside != outside:
        raise InputError(
            "Both predictions must come from one ensemble: the first has (members, ..., classes) = "
            f"{inside}, and the second {outside}."
        )
    has_energy = all(prediction.member_energy is not None for prediction in both)
    return {
        score: detection_metrics(*(prediction.uncertainty(score) for prediction in both))
        for score in SCORES
        if score != "energy" or has_energy
    }


def round_to_6_digits(value: Tensor | float) -> float:
    """The value rounded to 6 significant digits, which keeps result files short."""
    return float(f"{float(value):.6g}")


def _classification(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    classes = prediction.mean.shape[-1]
    if classes < 2:
        raise InputError("These metrics need two classes or more, and the prediction has one.")
    check_below(targets, classes)
    mean = prediction.mean.reshape(-1, classes).double()
    modes = prediction.modes.reshape(len(prediction.modes), -1, classes).double()
    target = targets.reshape(-1).long()
    accuracies = (modes.argmax(-1) == target).double().mean(1)
    of_target = mean.gather(1, target.unsqueeze(1)).squeeze(1)
    onehot = torch.nn.functional.one_hot(target, classes)
    confidence, label = mean.max(-1)
    selective = risk_coverage(-confidence, label != target)
    return {
        "accuracy": float((label == target).double().mean()),
        "mode_accuracy_mean": float(accuracies.mean()),
        "mode_accuracy_min": float(accuracies.min()),
        "mode_accuracy_max": float(accuracies.max()),
        "nll": float(-of_target.clamp(min=MIN_PROBABILITY).log().mean()),
        "brier": float(((mean - onehot) ** 2).sum(1).mean()),
        "ece": expected_calibration_error(mean, target, BINS),
        "entropy": float(prediction.entropy.double().mean()),
        "mode_entropy": float(prediction.member_entropy.double().mean()),
        "mutual_information": float(prediction.mutual_information.double().mean()),
        "disagreement": disagreement(modes),
        "adaptive_ece": adaptive_calibration_error(mean, target, BINS),
        "classwise_ece": classwise_calibration_error(mean, target, BINS),
        "aurc": selective.aurc(),
        "augrc": selective.augrc(),
        "coverage_at_5_risk": selective.coverage_at_risk(0.05),
    }


def _sets(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Coverage and size of the prediction sets; empty if the ensemble makes none."""
    if prediction.calibration is None or not prediction.calibration.has_sets:
        return {}
    sets = prediction.sets
    covered, size = sets.gather(1, targets.long().unsqueeze(1)), sets.sum(1)
    return {
        "set_coverage": float(covered.double().mean()),
        "set_size": float(size.double().mean()),
        "empty_sets": float((size == 0).double().mean()),
    }


def _intervals(
    prediction: Prediction, targets: Tensor, noise: Any, level: float
) -> dict[str, float]:
    """Coverage, width and score of intervals, and the NLL of a mixture if its noise is given."""
    found: dict[str, float] = {}
    target = targets.to(prediction.members.dtype).reshape(prediction.members.shape[1:])
    if noise is not None:
        nll = gaussian_mixture_nll(prediction.members, target, noise)
        found["nll"] = float(nll.mean())
    calibration = prediction.calibration
    if calibration is not None and calibration.has_sets:
        # In float64, as they are made: in less, an end may be rounded to the wrong side.
        ends = calibration.interval(prediction.mean, prediction.client)
        lower, upper, target = ends[:, 0], ends[:, 1], targets.double().reshape(-1)
        level = 1 - calibration.settings.alpha
    elif noise is not None:
        lower, upper = gaussian_mixture_interval(prediction.members, noise, level)
        target = target.double()
    else:
        return found
    return found | {
        "interval_coverage": interval_coverage(lower, upper, target),
        "interval_width": interval_width(lower, upper),
        "interval_score": interval_score(lower, upper, target, level),
    }


def disagreement(modes: Tensor) -> float:
    """Share of inputs for which two modes predict different classes, averaged over pairs of modes.

    It is 0 for one mode.

    Args:
        modes: class probabilities of each mode, [K, B, C].

    >>> disagreement(torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]]))
    1.0
    """
    count, _, classes = modes.shape
    if count == 1:
        return 0.0
    votes = torch.nn.functional.one_hot(modes.argmax(-1), classes).sum(0).double()  # [B, C]
    # Of K modes, v modes that choose the same class are v * (v - 1) ordered pairs that agree.
    agreement = (votes * (votes - 1)).sum(1) / (count * (count - 1))
    return float(1 - agreement.mean())


def _regression(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    mean, modes = prediction.mean.double(), prediction.modes.double()
    target = targets.double().reshape(mean.shape)
    errors = ((modes - target) ** 2).reshape(len(modes), -1).mean(1)
    return {
        "mse": float(((mean - target) ** 2).mean()),
        "mode_mse_mean": float(errors.mean()),
        "mode_mse_min": float(errors.min()),
        "mode_mse_max": float(errors.max()),
        "variance": float(prediction.variance.double().mean()),
        "crps": float(crps(prediction.members.double(), target).mean()),
    }
