"""Loss "bce": a model with one output classifies two classes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedensemble as fe
from fedensemble.modeling.losses import bce, class_logits, cross_entropy

torch.manual_seed(0)
X = torch.randn(60, 3)
Y = (X[:, 0] + X[:, 1] > 0).long()
CLIENTS = list(zip(X.split([10, 20, 30]), Y.split([10, 20, 30]), strict=True))
DATA = fe.FederatedData.from_clients(CLIENTS, x_test=X, y_test=Y, class_names=["no", "yes"])


class Scalar(nn.Module):
    """A model whose outputs are [B], without a dimension of classes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).squeeze(-1)


def column():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model, engine="vector", rounds=3, **options):
    federation = fe.Federation(
        model, DATA, fe.FedAvg(lr=0.5), modes=2, loss="bce", engine=engine, batch_size=7, **options
    )
    list(federation.rounds(rounds))
    return federation


def test_it_is_torchs_loss_and_the_cross_entropy_of_two_logits():
    z = torch.randn(60, 1, dtype=torch.float64) * 30
    expected = F.binary_cross_entropy_with_logits(z[:, 0], Y.double(), reduction="none")
    torch.testing.assert_close(bce(z, Y), expected)
    torch.testing.assert_close(bce(z[:, 0], Y), expected)
    torch.testing.assert_close(cross_entropy(class_logits("bce", z), Y), expected)


@pytest.mark.parametrize("model", [column, Scalar])
def test_both_engines_agree_and_predict_two_probabilities(model):
    loop, vector = (train(model, engine, dtype=torch.float64) for engine in ("loop", "vector"))
    assert not vector.engine.notes  # batched layer by layer, not by vmap
    torch.testing.assert_close(loop.ensemble.theta, vector.ensemble.theta, rtol=0, atol=1e-12)
    prediction = vector.ensemble.predict(X)
    assert prediction.task == "classification" and prediction.mean.shape == (60, 2)
    logits = torch.stack(
        [vector.ensemble.module(k)(X.double()).reshape(60) for k in range(2)]
    ).detach()
    torch.testing.assert_close(prediction.members[..., 1], logits.sigmoid())
    torch.testing.assert_close(prediction.mean.sum(-1), torch.ones(60, dtype=torch.float64))
    assert set(prediction.label_names) == {"no", "yes"}
    # One input: its outputs [1] and [1, 1] must not be taken for each other.
    torch.testing.assert_close(vector.ensemble.predict(X[:1]).mean, prediction.mean[:1])


def test_metrics_are_those_of_classification():
    federation = train(column, rounds=20, epochs=3)
    prediction = federation.ensemble.predict(X)
    metrics = fe.evaluate(prediction, Y)
    assert metrics["accuracy"] > 0.9
    expected = F.binary_cross_entropy(prediction.mean[:, 1], Y.float())
    assert metrics["nll"] == pytest.approx(float(expected), rel=1e-4)
    assert {"ece", "brier", "mutual_information"} <= set(metrics)
    from sklearn.metrics import roc_auc_score

    assert roc_auc_score(Y, prediction.mean[:, 1]) > 0.95


def test_logits_are_averaged():
    federation = train(column, combine="logits")
    logits = torch.stack([federation.ensemble.module(k)(X)[:, 0] for k in range(2)]).detach()
    torch.testing.assert_close(federation.ensemble.predict(X).mean[:, 1], logits.mean(0).sigmoid())


def test_saved_and_loaded(tmp_path):
    federation = train(column)
    federation.save(tmp_path)
    again = fe.Federation.load(tmp_path, model=column, data=DATA)
    torch.testing.assert_close(again.ensemble.predict(X).mean, federation.ensemble.predict(X).mean)


def test_a_server_distils_two_classes():
    data = fe.FederatedData.from_clients(CLIENTS, x_server=X[:20])
    method = fe.algorithms.FedBE(lr=0.5, server_epochs=2, server_batch=10)
    federation = fe.Federation(column, data, method, modes=1, loss="bce", batch_size=7)
    list(federation.rounds(3))
    assert fe.evaluate(federation.ensemble.predict(X), Y)["accuracy"] > 0.6


def of_labels(y, **options):
    return fe.FederatedData.from_clients([(np.ones((3, 3), np.float32), y)], **options)


@pytest.mark.parametrize(
    ("outputs", "data", "problem"),
    [
        (2, of_labels([0, 1, 1]), r"one output per example, .*; got outputs of shape \(3, 2\)"),
        (1, of_labels([0, 1, 2]), "'bce' is for two classes, 0 and 1; got 3 classes"),
        (1, of_labels([0, 1, 1], classes=4), "got 4 classes"),
        (1, of_labels([0.0, 1.0, 1.0]), r"'bce' needs integer labels.*y\.long\(\)"),
        (1, of_labels([[0], [1], [1]]), r"one label per example; .*\(3, 1\).*flatten"),
    ],
)
def test_what_does_not_fit(outputs, data, problem):
    with pytest.raises(fe.InputError, match=problem):
        fe.Federation(lambda: nn.Linear(3, outputs), data, loss="bce", modes=1)


def test_one_output_with_cross_entropy_is_told_of_bce():
    with pytest.raises(fe.InputError, match="loss='bce' for two classes"):
        fe.Federation(lambda: nn.Linear(3, 1), DATA, modes=1)
