"""Metrics of each client's test rows, and how they are distributed over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .data.client_rows import as_owners, check_owners
from .errors import InputError
from .metrics import BINS, MIN_PROBABILITY, round_to_6_digits
from .prediction import Prediction
from .uncertainty.calibration_error import top_bin
from .uncertainty.targets import check_below, check_targets

CLASSIFICATION = ("accuracy", "nll", "ece")
REGRESSION = ("mse",)
# Of a calibrated ensemble that makes prediction sets or intervals, besides the others.
SETS, INTERVALS = ("set_coverage", "set_size"), ("interval_coverage", "interval_width")
HIGHER_IS_BETTER = {"accuracy", "set_coverage", "interval_coverage"}
STATISTICS = ("mean", "std", "p10", "worst_10", "worst")
# Without permission to publish single clients, a mean over fewer clients is not published either.
FEWEST_CLIENTS = 5


@dataclass(frozen=True, eq=False)
class ClientMetrics:
    """Metrics of each client.

    Args:
        values: metrics by name, float64 [N]; nan for a client without test rows.
        rows: number of test rows of each client, [N].
    """

    values: Mapping[str, Tensor]
    rows: Tensor

    def __repr__(self) -> str:
        """The number of clients, and mean and worst tenth of each metric, on one line."""
        found = self.summary()
        texts = [f"{found['clients']} clients"]
        texts += [
            f"{name} {found[f'{name}_mean']:.4g} (worst tenth {found[f'{name}_worst_10']:.4g})"
            for name in self.values
            if f"{name}_mean" in found
        ]
        return f"ClientMetrics({', '.join(texts)})"

    def summary(self, publish: bool = True) -> dict[str, float]:
        """How each metric is distributed over the clients that have test rows.

        All clients count alike. Of "accuracy" there are "accuracy_mean", "accuracy_std" (of the
        population), "accuracy_p10" (a tenth of the clients are worse), "accuracy_worst_10" (mean of
        the worst tenth, rounded up) and "accuracy_worst". Of metrics that should be low, the worst
        clients are those with the highest values. "clients" is the number of clients.

        Args:
            publish: False leaves out values of single clients, p10 and worst, and worst_10 if it is
                the mean of fewer than 5 clients.
        """
        tested = self.rows > 0
        count = int(tested.sum())
        result: dict[str, float] = {"clients": count}
        if not count:
            return result
        for name, values in self.values.items():
            # From worst to best.
            ordered = values[tested].sort(descending=name not in HIGHER_IS_BETTER).values
            tenth = math.ceil(count / 10)
            statistics = {
                "mean": ordered.mean(),
                "std": ordered.std(correction=0),
                "p10": _interpolate(ordered, 0.1),
                "worst_10": ordered[:tenth].mean(),
                "worst": ordered[0],
            }
            if not publish:
                hidden = {"p10", "worst", *(["worst_10"] if tenth < FEWEST_CLIENTS else [])}
                statistics = {key: v for key, v in statistics.items() if key not in hidden}
            result |= {f"{name}_{key}": round_to_6_digits(v) for key, v in statistics.items()}
        return result


def _interpolate(ordered: Tensor, share: float) -> Tensor:
    """The quantile of sorted values, with linear interpolation as in NumPy."""
    place = share * (len(ordered) - 1)
    low, part = int(place), place - int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + part * (ordered[high] - ordered[low])


def evaluate_clients(
    prediction: Prediction, targets: Any, owner: Any, clients: int | None = None
) -> ClientMetrics:
    """Metrics of each client: accuracy, NLL and ECE, or MSE for regression.

    A calibrated ensemble also has coverage and size of prediction sets, or of intervals.
    The ECE of a client with few rows is mostly noise above 0: compare it between methods on the
    same rows only.

    Args:
        prediction: for the rows of all clients, [B, ..., C].
        targets: of the rows, as for `evaluate`.
        owner: index of the client of each row, [B]; rows with -1 belong to no client.
        clients: number of clients, N; by default the largest index plus one.

    >>> mean = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    >>> result = evaluate_clients(Prediction(mean, mean.unsqueeze(0)), [0, 1, 1], [0, 0, 2])
    >>> result.values["accuracy"].tolist(), result.rows.tolist()
    ([0.5, nan, 1.0], [2, 0, 1])
    """
    if not isinstance(prediction, Prediction):
        raise InputError(
            "evaluate_clients takes what Ensemble.predict returns; got "
            f"{type(prediction).__name__}."
        )
    regression = prediction.task == "regression"
    target = check_targets(
        prediction.mean, targets, regression=regression, class_names=prediction.class_names
    )
    owner = as_owners(owner).to(prediction.mean.device)
    check_owners(owner, len(prediction.mean), "test rows", lowest=-1)
    count = (int(owner.max()) + 1 if len(owner) else 0) if clients is None else clients
    if len(owner) and int(owner.max()) >= count:
        raise InputError(
            f"A row belongs to client {int(owner.max())}, but there are {count} clients."
        )
    known = owner >= 0
    sizes = _prediction_sets(prediction, target)
    own_sizes = {name: _mean_by(owner[known], value[known], count) for name, value in sizes.items()}
    owner, mean, target = owner[known], prediction.mean[known], target[known]
    rows = torch.bincount(owner, minlength=count)
    if regression:
        errors = (mean.double() - target.double().reshape(mean.shape)) ** 2
        per_row = errors.reshape(len(owner), -1).mean(1)
        values = {"mse": _mean_by(owner, per_row, count)}
    else:
        check_below(target, mean.shape[-1])
        values = _classification(mean, target, owner, count)
    values |= own_sizes
    return ClientMetrics({name: each.cpu() for name, each in values.items()}, rows.cpu())


def _prediction_sets(prediction: Prediction, target: Tensor) -> dict[str, Tensor]:
    """Whether each row's set or interval has its target, and its size, [B]; empty without them."""
    calibration = prediction.calibration
    if calibration is None or not calibration.has_sets:
        return {}
    if prediction.task == "regression":
        ends, target = calibration.interval(prediction.mean, prediction.client), target.reshape(-1)
        inside = (ends[:, 0] <= target) & (target <= ends[:, 1])
        return dict(zip(INTERVALS, (inside.double(), ends[:, 1] - ends[:, 0]), strict=True))
    inside = prediction.sets.gather(1, target.long().unsqueeze(1)).squeeze(1)
    return dict(zip(SETS, (inside.double(), prediction.sets.sum(1).double()), strict=True))


def _classification(mean: Tensor, target: Tensor, owner: Tensor, count: int) -> dict[str, Tensor]:
    """Accuracy, NLL and ECE of each client, [N]; a sequence counts as its tokens."""
    classes = mean.shape[-1]
    tokens = mean.reshape(len(owner), -1, classes).shape[1] if len(owner) else 1
    owner = owner.repeat_interleave(tokens)
    mean, target = mean.reshape(-1, classes).double(), target.reshape(-1).long()
    confidence, label = mean.max(-1)
    correct = (label == target).double()
    of_target = mean.gather(1, target.unsqueeze(1)).squeeze(1)
    # Bins as in `evaluate`. Bin b of client i is cell i * (BINS + 1) + b.
    cell = owner * (BINS + 1) + top_bin(confidence, BINS)
    gaps = torch.zeros(count * (BINS + 1), dtype=mean.dtype, device=mean.device)
    gaps.index_add_(0, cell, correct - confidence)
    examples = torch.bincount(owner, minlength=count)
    return {
        "accuracy": _mean_by(owner, correct, count),
        "nll": _mean_by(owner, -of_target.clamp(min=MIN_PROBABILITY).log(), count),
        "ece": gaps.reshape(count, -1).abs().sum(1) / examples,  # nan without examples
    }


def _mean_by(owner: Tensor, values: Tensor, count: int) -> Tensor:
    """The mean of the values of each client, [N]; nan without values."""
    sums = torch.zeros(count, dtype=values.dtype, device=values.device)
    return sums.index_add_(0, owner, values) / torch.bincount(owner, minlength=count)
