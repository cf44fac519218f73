"""Scores of a prediction, detection by them, and abstention with its guarantee."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import fedensemble as fe
from fedensemble import DataError, InputError, Prediction
from fedensemble.testing.toy_problems import classification, numbers
from fedensemble.uncertainty import SCORES, risk_threshold
from fedensemble.uncertainty.abstention import LEVELS, _upper_bound

DATA = classification()
EXACT = {"rtol": 0, "atol": 1e-12}


def federation(modes: int = 3, combine: str | None = None) -> fe.Federation:
    made = fe.Federation(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        DATA,
        fe.FedAvg(lr=0.5),
        modes=modes,
        dtype=torch.float64,
        combine=combine,
    )
    list(made.rounds(3))
    return made


def logits(made: fe.Federation, x: torch.Tensor) -> torch.Tensor:
    modules = [made.ensemble.module(mode) for mode in range(len(made.ensemble))]
    return torch.stack([module(x).detach() for module in modules])


@pytest.mark.parametrize("modes", [1, 3])
def test_scores_by_their_formulas(modes):
    made, x = federation(modes), numbers(20, 4, word=5)
    prediction, raw = made.predict(x), logits(made, x)
    members = raw.softmax(-1)
    mean = members.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    votes = torch.nn.functional.one_hot(members.argmax(-1), 3).sum(0)
    expected = {
        "max_probability": 1 - mean.max(-1).values,
        "entropy": entropy,
        "mutual_information": entropy + (members * members.log()).sum(-1).mean(0),
        "energy": -raw.exp().sum(-1).log().mean(0),
        "variation_ratio": 1 - votes.max(-1).values.double() / modes,
    }
    assert set(expected) == set(SCORES)
    for score, values in expected.items():
        torch.testing.assert_close(prediction.uncertainty(score), values, **EXACT)
    made.combine = "logits"
    of_logits = made.predict(x).uncertainty("energy")
    torch.testing.assert_close(of_logits, -raw.mean(0).exp().sum(-1).log(), **EXACT)


def test_one_mode_has_one_energy():
    made, x = federation(1), numbers(20, 4, word=5)
    energy = made.predict(x).uncertainty("energy")
    made.combine = "logits"
    torch.testing.assert_close(made.predict(x).uncertainty("energy"), energy, **EXACT)


def test_detection_by_each_score():
    made = federation()
    inside, outside = made.predict(DATA.x), made.predict(30 * numbers(40, 4, word=6))
    found = fe.ood_metrics(inside, outside)
    assert list(found) == list(SCORES)
    for score, metrics in found.items():
        a, b = inside.uncertainty(score), outside.uncertainty(score)
        pairs = (b > a.unsqueeze(1)).double() + (b == a.unsqueeze(1)).double() / 2
        assert metrics["auroc"] == pytest.approx(float(pairs.mean()), abs=1e-9)
        assert set(metrics) == {"auroc", "aupr_in", "aupr_out", "fpr95"}
    same = fe.ood_metrics(inside, inside)
    assert {round(metrics["auroc"], 9) for metrics in same.values()} == {0.5}
    alone = federation(1)
    single = fe.ood_metrics(alone.predict(DATA.x), alone.predict(30 * DATA.x))
    assert single["mutual_information"]["auroc"] == 0.5  # one mode agrees with itself


def test_detection_without_logits_and_with_other_shapes():
    members = numbers(2, 9, 3).softmax(-1)
    made = Prediction(members.mean(0), members)
    assert "energy" not in fe.ood_metrics(made, made)
    with pytest.raises(InputError, match="'energy' needs the logits"):
        made.uncertainty("energy")
    with pytest.raises(InputError, match=r"= \(2, 3\), and the second \(1, 3\)"):
        fe.ood_metrics(made, Prediction(members[0], members[:1]))
    with pytest.raises(InputError, match=r"two results of Ensemble\.predict; got Tensor"):
        fe.ood_metrics(made, members)
    values = Prediction(members[0], members, "regression", "outputs")
    with pytest.raises(InputError, match="ood_metrics needs class probabilities"):
        fe.ood_metrics(values, values)
    with pytest.raises(InputError, match="'entropy' needs class probabilities"):
        values.uncertainty()
    with pytest.raises(InputError, match=r"one of max_probability, .*; got score='msp'"):
        made.uncertainty("msp")


def two_classes(confidence: list[float]) -> Prediction:
    mean = torch.tensor([[value, 1 - value] for value in confidence], dtype=torch.float64)
    return Prediction(mean, mean.unsqueeze(0))


def test_abstain_by_threshold_and_coverage():
    made = two_classes([0.9, 0.6, 0.8, 0.7])
    found = made.abstain(threshold=0.25, score="max_probability")
    assert found.answered.tolist() == [True, False, True, False]
    assert found.label.tolist() == [0, -1, 0, -1] and found.coverage == 0.5
    assert repr(found) == "Abstention(2 of 4 rows answered, max_probability <= 0.25)"
    for coverage, rows in ((1, 4), (0.75, 3), (0.5, 2), (0.51, 3), (0.01, 1)):
        assert int(made.abstain(coverage=coverage).answered.sum()) == rows
    tied = two_classes([0.9, 0.7, 0.7, 0.7])
    assert tied.abstain(coverage=0.5).coverage == 1.0  # ties are answered together
    # the threshold of the calibration data: half of it has an entropy of at most that of 0.95
    other = two_classes([0.99, 0.95, 0.7, 0.6])
    assert made.abstain(coverage=0.5, calibration=other).coverage == 0.0
    assert made.abstain(coverage=0.75, calibration=(other, None)).answered.sum() == 3


def test_the_bound_is_that_of_clopper_and_pearson():
    for errors, trials in ((0, 10), (3, 50), (9, 10), (10, 10)):
        exact = stats.binomtest(errors, trials, alternative="less")
        expected = exact.proportion_ci(0.99, method="exact").high
        assert _upper_bound(errors, trials, 0.01) == pytest.approx(expected, abs=1e-9)


def test_the_risk_is_kept_as_often_as_promised():
    """The error rate of a row of uncertainty u is u / 4: that of all rows up to t is t / 8."""
    rng = torch.Generator().manual_seed(0)
    risk, broken, naive_broken, answered = 0.1, 0, 0, 0.0
    for _ in range(300):
        u = torch.rand(1000, generator=rng, dtype=torch.float64)
        wrong = torch.rand(1000, generator=rng, dtype=torch.float64) < u / 4
        threshold = risk_threshold(u, wrong, risk, confidence=0.9)
        broken += threshold / 8 > risk
        answered += max(threshold, 0.0) / 300
        ranked = u.sort()
        means = wrong[ranked.indices].double().cumsum(0) / torch.arange(1, 1001)
        kept = ranked.values[means <= risk]
        naive_broken += len(kept) > 0 and float(kept.max()) / 8 > risk
    assert broken / 300 <= 0.1
    assert naive_broken / 300 > 0.3  # the rule without a bound breaks its word
    assert answered > 0.4  # of 0.8, which would be right if the error rates were known


def test_abstain_at_a_certified_risk():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.5, 1, 1000)
    right = rng.uniform(size=1000) < 0.4 + 0.6 * confidence
    calibration = (two_classes(confidence.tolist()), 1 - right.astype(int))
    found = two_classes([0.99, 0.51]).abstain(risk=0.2, calibration=calibration)
    # The same rule with scipy's bound: thresholds at every 20th part of the calibration rows.
    entropy = calibration[0].entropy.sort()
    wrong = torch.from_numpy(~right)[entropy.indices]
    passed = [-math.inf]
    for level in range(50, 1001, 50):
        test = stats.binomtest(int(wrong[:level].sum()), level - 1, alternative="less")
        if test.proportion_ci(1 - 0.05 / LEVELS, method="exact").high <= 0.2:
            passed.append(float(entropy.values[level - 1]))
    assert found.threshold == max(passed) > 0
    hopeless = (calibration[0], np.ones(1000, int))
    nothing = two_classes([0.99]).abstain(risk=0.2, calibration=hopeless)
    assert (
        nothing.threshold == -math.inf and nothing.coverage == 0 and nothing.label.tolist() == [-1]
    )


def test_abstain_says_what_is_wrong():
    made = two_classes([0.9, 0.6])
    calibration = (made, [0, 1])
    for options, message in (
        ({}, "one of risk, coverage and threshold"),
        ({"risk": 0.1, "coverage": 0.5}, "one of risk, coverage and threshold"),
        ({"coverage": 0}, "coverage to be above 0 and at most 1; got coverage=0"),
        ({"coverage": 1.1}, "got coverage=1.1"),
        ({"coverage": float("nan")}, "got coverage=nan"),
        ({"coverage": "all"}, "got coverage='all'"),
        ({"risk": 1, "calibration": calibration}, "risk to be above 0 and below 1"),
        ({"risk": 0.1}, r"needs calibration=\(prediction, labels\)"),
        ({"risk": 0.1, "calibration": made}, r"needs calibration=\(prediction, labels\)"),
        ({"risk": 0.1, "calibration": (made, None)}, r"needs calibration=\(prediction, labels\)"),
        ({"risk": 0.1, "calibration": (made, [0])}, r"needs targets of shape \(2,\)"),
        ({"risk": 0.05, "calibration": calibration}, "2 calibration rows cannot .* takes 118 rows"),
        ({"risk": 0.1, "calibration": calibration, "confidence": 2}, "got confidence=2"),
        ({"coverage": 0.5, "calibration": [made]}, r"needs calibration=\(prediction, labels\)"),
        ({"threshold": 0.5, "calibration": calibration}, "does not use calibration"),
        ({"threshold": float("nan")}, "threshold to be a number; got threshold=nan"),
        ({"coverage": 0.5, "score": "sureness"}, "got score='sureness'"),
    ):
        with pytest.raises(InputError, match=message):
            made.abstain(**options)
    with pytest.raises(DataError, match="go up to 5, but the model has 2 outputs"):
        made.abstain(risk=0.1, calibration=(made, [0, 5]))
    values = Prediction(torch.ones(2, 1), torch.ones(1, 2, 1), "regression", "outputs")
    with pytest.raises(InputError, match="needs class probabilities, and this is regression"):
        values.abstain(coverage=0.5)
    with pytest.raises(InputError, match="'calibration' needs class probabilities"):
        made.abstain(coverage=0.5, calibration=values)
    members = numbers(3, 2, 2).softmax(-1)
    with pytest.raises(InputError, match=r"same ensemble: .* = \(1, 2\), .* calibration \(3, 2\)"):
        made.abstain(coverage=0.5, calibration=Prediction(members.mean(0), members))
    with pytest.raises(InputError, match="The targets are missing"):
        fe.evaluate(made, None)
