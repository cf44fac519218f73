"""Metrics of prediction sets and intervals against MAPIE and by hand; those of one mode."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

import fedensemble as fe
from fedensemble import InputError, Prediction, evaluate, evaluate_clients
from fedensemble.uncertainty import Calibration, CalibrationSettings

CASES = range(200)
CLOSE = {"rel": 0, "abs": 1e-6}


def classified(seed: int, members: int | None = None):
    """Members [K, n, C], labels and a threshold; ties in a third, one class in a tenth."""
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 5) if members is None else members
    logits = rng.normal(size=(count, rng.integers(1, 40), rng.integers(2, 6)))
    logits = logits.round() if seed % 3 == 0 else logits
    logits = 20 * logits if seed % 7 == 0 else logits
    target = rng.integers(logits.shape[-1], size=logits.shape[1]) * (seed % 10 > 0)
    probabilities = torch.from_numpy(logits).softmax(-1)
    return probabilities, torch.from_numpy(target), float(rng.random())


def with_sets(members: torch.Tensor, threshold: float, method: str) -> Prediction:
    settings = CalibrationSettings(method=method, randomized=False)
    made = Calibration(settings, members.shape[-1], len(members), 50, 2, thresholds=(threshold,))
    return Prediction(members.mean(0), members, calibration=made)


@pytest.mark.parametrize("seed", CASES)
def test_sets(seed):
    mapie = pytest.importorskip("mapie.metrics.classification")
    members, target, threshold = classified(seed)
    prediction = with_sets(members, threshold, ("lac", "aps", "raps")[seed % 3])
    found, sets = evaluate(prediction, target), prediction.sets.numpy()[:, :, None]
    covered = mapie.classification_coverage_score(target.numpy(), sets)
    assert found["set_coverage"] == pytest.approx(float(covered[0]), **CLOSE)
    width = mapie.classification_mean_width_score(sets)
    assert found["set_size"] == pytest.approx(float(width[0]), **CLOSE)
    assert found["empty_sets"] == pytest.approx((sets.sum(1) == 0).mean(), **CLOSE)


@pytest.mark.parametrize("seed", CASES)
def test_intervals(seed):
    mapie = pytest.importorskip("mapie.metrics.regression")
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(rng.integers(1, 5), rng.integers(1, 40), 1))
    target = rng.normal(size=members.shape[1])
    if seed % 3 == 0:  # targets on the ends of intervals
        members, target = members[:1].round(), target.round()
    alpha, threshold = float(rng.choice([0.1, 0.25])), float(rng.choice([0.0, 1.0, 0.7]))
    settings = CalibrationSettings(method="absolute", temperature="none", abstain=(), alpha=alpha)
    made = Calibration(settings, 1, len(members), 50, 2, thresholds=(threshold,))
    values = torch.from_numpy(members)
    prediction = Prediction(values.mean(0), values, "regression", "outputs", calibration=made)
    found = evaluate(prediction, torch.from_numpy(target))
    center = members.mean(0)
    ends = np.stack([center[:, 0] - threshold, center[:, 0] + threshold], 1)[:, :, None]
    covered = mapie.regression_coverage_score(target, ends)
    assert found["interval_coverage"] == pytest.approx(float(covered[0]), **CLOSE)
    assert found["interval_width"] == pytest.approx(2 * threshold, **CLOSE)
    winkler = mapie.regression_mwi_score(target, ends, confidence_level=1 - alpha)
    assert found["interval_score"] == pytest.approx(float(winkler), **CLOSE)


@pytest.mark.parametrize("seed", CASES)
def test_one_mode_has_the_numbers_of_its_model(seed):
    members, target, threshold = classified(seed, members=1)
    probabilities, labels = members[0].numpy(), target.numpy()
    found = evaluate(with_sets(members, threshold, "lac"), target)
    classes = np.arange(probabilities.shape[1])
    clipped = np.clip(probabilities, 1e-12, None)
    nll = -np.log(clipped[np.arange(len(labels)), labels]).mean()
    assert found["accuracy"] == accuracy_score(labels, probabilities.argmax(1))
    assert found["nll"] == pytest.approx(nll, rel=1e-9)
    if seed % 7:  # scikit-learn clips at another value
        assert found["nll"] == pytest.approx(log_loss(labels, probabilities, labels=classes))
    onehot = labels[:, None] == classes
    assert found["brier"] == pytest.approx(((probabilities - onehot) ** 2).sum(1).mean(), **CLOSE)
    entropy = -(probabilities * np.log(clipped)).sum(1).mean()
    assert found["entropy"] == pytest.approx(entropy, **CLOSE)
    assert found["mode_entropy"] == pytest.approx(entropy, **CLOSE)
    assert found["mutual_information"] == pytest.approx(0, abs=1e-12)
    assert found["disagreement"] == 0
    for end in ("mean", "min", "max"):
        assert found[f"mode_accuracy_{end}"] == found["accuracy"]
    covered = 1 - probabilities[np.arange(len(labels)), labels] <= threshold
    assert found["set_coverage"] == pytest.approx(covered.mean(), **CLOSE)


@pytest.mark.parametrize("place", ["mean", "member"])
def test_one_mode_is_scaled_as_its_model(place):
    x, y = torch.randn(200, 3), torch.randint(3, (200,))
    data = fe.FederatedData.from_arrays(x, y, [100, 100]).with_calibration(0.5)
    federation = fe.Federation(lambda: torch.nn.Linear(3, 3), data, modes=1)
    federation.train(1)
    made = federation.calibrate(temperature=place)
    logits = federation.uncalibrated.outputs(x)[0, 0]
    expected = (logits / made.temperatures[0]).softmax(-1)
    torch.testing.assert_close(federation.predict(x).mean, expected)


def test_clients_by_hand():
    mean = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8], [0.2, 0.8]], dtype=torch.double)
    prediction = with_sets(mean.unsqueeze(0), 0.55, "lac")  # sets {0}, {0, 1}, {1}, {1}
    found = evaluate_clients(prediction, [0, 1, 0, 1], [0, 0, 2, -1])
    assert found.values["set_coverage"][[0, 2]].tolist() == [1.0, 0.0]
    assert found.values["set_size"][[0, 2]].tolist() == [1.5, 1.0]
    assert found.summary()["set_coverage_worst"] == 0.0  # the lowest coverage is the worst


def test_the_mixture_of_a_regression():
    rng = torch.Generator().manual_seed(0)
    members = torch.randn(3, 50, 1, generator=rng, dtype=torch.double)
    target = torch.randn(50, 1, generator=rng, dtype=torch.double)
    prediction = Prediction(members.mean(0), members, "regression", "outputs")
    plain, found = evaluate(prediction, target), evaluate(prediction, target, noise=0.8, level=0.8)
    normal = torch.distributions.Normal(members, 0.8)
    nll = -(normal.log_prob(target).logsumexp(0) - np.log(3)).mean()
    assert found["nll"] == pytest.approx(float(nll), abs=1e-9)
    assert 0 < found["interval_coverage"] <= 1 and found["interval_score"] > found["interval_width"]
    assert set(found) - set(plain) == {
        "nll",
        *(f"interval_{n}" for n in ("coverage", "width", "score")),
    }
    labels = Prediction(torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.5, 0.5]]]))
    with pytest.raises(InputError, match="noise for regression only"):
        evaluate(labels, [0], noise=1.0)
