"""Predictions and metrics against direct formulas."""

import itertools
import math

import pytest
import torch
from torch import nn

from fedensemble import FedAvg, Federation, InputError, Prediction, evaluate
from fedensemble.metrics import CLASSIFICATION, REGRESSION, disagreement
from fedensemble.testing.toy_problems import (
    SIZES,
    classification,
    labels,
    numbers,
    ragged,
    small_model,
    train,
)

DATA = classification()
EXACT = {"rtol": 0, "atol": 1e-12}  # the same formula in float64


def federation(model=small_model, **options):
    options = {"modes": 4, "strata": 3, "batch_size": 3, "dtype": torch.float64, **options}
    return train(Federation(model, options.pop("data", DATA), FedAvg(lr=0.5), **options), 4)


def logits(made, x):
    """Outputs of each mode by plain nn.Modules, [K, B, C]."""
    outputs = []
    for theta in made.state.modes["theta"]:
        model = made.model.build(0).eval()
        model.load_state_dict(made.model.theta_layout.unflatten(theta), strict=False)
        outputs.append(model(x).detach())
    return torch.stack(outputs)


def probabilities(modes=4, examples=50, classes=3):
    return torch.softmax(2 * numbers(modes, examples, classes), -1)


def test_probabilities_and_logits():
    made, x = federation(), numbers(20, 4, word=5)
    raw = logits(made, x)
    prediction = made.ensemble.predict(x)
    torch.testing.assert_close(prediction.members, raw.softmax(-1), **EXACT)
    torch.testing.assert_close(prediction.mean, raw.softmax(-1).mean(0), **EXACT)
    assert torch.equal(prediction.label, prediction.mean.argmax(-1))
    made.combine = "logits"
    other = made.ensemble.predict(x)
    torch.testing.assert_close(other.mean, raw.mean(0).softmax(-1), **EXACT)
    torch.testing.assert_close(other.members, raw.softmax(-1), **EXACT)
    assert not torch.allclose(other.mean, prediction.mean)
    assert len(made.ensemble) == 4


def test_a_mode_as_a_module():
    def net():
        features = DATA.x.shape[1]
        return nn.Sequential(
            nn.Linear(features, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)
        )

    made = federation(net)
    prediction = made.ensemble.predict(DATA.x)
    for mode in range(4):
        module = made.ensemble.module(mode)
        torch.testing.assert_close(
            module(DATA.x).softmax(-1).detach(), prediction.members[mode], **EXACT
        )
    with torch.no_grad():
        next(module.parameters()).zero_()  # a copy of the weights: the ensemble does not change
    assert torch.equal(made.ensemble.predict(DATA.x).mean, prediction.mean)
    with pytest.raises(IndexError):
        made.ensemble.module(4)


def test_batches_do_not_matter():
    made, x = federation(), numbers(20, 4, word=5)
    torch.testing.assert_close(
        made.ensemble.predict(x, batch_size=7).mean, made.ensemble.predict(x).mean, **EXACT
    )


def test_uncertainty_formulas():
    members = probabilities()
    prediction = Prediction(members.mean(0), members)
    for b in range(5):
        p = members[:, b].mean(0).tolist()
        assert float(prediction.entropy[b]) == pytest.approx(
            -sum(v * math.log(v) for v in p), abs=1e-12
        )
        own = [-sum(v * math.log(v) for v in row) for row in members[:, b].tolist()]
        assert float(prediction.member_entropy[b]) == pytest.approx(sum(own) / 4, abs=1e-12)
        kl = (
            sum(
                v * math.log(v / m)
                for row in members[:, b].tolist()
                for v, m in zip(row, p, strict=True)
            )
            / 4
        )
        assert float(prediction.mutual_information[b]) == pytest.approx(kl, abs=1e-12)
    torch.testing.assert_close(prediction.variance, members.var(0), **EXACT)


def test_mutual_information_is_never_negative_and_certainty_has_no_entropy():
    same = probabilities(modes=1).expand(5, -1, -1)
    assert float(Prediction(same.mean(0), same).mutual_information.min()) >= 0
    assert float(Prediction(same.mean(0), same).mutual_information.max()) < 1e-14
    sure = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    prediction = Prediction(sure.mean(0), sure)
    assert prediction.member_entropy.tolist() == [0.0]
    assert float(prediction.mutual_information) == pytest.approx(math.log(2))


def test_disagreement_by_brute_force():
    members = probabilities(modes=5)
    pairs = list(itertools.combinations(range(5), 2))
    expected = sum(
        float((members[a].argmax(-1) != members[b].argmax(-1)).double().mean()) for a, b in pairs
    ) / len(pairs)
    assert disagreement(members) == pytest.approx(expected, abs=1e-12)
    assert disagreement(members[:1]) == 0.0
    assert disagreement(members[:1].expand(3, -1, -1)) == 0.0


def test_classification_metrics():
    members, target = probabilities(), labels(50)
    prediction = Prediction(members.mean(0), members)
    metrics = evaluate(prediction, target)
    mean = members.mean(0)
    right = [float((m.argmax(-1) == target).double().mean()) for m in members]
    assert metrics["accuracy"] == pytest.approx(float((mean.argmax(-1) == target).double().mean()))
    assert metrics["mode_accuracy_mean"] == pytest.approx(sum(right) / 4)
    assert (metrics["mode_accuracy_min"], metrics["mode_accuracy_max"]) == (min(right), max(right))
    nll = -sum(math.log(float(mean[b, target[b]])) for b in range(50)) / 50
    assert metrics["nll"] == pytest.approx(nll, abs=1e-12)
    brier = (
        sum((float(mean[b, c]) - (c == int(target[b]))) ** 2 for b in range(50) for c in range(3))
        / 50
    )
    assert metrics["brier"] == pytest.approx(brier, abs=1e-12)
    # torchmetrics bins in float32
    assert metrics["ece"] == pytest.approx(_calibration_error(mean, target), abs=1e-7)
    assert metrics["entropy"] == pytest.approx(float(prediction.entropy.mean()))
    assert metrics["mutual_information"] == pytest.approx(
        metrics["entropy"] - metrics["mode_entropy"], abs=1e-12
    )
    assert all(isinstance(value, float) for value in metrics.values())


def test_metrics_are_known_by_name_before_there_are_any():
    members, target = probabilities(), labels(50)
    assert tuple(evaluate(Prediction(members.mean(0), members), target)) == CLASSIFICATION
    values = members[..., 0]
    assert (
        tuple(evaluate(Prediction(values.mean(0), values, "regression"), values[0])) == REGRESSION
    )


def _calibration_error(mean, target, bins=15):
    """Guo et al. 2017: sum over bins of (share of examples) * |accuracy - confidence|."""
    confidence, label = mean.max(-1)
    total = 0.0
    for index in range(bins):
        inside = (confidence > index / bins) & (confidence <= (index + 1) / bins)
        if inside.any():
            gap = float((label == target)[inside].double().mean() - confidence[inside].mean())
            total += float(inside.double().mean()) * abs(gap)
    return total


def test_calibration_error_by_hand():
    """Two bins are used: 0.9 sure and 1 of 2 right, 0.6 sure and 2 of 2 right: (0.4 + 0.4) / 2."""
    mean = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]], dtype=torch.float64)
    metrics = evaluate(Prediction(mean, mean.unsqueeze(0)), torch.tensor([0, 1, 1, 1]))
    assert metrics["ece"] == pytest.approx(0.4, abs=1e-6)


def test_a_confident_mistake_has_a_finite_loss():
    mean = torch.tensor([[1.0, 0.0]])
    assert evaluate(Prediction(mean, mean.unsqueeze(0)), torch.tensor([1]))["nll"] == pytest.approx(
        -math.log(1e-12)
    )


def test_labels_the_model_does_not_know():
    mean = torch.tensor([[1.0, 0.0]])
    with pytest.raises(ValueError, match="Test labels go up to 4, but the model has 2 outputs"):
        evaluate(Prediction(mean, mean.unsqueeze(0)), torch.tensor([4]))


def test_sequences_count_every_position():
    members, target = probabilities(examples=60).reshape(4, 20, 3, 3), labels(20, 3)
    flat = Prediction(members.reshape(4, 60, 3).mean(0), members.reshape(4, 60, 3))
    assert evaluate(Prediction(members.mean(0), members), target) == pytest.approx(
        evaluate(flat, target.flatten())
    )


def test_regression():
    data = ragged(numbers(sum(SIZES), 4), numbers(sum(SIZES), 2, word=1))
    made = federation(lambda: nn.Linear(4, 2), data=data, loss="mse")
    x, y = numbers(9, 4, word=2), numbers(9, 2, word=3)
    raw, prediction = logits(made, x), made.ensemble.predict(x)
    torch.testing.assert_close(prediction.mean, raw.mean(0), **EXACT)
    torch.testing.assert_close(prediction.variance, ((raw - raw.mean(0)) ** 2).sum(0) / 3, **EXACT)
    metrics = evaluate(prediction, y)
    errors = ((raw - y) ** 2).mean((1, 2))
    assert metrics["mse"] == pytest.approx(float(((raw.mean(0) - y) ** 2).mean()), abs=1e-12)
    assert metrics["mode_mse_mean"] == pytest.approx(float(errors.mean()), abs=1e-12)
    assert (metrics["mode_mse_min"], metrics["mode_mse_max"]) == pytest.approx(
        (float(errors.min()), float(errors.max()))
    )
    assert metrics["variance"] == pytest.approx(float(raw.var(0).mean()), abs=1e-12)
    # ambiguity decomposition: error of the mean = mean error of the modes - their biased variance
    assert metrics["mse"] == pytest.approx(
        metrics["mode_mse_mean"] - 3 / 4 * metrics["variance"], abs=1e-12
    )
    for name in ("entropy", "label", "member_entropy", "mutual_information"):
        with pytest.raises(
            InputError, match=f"'{name}' needs class probabilities, and this is regression"
        ):
            getattr(prediction, name)


def test_one_mode_has_no_variance():
    prediction = federation(modes=1, strata=1).ensemble.predict(DATA.x)
    assert float(prediction.variance.abs().max()) == 0.0
    assert float(prediction.mutual_information.max()) < 1e-14


def test_dropout_kept_active():
    def model():
        return nn.Sequential(
            nn.Linear(4, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 3)
        )

    made = federation(model)
    buffers = made.state.buffers.clone()
    standard, first, again = (
        made.ensemble.predict(DATA.x, dropout=dropout) for dropout in (False, True, True)
    )
    assert torch.equal(first.members, again.members)
    assert not torch.allclose(first.mean, standard.mean)
    assert torch.equal(made.state.buffers, buffers)  # BatchNorm stays in eval mode
    assert torch.equal(made.ensemble.predict(DATA.x).mean, standard.mean)
    alone, single = (
        made.ensemble.predict(DATA.x[:n], dropout=True).members for n in (len(DATA.x), 1)
    )
    assert alone.shape[1] == len(DATA.x)
    assert single.shape[1] == 1  # a batch of one: BatchNorm in training mode would reject it


@pytest.mark.filterwarnings("ignore::fedensemble.EngineWarning")
def test_dropout_does_not_change_statistics_of_other_layers():
    def model():
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        return nn.Sequential(
            nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3)
        )

    made = federation(model)
    before = made.state.buffers.clone()
    made.ensemble.predict(DATA.x, dropout=True)
    assert torch.equal(made.state.buffers, before)


def test_inputs_are_checked():
    ensemble = federation().ensemble
    with pytest.raises(InputError, match="nothing to predict"):
        ensemble.predict(torch.empty(0, 4))
    with pytest.raises(InputError, match="shape"):
        ensemble.predict(torch.ones(3, 5))
    assert ensemble.predict([[0.0, 1.0, 2.0, 3.0]]).mean.shape == (1, 3)
