"""MC-dropout: each model predicts S times with keyed masks; every prediction is a member."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedensemble as fe
from fedensemble import InputError, prng
from fedensemble.config.schema import resolve
from fedensemble.distillation.distill import DistillSettings
from fedensemble.experiment.distilled_run import distill_run
from fedensemble.experiment.run import run
from fedensemble.federation.serialization import read_arguments
from fedensemble.models.augment import PadCropFlip
from fedensemble.testing.toy_problems import FEATURES, classification, labels, numbers

DATA = classification()
P, HIDDEN, CLASSES = 0.4, 8, 3


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(P), nn.Linear(HIDDEN, CLASSES)
    )


def federation(model=network, rounds=4, **options) -> fe.Federation:
    options = {"modes": 2, "clients_per_round": 3, "dropout_samples": 5, "seed": 7, **options}
    made = fe.Federation(model, DATA, fe.FedAvg(lr=0.3), dtype=torch.float64, **options)
    made.train(rounds)
    return made


def reference(made: fe.Federation, x: torch.Tensor, samples: int, batch: int) -> np.ndarray:
    """Probabilities [K, S * samples, B, C] in NumPy, from the masks of the PRNG alone."""
    found = []
    for mode, models in enumerate(made.ensemble.predictors):
        for place, theta in enumerate(models.numpy()):
            w1, b1, w2, b2 = np.split(theta, np.cumsum([32, 8, 24]))
            hidden = np.maximum(x.numpy() @ w1.reshape(8, 4).T + b1, 0)
            for sample in range(samples):
                parts = []
                for index, rows in enumerate(np.split(hidden, range(batch, len(x), batch))):
                    key = prng.key(7, "mc-dropout", mode, place, index, sample)
                    draws = prng.bits(prng.fold_in(key, 1), rows.size).numpy().reshape(rows.shape)
                    kept = rows * (draws >= int(P * 2**63)) / (1 - P)
                    logits = np.exp(kept @ w2.reshape(3, 8).T + b2)
                    parts.append(logits / logits.sum(1, keepdims=True))
                found.append(np.concatenate(parts))
    return np.stack(found).reshape(len(made.ensemble), -1, len(x), CLASSES)


@pytest.mark.parametrize("average", ["none", "ema", {"name": "swag", "start": 0, "samples": 3}])
@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("batch", [1024, 9])
def test_members_are_those_of_a_numpy_reference(average, engine, batch):
    made, x = (
        federation(average=average, engine=engine, schedule="stratified"),
        numbers(20, FEATURES),
    )
    prediction = made.predict(x, batch_size=batch)
    expected = reference(made, x, 5, batch)
    per_mode = expected.shape[1]
    assert per_mode == (15 if isinstance(average, dict) else 5)
    assert prediction.mode_index.tolist() == [0] * per_mode + [1] * per_mode
    np.testing.assert_allclose(prediction.members, expected.reshape(-1, 20, 3), atol=1e-12)
    np.testing.assert_allclose(prediction.modes, expected.mean(1), atol=1e-12)
    np.testing.assert_allclose(prediction.mean, expected.mean((0, 1)), atol=1e-12)
    entropy = lambda p: -(p * np.log(p)).sum(-1)  # noqa: E731
    information = entropy(expected.mean((0, 1))) - entropy(expected).mean((0, 1))
    np.testing.assert_allclose(prediction.mutual_information, information, atol=1e-12)
    assert float(prediction.mutual_information.min()) > 0


@settings(max_examples=15, deadline=None)
@given(few=st.integers(1, 6), more=st.integers(0, 6), modes=st.integers(1, 3))
def test_more_samples_add_members_and_change_none(few, more, modes):
    made = federation(modes=modes, rounds=1, dropout_samples=few)
    x = numbers(10, FEATURES)
    own, longer = made.predict(x), made.predict(x, dropout_samples=few + more)
    shape = (modes, -1, 10, CLASSES)
    kept = longer.members.reshape(shape)[:, :few]
    # Up to rounding: more members may run in one stacked pass.
    torch.testing.assert_close(kept, own.members.reshape(shape), rtol=0, atol=1e-12)
    assert torch.equal(own.members, made.predict(x).members)  # repeatable
    assert len(set(map(str, longer.members.flatten(1).tolist()))) == modes * (few + more)
    assert made.ensemble.prediction_models == modes * few


def test_training_does_not_change_and_bytes_are_those_of_the_models():
    with_masks, without = federation(), federation(dropout_samples=0)
    assert torch.equal(with_masks.state.modes["theta"], without.state.modes["theta"])
    x = numbers(10, FEATURES)
    off = with_masks.predict(x, dropout_samples=0)
    assert torch.equal(off.members, without.predict(x).members) and len(off.members) == 2
    assert with_masks.ensemble.prediction_bytes == without.ensemble.prediction_bytes
    assert with_masks.ensemble.select([1]).dropout_samples == 5
    # The authors' way of testing has one mask per model, with or without MC-dropout.
    one_mask = with_masks.predict(x, dropout=True)
    assert torch.equal(one_mask.members, without.predict(x, dropout=True).members)


def test_many_samples_agree_with_the_expectation():
    """One unit with dropout: the mean of the outputs is that without dropout."""

    def model():
        return nn.Sequential(nn.Linear(FEATURES, 1), nn.Dropout(0.5))

    made = fe.Federation(
        model, DATA_REGRESSION, modes=1, loss="mse", dropout_samples=4000, strata=1
    )
    made.train(2)
    x = numbers(5, FEATURES).float()
    prediction, exact = made.predict(x), made.predict(x, dropout_samples=0)
    error = 4 * (prediction.variance / 4000).sqrt()
    assert bool(((prediction.mean - exact.mean).abs() <= error).all())
    # E[(2 b o)^2] - o^2 = o^2 for b in {0, 1} with probability 1/2.
    assert torch.allclose(prediction.variance, exact.mean**2, rtol=0.1)


DATA_REGRESSION = fe.FederatedData.from_clients(
    [(numbers(6, FEATURES, word=w).float(), numbers(6, 1, word=w + 9).float()) for w in range(4)]
)


def test_only_dropout_is_active():
    """BatchNorm keeps its running statistics, and images are not cropped."""

    def images():
        return nn.Sequential(
            PadCropFlip(), nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(32, 3),
        )  # fmt: skip

    x = numbers(12, 1, 6, 6).float()
    clients = [(x[i : i + 4], labels(12)[i : i + 4]) for i in (0, 4, 8)]
    data = fe.FederatedData.from_clients(clients)
    made = fe.Federation(images, data, modes=1, strata=1, dropout_samples=2, batch_size=4, seed=3)
    made.train(2)
    module = made.ensemble.module(0)
    features = module[3](module[2](module[1](x))).detach()
    expected = []
    for sample in range(2):
        key = prng.fold_in(prng.key(3, "mc-dropout", 0, 0, 0, sample), 1)
        kept = prng.bits(key, features.numel()).reshape(features.shape) >= int(0.3 * 2**63)
        expected.append(module[5](features * kept / 0.7).softmax(-1))
    members = made.predict(x).members
    torch.testing.assert_close(members, torch.stack(expected), rtol=1e-5, atol=1e-6)
    train_mode = made.predict(x, dropout=True).members
    assert not torch.allclose(train_mode[0], members[0], atol=1e-3)


class Attention(nn.Module):
    """Dropout inside attention and between the layers of an LSTM, not as layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(FEATURES, 2, dropout=0.3, batch_first=True)
        self.recur = nn.LSTM(FEATURES, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        x, _ = self.attend(x, x, x)
        return self.out(self.recur(x)[0][:, -1])


def test_dropout_inside_layers_counts():
    made = federation(Attention, rounds=1, modes=1)
    assert float(made.predict(numbers(10, FEATURES)).mutual_information.max()) > 0


@pytest.mark.parametrize("bad", [-1, 2.5, True, 10_001, "ten"])
def test_wrong_numbers_of_samples(bad):
    with pytest.raises(InputError, match="dropout_samples"):
        federation(dropout_samples=bad)
    with pytest.raises(InputError, match="dropout_samples"):
        federation(rounds=1).predict(numbers(3, FEATURES), dropout_samples=bad)


def test_models_without_dropout_and_contradictions_are_rejected():
    plain = lambda: nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.0))  # noqa: E731
    with pytest.raises(InputError, match="Sequential has no active dropout"):
        federation(plain)
    with pytest.raises(InputError, match="give one of them"):
        federation(rounds=1).predict(numbers(3, FEATURES), dropout=True, dropout_samples=2)


def test_saved_federations_predict_with_the_same_masks(tmp_path):
    made, x = federation(), numbers(10, FEATURES)
    folder = made.save(tmp_path / "run")
    loaded = fe.load_ensemble(folder, model=network)
    assert loaded.dropout_samples == 5
    assert torch.equal(loaded.predict(x).members, made.predict(x).members)
    again = fe.Federation.load(folder, model=network, data=DATA)
    assert torch.equal(again.predict(x).members, made.predict(x).members)
    fewer = fe.Federation.load(folder, model=network, data=DATA, dropout_samples=0)
    assert len(fewer.predict(x).members) == 2
    with pytest.raises(InputError, match="MC-dropout cannot be exported"):
        loaded.export(tmp_path / "modes.pt2")
    loaded.dropout_samples = 0
    loaded.export(tmp_path / "modes.pt2")


def test_settings_of_earlier_versions_have_no_dropout_samples(tmp_path):
    settings_now = federation(rounds=1).settings()
    assert settings_now.pop("dropout_samples") == 5
    facts = {"settings": settings_now, "round": 1, "data": [len(DATA), len(DATA.x)]}
    read = read_arguments(tmp_path, tmp_path / "file", facts, DATA, {})
    assert read["dropout_samples"] == 0


def test_configs_without_it_keep_their_hash_and_wrong_ones_are_reported():
    values = {"model": {"name": "mlp", "dropout": 0.2}, "data": {"source": "digits", "clients": 9}}
    plain = resolve(values)
    assert "dropout_samples" not in plain.values()["ensemble"]
    with_samples = resolve({**values, "ensemble": {"dropout_samples": 3}})
    assert with_samples.hash() != plain.hash()
    for bad in (0, 10_001, "many"):
        with pytest.raises(InputError, match=r"ensemble\.dropout_samples"):
            resolve({**values, "ensemble": {"dropout_samples": bad}})


def test_calibration_is_of_what_predicts():
    """Temperatures are fitted to the members of MC-dropout, and applied to them."""
    clients = [(numbers(12, FEATURES, word=w), labels(12, word=w)) for w in range(4)]
    data = fe.FederatedData.from_clients(clients, classes=CLASSES).with_calibration(0.5)
    made = fe.Federation(network, data, fe.FedAvg(lr=0.3), modes=2, dropout_samples=4, strata=1)
    made.train(3)
    made.calibrate(alpha=0.3)
    prediction = made.predict(numbers(10, FEATURES))
    assert prediction.sets.shape == (10, CLASSES) and len(prediction.members) == 8


def test_a_student_of_mc_dropout_predicts_once(tmp_path):
    made = federation(modes=1, rounds=6)
    x = numbers(60, FEATURES)
    student = made.ensemble.distill(x, epochs=2)
    assert student.dropout_samples == 0 and len(student.predict(x).members) == 1


def test_a_distilled_run_of_mc_dropout_is_loaded_without_masks(tmp_path):
    values = {
        "rounds": 2,
        "data": {"source": "digits", "clients": 9, "partition": "iid", "server_share": 0.1},
        "model": {"name": "mlp", "hidden": [4], "dropout": 0.2},
        "ensemble": {"modes": 1, "strata": 1, "clients_per_round": 3, "dropout_samples": 3},
        "engine": {"device": "cpu"},
    }
    run(resolve(values), tmp_path / "run")
    folder, _ = distill_run(tmp_path / "run", tmp_path / "student", DistillSettings(epochs=1))
    assert fe.load_ensemble(tmp_path / "run").prediction_models == 3
    assert fe.load_ensemble(folder).prediction_models == 1
