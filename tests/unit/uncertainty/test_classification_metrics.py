"""Calibration errors, risk-coverage areas and detection against brute force and scikit-learn."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_calibration_error,
    multiclass_calibration_error,
)

from fedensemble import InputError, Prediction, evaluate
from fedensemble.uncertainty import (
    adaptive_calibration_error,
    classwise_calibration_error,
    detection_metrics,
    reliability,
    risk_coverage,
)
from fedensemble.uncertainty.calibration_error import expected_calibration_error

CASES = range(200)
CLOSE = {"rel": 0, "abs": 1e-6}


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Members [K, n, C] and labels: K from 1, ties in a third, one class in the data in a tenth."""
    rng = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=rng))

    members, rows, classes = whole(1, 5), whole(1, 60), whole(2, 6)
    logits = 2 * torch.randn(members, rows, classes, generator=rng, dtype=torch.float64)
    if seed % 3 == 0:
        logits = logits.round()  # equal logits: equal confidences
    if seed % 7 == 0:
        logits *= 20  # certain predictions: most bins are empty
    target = torch.randint(classes, (rows,), generator=rng)
    return logits.softmax(-1), target * (seed % 10 > 0)


@pytest.mark.parametrize("seed", CASES)
def test_calibration_errors(seed):
    members, target = case(seed)
    mean = members.mean(0)
    confidence, label = mean.max(-1)
    rows, classes = mean.shape
    bins = reliability(confidence, label == target)
    assert bins.error() == pytest.approx(equal_width_error(confidence, label == target), **CLOSE)
    assert int(bins.count.sum()) == rows
    found = classwise_calibration_error(mean, target)
    by_class = [equal_width_error(mean[:, c], target == c) for c in range(classes)]
    assert found == pytest.approx(sum(by_class) / classes, **CLOSE)
    # torchmetrics has edges in float32, which puts confidences on an edge into another bin
    top = float(multiclass_calibration_error(mean, target, num_classes=classes, n_bins=15))
    assert expected_calibration_error(mean, target) == pytest.approx(top, **CLOSE)
    if bool(((15 * mean - (15 * mean).round()).abs() > 1e-5).all()):
        assert bins.error() == pytest.approx(top, **CLOSE)
        by_class = [
            float(
                binary_calibration_error(mean[:, c].contiguous(), (target == c).long(), n_bins=15)
            )
            for c in range(classes)
        ]
        assert found == pytest.approx(sum(by_class) / classes, **CLOSE)
    expected = equal_count_error(confidence.tolist(), (label == target).tolist(), 15)
    assert adaptive_calibration_error(mean, target) == pytest.approx(expected, **CLOSE)


def equal_width_error(confidence: torch.Tensor, correct: torch.Tensor) -> float:
    """Guo et al. 2017: sum over bins of |number right - sum of confidences|, per example."""
    gaps = [0.0] * 15
    for value, right in zip(confidence.tolist(), correct.tolist(), strict=True):
        gaps[min(int(value * 15), 14)] += right - value
    return sum(map(abs, gaps)) / len(confidence)


def equal_count_error(confidence: list[float], correct: list[bool], bins: int) -> float:
    """Fills one bin after another; rows of one confidence are all their mean row."""
    count = len(confidence)
    row = []
    for value in sorted(confidence):
        hits = [right for other, right in zip(confidence, correct, strict=True) if other == value]
        row.append((value, Fraction(sum(hits), len(hits))))
    edges = [index * count // bins for index in range(bins + 1)]
    return (
        sum(
            abs(float(sum(right for _, right in row[a:b])) - sum(value for value, _ in row[a:b]))
            for a, b in itertools.pairwise(edges)
        )
        / count
    )


@pytest.mark.parametrize("seed", CASES)
def test_selective_areas(seed):
    members, target = case(seed)
    confidence, label = members.mean(0).max(-1)
    wrong = (label != target).numpy()
    curve = risk_coverage(-confidence, label != target)
    rows, error = len(wrong), wrong.mean()
    # Traub et al. 2024, eq. 10: AUGRC from the AUROC of detecting errors, which counts ties half.
    auroc = roc_auc_score(wrong, -confidence.numpy()) if 0 < error < 1 else 0.0
    augrc = (1 - auroc) * error * (1 - error) + error**2 / 2
    assert curve.augrc() == pytest.approx(augrc, **CLOSE)
    covered = [
        inside.mean()
        for limit in confidence.tolist()
        if wrong[inside := confidence.numpy() >= limit].mean() <= 0.05
    ]
    assert curve.coverage_at_risk(0.05) == pytest.approx(max(covered, default=0.0), **CLOSE)
    # The order of the rows must not matter, and many random orders of ties have this mean.
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert risk_coverage(-confidence[order], (label != target)[order]).aurc() == curve.aurc()


def test_the_area_is_the_mean_over_all_orders_of_ties():
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        score = torch.randint(3, (6,), generator=rng)
        wrong = torch.randint(2, (6,), generator=rng).bool()
        areas = []
        for order in itertools.permutations(range(6)):
            ordered = sorted(order, key=lambda row: int(score[row]))  # stable
            hits = [bool(wrong[row]) for row in ordered]
            areas.append(sum(sum(hits[:i]) / i for i in range(1, 7)) / 6)
        found = risk_coverage(score.double(), wrong).aurc()
        assert found == pytest.approx(sum(areas) / len(areas), abs=1e-12)


@pytest.mark.parametrize("seed", CASES)
def test_detection(seed):
    rng = np.random.default_rng(seed)
    inside = rng.normal(size=rng.integers(1, 50))
    outside = rng.normal(0.7, size=rng.integers(1, 50))
    if seed % 2:
        inside, outside = inside.round(), outside.round()
    found = detection_metrics(torch.from_numpy(inside), torch.from_numpy(outside))
    scores, out = np.append(inside, outside), np.repeat([0, 1], [len(inside), len(outside)])
    pairs = [(b > a) + (b == a) / 2 for a in inside for b in outside]
    assert found["auroc"] == pytest.approx(np.mean(pairs), **CLOSE)
    torch_auroc = binary_auroc(torch.from_numpy(scores).sigmoid(), torch.from_numpy(out))
    assert found["auroc"] == pytest.approx(float(torch_auroc), abs=1e-5)
    assert found["aupr_out"] == pytest.approx(average_precision(outside, inside), **CLOSE)
    assert found["aupr_in"] == pytest.approx(average_precision(-inside, -outside), **CLOSE)
    assert found["aupr_out"] == pytest.approx(average_precision_score(out, scores), **CLOSE)
    rates = [
        (inside >= limit).mean() for limit in scores if (outside >= limit).mean() >= 0.95 - 1e-12
    ]
    assert found["fpr95"] == pytest.approx(min(rates), **CLOSE)


def average_precision(positive: np.ndarray, negative: np.ndarray) -> float:
    """Sum over thresholds of precision times the gain of recall."""
    total, before = 0.0, 0.0
    for limit in sorted({*positive, *negative}, reverse=True):
        hits, alarms = (positive >= limit).sum(), (negative >= limit).sum()
        total += (hits / len(positive) - before) * hits / (hits + alarms)
        before = hits / len(positive)
    return total


def test_one_mode_is_its_model():
    """The metrics of an ensemble of one mode are those of three equal modes."""
    members, target = case(4)
    single = members[:1]
    thrice = evaluate(Prediction(single[0], single.expand(3, -1, -1)), target)
    assert evaluate(Prediction(single[0], single), target) == pytest.approx(thrice, abs=1e-12)


def test_by_hand():
    """Two of four are wrong, the surest first: right, wrong, right, wrong."""
    mean = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], dtype=torch.float64)
    found = evaluate(Prediction(mean, mean.unsqueeze(0)), torch.tensor([0, 1, 0, 1]))
    assert found["aurc"] == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)
    assert found["augrc"] == pytest.approx((0 / 2 + 1 / 2 + 1 + 3 / 2) / 16)
    assert found["coverage_at_5_risk"] == 0.25
    # every example is a bin of its own: the gaps are 0.1, 0.8, 0.3 and 0.6
    assert found["adaptive_ece"] == pytest.approx(1.8 / 4)
    assert found["classwise_ece"] == pytest.approx(1.8 / 4)


def test_long_inputs_are_binned_in_parts(monkeypatch):
    members, target = case(5)
    whole = classwise_calibration_error(members[0], target)
    monkeypatch.setattr("fedensemble.uncertainty.calibration_error._CHUNK", 7)
    assert classwise_calibration_error(members[0], target) == whole


def test_bad_input():
    none = torch.empty(0)
    with pytest.raises(InputError, match="one 'wrong' per uncertainty and at least one; got 0"):
        risk_coverage(none, none)
    with pytest.raises(InputError, match="one 'correct' per confidence"):
        reliability(torch.ones(2), torch.ones(3))
    with pytest.raises(InputError, match="bins to be an integer >= 1"):
        reliability(torch.ones(2), torch.ones(2), 0)
    with pytest.raises(InputError, match="at least one input out of distribution"):
        detection_metrics(torch.ones(2), none)
    with pytest.raises(InputError, match="inputs in distribution contain nan"):
        detection_metrics(torch.tensor([float("nan")]), torch.ones(2))
