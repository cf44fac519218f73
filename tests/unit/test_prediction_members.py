"""Several models per mode: kept apart in predictions, grouped in metrics, counted in bytes, written
to files.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedensemble import Federation, InputError, Prediction, evaluate
from fedensemble.algorithms import FedAvg, FedBENoKD
from fedensemble.experiment.prediction_summary import describe_predictions
from fedensemble.metrics import disagreement, evaluate_modes
from fedensemble.testing.toy_problems import (
    FEATURES,
    classification,
    labels,
    numbers,
    small_federation,
    train,
)

EXACT = {"rtol": 0, "atol": 1e-12}
INDEX = torch.tensor([0, 0, 0, 1, 1, 1])


def grouped(combine="probabilities"):
    """Two modes of three members each for 40 inputs and 4 classes, and their logits [2, 3, 40,
    4].
    """
    raw = 2 * numbers(2 * 3 * 40, 4).reshape(2, 3, 40, 4)
    members = raw.softmax(-1)
    mean = raw.mean((0, 1)).softmax(-1) if combine == "logits" else members.mean((0, 1))
    return Prediction(mean, members.flatten(0, 1), "classification", combine, INDEX), raw


def test_one_mode_with_samples_is_uncertain():
    federation = train(
        small_federation(FedBENoKD(lr=0.5, samples=10), "loop", modes=1, strata=1), 3
    )
    x, y = numbers(30, FEATURES, word=5), labels(30)
    prediction = federation.ensemble.predict(x)
    found = evaluate(prediction, y)
    assert prediction.members.shape[0] == 10 and prediction.modes.shape[0] == 1
    assert prediction.mode_index.tolist() == [0] * 10
    samples = federation.state.modes["samples"].reshape(10, -1)
    own = torch.stack(
        [federation.model.outputs(one, torch.empty(0), x).softmax(-1) for one in samples]
    )
    entropies = -(own * own.log()).sum(-1).mean(0)
    mean = own.mean(0)
    information = (-(mean * mean.log()).sum(-1) - entropies).mean()
    assert float(information) > 1e-4
    assert found["mutual_information"] == pytest.approx(float(information), abs=1e-10)
    assert found["mode_entropy"] == pytest.approx(float(entropies.mean()), abs=1e-10)
    assert found["entropy"] - found["mode_entropy"] == pytest.approx(
        found["mutual_information"], abs=1e-10
    )
    assert float(prediction.variance.max()) > 0
    assert found["disagreement"] == 0  # between modes, and there is one
    assert found["mode_accuracy_mean"] == found["accuracy"]


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
def test_metrics_of_modes_group_members(combine):
    prediction, raw = grouped(combine)
    target = labels(40)
    modes = raw.mean(1).softmax(-1) if combine == "logits" else raw.softmax(-1).mean(1)
    torch.testing.assert_close(prediction.modes, modes, **EXACT)
    found, apart = evaluate(prediction, target), evaluate_modes(prediction, target)
    right = [float((mode.argmax(-1) == target).double().mean()) for mode in modes]
    assert apart["accuracy"] == pytest.approx(right) and len(apart["nll"]) == 2
    assert (found["mode_accuracy_min"], found["mode_accuracy_max"]) == (min(right), max(right))
    assert found["disagreement"] == disagreement(modes)
    assert describe_predictions(prediction, target)["modes"] == 2


def test_members_are_not_weighed_by_their_mode():
    prediction, raw = grouped()
    entropies = torch.special.entr(raw.softmax(-1)).sum(-1).mean((0, 1))
    torch.testing.assert_close(prediction.member_entropy, entropies, **EXACT)
    torch.testing.assert_close(prediction.variance, prediction.members.var(0), **EXACT)


def test_regression_groups_members():
    members = torch.tensor([[[0.0]], [[2.0]], [[4.0]], [[8.0]]], dtype=torch.float64)
    prediction = Prediction(
        members.mean(0), members, "regression", "outputs", torch.tensor([0, 0, 1, 1])
    )
    assert prediction.modes.flatten().tolist() == [1.0, 6.0]
    found = evaluate(prediction, torch.tensor([[1.0]]))
    assert (found["mode_mse_min"], found["mode_mse_max"]) == (0.0, 25.0)
    assert found["variance"] == pytest.approx(float(members.flatten().var()))
    assert evaluate_modes(prediction, torch.tensor([[1.0]]))["mse"] == [0.0, 25.0]
    assert "spreads" in describe_predictions(
        Prediction(members[0], members[:2], "regression", "outputs", torch.tensor([0, 0])),
        torch.tensor([[1.0]]),
    )


def test_members_that_are_modes_are_left_as_they_are():
    members = numbers(3 * 5, 4).reshape(3, 5, 4).softmax(-1)
    prediction = Prediction(members.mean(0), members)
    assert prediction.modes is prediction.members and prediction.mode_index.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match=r"one mode_index per member; got \(2,\) for 3 members"):
        Prediction(members.mean(0), members, mode_index=torch.tensor([0, 1]))


def test_models_needed_for_prediction_are_counted():
    plain = small_federation(FedAvg(), "loop", modes=2, strata=2).ensemble
    sampled = small_federation(FedBENoKD(samples=5), "loop", modes=2, strata=2).ensemble
    assert (plain.prediction_models, sampled.prediction_models) == (2, 10)
    assert plain.prediction_bytes == plain.theta.numel() * 8  # float64, no running statistics
    assert sampled.prediction_bytes == 5 * plain.prediction_bytes


def normed():
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


def test_batch_statistics_are_those_of_each_batch():
    """As torch's own train mode on batches of 16; the last input, alone, joins the batch before
    it.
    """

    def model():
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    federation = train(
        Federation(model, classification(), FedAvg(lr=0.5), modes=2, dtype=torch.float64), 2
    )
    x, buffers = numbers(33, FEATURES, word=5), federation.state.buffers.clone()
    found = federation.ensemble.predict(x, batch_size=16, dropout=True, batch_statistics=True)
    for mode in range(2):
        module = federation.ensemble.module(mode).train()
        with torch.no_grad():
            expected = torch.cat([module(part).softmax(-1) for part in (x[:16], x[16:])])
        torch.testing.assert_close(found.members[mode], expected, **EXACT)
    assert torch.equal(federation.state.buffers, buffers)
    again = federation.ensemble.predict(x, batch_size=16, dropout=True, batch_statistics=True)
    assert torch.equal(found.mean, again.mean)
    assert not torch.allclose(found.mean, federation.ensemble.predict(x, dropout=True).mean)
    with pytest.raises(InputError, match="at least 2 inputs"):
        federation.ensemble.predict(x[:1], dropout=True, batch_statistics=True)


def test_train_mode_keeps_dropout_active():
    federation = train(
        Federation(normed, classification(), FedAvg(lr=0.5), modes=1, dtype=torch.float64), 1
    )
    x = numbers(32, FEATURES, word=5)
    found = federation.ensemble.predict(x, batch_size=16, dropout=True, batch_statistics=True)
    module = federation.ensemble.module(0).train()
    module[3].p = 0.0
    with torch.no_grad():
        without = torch.cat([module(part).softmax(-1) for part in torch.split(x, 16)])
    assert not torch.allclose(found.mean, without)
    assert np.isfinite(found.mean.numpy()).all()
