"""Summaries of predictions, compared with values computed by hand."""

import math

import pytest
import torch

from fedensemble import FederatedData
from fedensemble.experiment.prediction_summary import describe_clients, describe_predictions
from fedensemble.metrics import evaluate, evaluate_modes
from fedensemble.prediction import Prediction

MEMBERS = torch.tensor(
    [
        [[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]],
        [[0.5, 0.5], [0.8, 0.2], [0.3, 0.7]],
    ]
)
TARGET = torch.tensor([0, 1, 1])


def test_classification_by_hand() -> None:
    found = describe_predictions(Prediction(MEMBERS.mean(0), MEMBERS), TARGET)
    # true classes down: the second example is a 1 taken for a 0
    assert found["confusion"] == [[1, 0], [1, 1]]
    held = found["calibration"]
    # confidences 0.7, 0.7 and 0.75 in fifteenths
    assert held["count"] == [0] * 10 + [2, 1, 0, 0, 0]
    assert (
        held["confidence"][10] == pytest.approx(0.7)
        and held["accuracy"][10] == 0.5
        and held["accuracy"][11] == 1
    )
    assert sum(found["calibration_modes"]["count"]) == 6
    assert found["entropy"]["most"] == pytest.approx(math.log(2))
    assert sum(found["entropy"]["right"]) == 2 and sum(found["entropy"]["wrong"]) == 1
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    assert found["entropy"]["wrong"][int(30 * entropy / math.log(2))] == 1


def test_the_risk_coverage_curve_by_hand() -> None:
    """The surest is right. The other two are equally sure: the error is second or third."""
    mean = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.2, 0.8]])
    held = describe_predictions(Prediction(mean, mean.unsqueeze(0)), TARGET)["selective"]
    assert held["coverage"] == pytest.approx([1 / 3, 2 / 3, 1], abs=1e-5) and held["errors"] == 1
    assert held["risk"] == pytest.approx([0, 1 / 4, 1 / 3], abs=1e-5)
    assert held["aurc"] == pytest.approx((1 / 4 + 1 / 3) / 3)
    assert held["coverage_at_5_risk"] == pytest.approx(1 / 3)


def test_the_risk_coverage_curve_has_a_bounded_size() -> None:
    rng = torch.Generator().manual_seed(0)
    mean = torch.randn(1234, 3, generator=rng, dtype=torch.float64).softmax(-1)
    target = torch.randint(3, (1234,), generator=rng)
    prediction = Prediction(mean, mean.unsqueeze(0))
    held = describe_predictions(prediction, target)["selective"]
    assert len(held["coverage"]) == len(held["risk"]) == 100 and held["coverage"][-1] == 1
    metrics = evaluate(prediction, target)
    assert held["risk"][-1] == pytest.approx(1 - metrics["accuracy"], rel=1e-4)
    assert [held[name] for name in ("aurc", "augrc")] == [metrics[n] for n in ("aurc", "augrc")]


def test_each_mode_by_hand() -> None:
    prediction = Prediction(MEMBERS.mean(0), MEMBERS)
    found = evaluate_modes(prediction, TARGET)
    assert found["accuracy"] == pytest.approx([2 / 3, 2 / 3], abs=1e-6)
    expected = [
        -(math.log(0.9) + math.log(0.4) + math.log(0.8)) / 3,
        -(math.log(0.5) + math.log(0.2 * 0.7)) / 3,
    ]
    assert found["nll"] == pytest.approx(expected, rel=1e-5)
    whole = evaluate(prediction, TARGET)
    assert whole["mode_accuracy_mean"] == pytest.approx(sum(found["accuracy"]) / 2, abs=1e-6)


def test_regression_by_hand() -> None:
    members = torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]])
    target = torch.tensor([1.0, 2.5])
    prediction = Prediction(members.mean(0), members, "regression", "outputs")
    found = describe_predictions(prediction, target)
    assert found["points"] == {
        "target": [1.0, 2.5],
        "mean": [2.0, 2.0],
        "spread": [pytest.approx(2**0.5, 1e-4), 0.0],
    }
    # errors 1 and -0.5
    assert found["residuals"]["reach"] == 1.0 and found["residuals"]["count"][29] == 1
    assert found["residuals"]["count"][7] == 1
    # the surest first
    assert found["spreads"]["error"] == [0.5, 1.0] and found["spreads"]["count"] == [1, 1]
    assert evaluate_modes(prediction, target)["mse"] == pytest.approx([0.125, 2.125])
    alone = Prediction(members[0], members[:1], "regression", "outputs")
    assert "spreads" not in describe_predictions(alone, target)


def test_clients_by_hand() -> None:
    data = FederatedData.from_clients(
        [(torch.zeros(3, 1), torch.tensor([0, 2, 2])), (torch.zeros(1, 1), torch.tensor([1]))]
    )
    found = describe_clients(data)
    assert (
        found["counts"] == [[1, 0, 2], [0, 1, 0]]
        and found["size"] == [3, 1]
        and found["examples"] == 4
    )


def test_classes_have_their_names() -> None:
    names = ("cat", "dog")
    found = describe_predictions(Prediction(MEMBERS.mean(0), MEMBERS, class_names=names), TARGET)
    assert found["labels"] == ["cat", "dog"]
    clients = [(torch.zeros(3, 1), ["dog", "cat", "dog"])]
    assert describe_clients(FederatedData.from_clients(clients))["labels"] == ["cat", "dog"]
