"""Personal models: choices, local training, rules for few rows, bytes, files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble import FedAvg, FederatedData, InputError
from fedensemble.client_metrics import evaluate_clients
from fedensemble.data.client_rows import ClientRows
from fedensemble.flat_params import payload_bytes
from fedensemble.personal.settings import METHODS
from fedensemble.testing.toy_problems import CLASSES, FEATURES, labels, numbers

CLIENTS, ROWS, K = 8, 12, 3
OPTIONS = {"tune": {"steps": 4, "lr": 0.2}, "head": {"head": ["1.*"], "steps": 4, "lr": 0.2}}


def model():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))


def with_batch_norm():
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))


def clients_data(new=True):
    total = CLIENTS * ROWS
    x, y = numbers(total, FEATURES), labels(total)
    test = 3 * CLIENTS
    data = FederatedData.from_arrays(
        x,
        y,
        [ROWS] * CLIENTS,
        x_test=numbers(test, FEATURES, word=5),
        y_test=labels(test, word=6),
        test_owner=torch.arange(test) % CLIENTS,
    )
    data = data.with_calibration(0.4, seed=1)
    return data.with_new_clients(0.25, seed=1) if new else data


def trained(rounds=4, algorithm=None, build=model, data=None, **options):
    made = fe.Federation(
        build,
        clients_data() if data is None else data,
        FedAvg(lr=0.3) if algorithm is None else algorithm,
        modes=K,
        clients_per_round=4,
        seed=2,
        batch_size=4,
        **options,
    )
    made.train(rounds)
    return made


@pytest.fixture(scope="module")
def federation():
    return trained()


def validation_losses(made, data):
    """NLL of each mode on each client's validation rows, in NumPy, [N, K]."""
    rows, losses = data.calibration, np.zeros((len(data), K))
    for k in range(K):
        probabilities = made.ensemble.select([k]).predict(rows.x).mean.double().numpy()
        nll = -np.log(probabilities[np.arange(len(rows)), rows.y.numpy()])
        np.add.at(losses[:, k], rows.owner.numpy(), nll)
    return losses


def test_select_takes_the_mode_with_the_lowest_validation_loss(federation):
    result = fe.personalize(federation, "select")
    for part, data in ((result, federation.data), (result.new, federation.data.new_clients)):
        assert part.choice.tolist() == validation_losses(federation, data).argmin(1).tolist()
        x = numbers(5, FEATURES, word=7)
        for client in range(len(data)):
            expected = federation.ensemble.select([int(part.choice[client])]).predict(x).mean
            torch.testing.assert_close(part.predict(x, client).mean, expected)


@pytest.mark.parametrize("method", METHODS)
def test_choices_do_not_depend_on_test_labels(federation, method):
    """Permuted test labels and inputs change no weight and no model."""
    data = federation.data
    order = torch.randperm(len(data.y_test), generator=torch.Generator().manual_seed(1))
    new = data.new_clients
    other = replace(
        data,
        y_test=data.y_test[order],
        x_test=-data.x_test,
        new_clients=replace(new, y_test=new.y_test.flip(0)),
    )
    first = fe.personalize(federation, method, **OPTIONS.get(method, {}))
    federation.data = other
    try:
        second = fe.personalize(federation, method, **OPTIONS.get(method, {}))
    finally:
        federation.data = data
    for one, two in ((first, second), (first.new, second.new)):
        assert torch.equal(one.weights, two.weights)
        assert (one.theta is None) == (method not in OPTIONS)
        if one.theta is not None:
            assert torch.equal(one.theta, two.theta)
    assert first.evaluate_clients().values["nll"].tolist() != (
        second.evaluate_clients().values["nll"].tolist()
    )


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize("build", [model, with_batch_norm])
def test_tune_is_local_training_from_the_selected_mode(engine, build):
    """Against a plain torch loop, with full batches so that the order of rows does not matter."""
    made = trained(build=build, dtype=torch.float64, engine=engine)
    result = fe.personalize(made, "tune", steps=3, lr=0.2, batch_size=100)
    for part, data in ((result, made.data), (result.new, made.data.new_clients)):
        for client in range(len(data)):
            module = made.ensemble.module(int(part.choice[client])).train()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
            x, y = data.client(client)
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x.double()), y).backward()
                optimizer.step()
            own = part.module(client).state_dict()
            for name, value in module.state_dict().items():
                if "num_batches" not in name:
                    torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10)


def test_head_trains_only_what_matches():
    made = trained(build=with_batch_norm, dtype=torch.float64)
    decayed = {"name": "adam", "weight_decay": 0.1}
    result = fe.personalize(made, "head", head=["2.*"], steps=5, lr=0.1, optimizer=decayed)
    for client in range(len(made.data)):
        before = made.ensemble.module(int(result.choice[client])).state_dict()
        after = result.module(client).state_dict()
        assert {n for n in after if not torch.equal(after[n], before[n])} == {"2.weight", "2.bias"}


def test_a_client_without_rows_uses_the_ensemble_and_tunes_the_mode_that_is_best_for_all():
    data = clients_data(new=False)
    rows = data.calibration
    kept = (rows.owner != 0) & ~((rows.owner == 1) & (torch.arange(len(rows)) % 5 > 0))
    data = replace(data, calibration=ClientRows(rows.x[kept], rows.y[kept], rows.owner[kept]))
    made = trained(data=data)
    for method in ("select", "mix", "posterior"):
        result = fe.personalize(made, method)
        assert result.rows[0] == 0
        assert result.choice[0] == -1
        np.testing.assert_allclose(result.weights[0], np.full(K, 1 / K), atol=1e-9)
        x = numbers(5, FEATURES, word=7)
        torch.testing.assert_close(result.predict(x, 0).mean, made.ensemble.predict(x).mean)
    best = validation_losses(made, data).sum(0).argmin()
    assert fe.personalize(made, "tune", steps=1).choice[0] == best


def test_a_client_with_one_row_and_one_with_one_class():
    """One row decides a choice, but hardly moves a mixture; one class is no special case."""
    data = clients_data(new=False)
    rows = data.calibration
    first = int(torch.nonzero(rows.owner == 0)[0])
    kept = (rows.owner != 0) | (torch.arange(len(rows)) == first)
    y = torch.where(rows.owner == 1, 0, rows.y)
    data = replace(data, calibration=ClientRows(rows.x[kept], y[kept], rows.owner[kept]))
    made = trained(data=data)
    losses = validation_losses(made, data)
    selected, mixed = fe.personalize(made, "select"), fe.personalize(made, "mix")
    assert selected.rows[0] == 1
    assert selected.choice[:2].tolist() == losses[:2].argmin(1).tolist()
    assert 1 / K < float(mixed.weights[0].max()) < 0.8
    assert bool(torch.isfinite(mixed.weights).all())


def test_without_any_validation_row():
    data = clients_data(new=False)
    with pytest.raises(InputError, match=r"with_calibration\(0.1\)"):
        fe.personalize(trained(data=replace(data, calibration=None)))
    rows = data.calibration
    none = ClientRows(rows.x[:0], rows.y[:0], rows.owner[:0])
    made = trained(data=replace(data, calibration=none))
    assert fe.personalize(made, "mix").choice.tolist() == [-1] * CLIENTS
    assert fe.personalize(made, "tune", steps=1).choice.tolist() == [0] * CLIENTS


def test_modes_travel_once(federation):
    result = fe.personalize(federation, "mix")
    one_model = payload_bytes({"theta": federation.state.modes["theta"]})
    assert result.bytes_down == K * one_model * len(federation.data)
    assert result.new.bytes_down == K * one_model * len(federation.data.new_clients)
    assert result.bytes_up == 0


def test_clients_are_measured_on_their_own_rows_with_their_own_models(federation):
    result = fe.personalize(federation, "tune", **OPTIONS["tune"])
    data = federation.data
    own = data.test_owner >= 0
    x, y, owner = data.x_test[own], data.y_test[own], data.test_owner[own]
    one_by_one = torch.cat([result.predict(x[i : i + 1], int(c)).mean for i, c in enumerate(owner)])
    expected = evaluate_clients(fe.Prediction(one_by_one, one_by_one[None]), y, owner, len(data))
    measured = result.evaluate_clients()
    for name, values in expected.values.items():
        torch.testing.assert_close(measured.values[name], values, equal_nan=True)
    assert result.evaluate_clients(new=True).summary()["clients"] == len(data.new_clients)


def test_weights_of_ditto_are_for_each_clients_own_models():
    made = trained(algorithm=fe.algorithms["ditto"](lr=0.3, lam=0.1))
    result = fe.personalize(made, "select")
    rows, own = made.data.calibration, made.personal_models(range(len(made.data)))
    for client in range(len(made.data)):
        x, y = rows.client(client)
        losses = [
            float(
                nn.functional.cross_entropy(
                    made.model.outputs(own.theta[client, k], own.buffers[client, k], x.float()), y
                )
            )
            for k in range(K)
        ]
        assert result.choice[client] == int(np.argmin(losses))
    assert result.bytes_down == 0  # they are with the clients already
    assert result.new.bytes_down > 0


@pytest.mark.parametrize("method", ["mix", "head"])
def test_a_saved_result_predicts_the_same(federation, method, tmp_path):
    folder = federation.save(tmp_path / "run")
    result = fe.personalize(federation, method, **OPTIONS.get(method, {}))
    path = result.save(folder)
    assert path.stat().st_mode & 0o077 == 0
    loaded = fe.load_personalization(folder, method, model=model)
    x = numbers(6, FEATURES, word=7)
    for mine, theirs in ((result, loaded), (result.new, loaded.new)):
        owner = [0, 1, None, 1, -1, 0]
        assert torch.equal(mine.predict(x, owner).mean, theirs.predict(x, owner).mean)
        assert (mine.bytes_down, mine.method) == (theirs.bytes_down, theirs.method)
    with pytest.raises(InputError, match="has no data"):
        loaded.evaluate_clients()


def test_regression_minimises_the_squared_error():
    data = FederatedData.from_arrays(numbers(60, FEATURES), numbers(60, 1, word=3), [10] * 6)
    made = fe.Federation(
        lambda: nn.Linear(FEATURES, 1), data.with_calibration(0.5), modes=2, loss="mse", seed=1
    )
    made.train(3)
    mixed = fe.personalize(made, "mix", prior=0.0)
    rows = made.data.calibration
    for client in range(6):
        x, y = rows.client(client)

        def error(weights, x=x, y=y):
            members = made.ensemble.predict(x).members
            return float(((weights.reshape(-1, 1, 1) * members).sum(0) - y).square().mean())

        grid = [error(torch.tensor([w, 1 - w])) for w in np.linspace(0, 1, 101)]
        assert error(mixed.weights[client].float()) <= min(grid) + 1e-6


def test_training_continues_as_if_nothing_had_happened():
    one, two = trained(3), trained(3)
    fe.personalize(two, "tune", steps=5)
    one.train(2)
    two.train(2)
    assert torch.equal(one.state.modes["theta"], two.state.modes["theta"])


@pytest.mark.parametrize(
    ("method", "settings", "text"),
    [
        ("best", {}, "needs method select"),
        ("tune", {"steps": 0}, "steps"),
        ("tune", {"lr": -1}, "lr > 0"),
        ("mix", {"prior": -1}, "prior >= 0"),
        ("head", {}, "head=\\['head"),
        ("select", {"head": ["1.*"]}, "take no such patterns"),
        ("head", {"head": "1.*"}, "list of patterns"),
        ("head", {"head": ["fc.*"]}, "head: no parameter matches 'fc"),
        ("tune", {"lr": 1e30, "steps": 9}, "client \\d+ diverged"),
        ("tune", {"momentum": 0.9}, "momentum"),
    ],
)
def test_errors(federation, method, settings, text):
    with pytest.raises(fe.FedEnsembleError, match=text):
        fe.personalize(federation, method, **settings)


def test_errors_of_predictions(federation):
    result = fe.personalize(federation)
    x = numbers(2, FEATURES)
    for client in ("nobody", 99, [0], [0.5, 1]):
        with pytest.raises(InputError, match="client"):
            result.predict(x, client)
    with pytest.raises(InputError, match="trains no model"):
        result.module(0)
    with pytest.raises(InputError, match="needs a Federation"):
        fe.personalize(federation.ensemble)
