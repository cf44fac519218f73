"""Metrics of each client, and how they are distributed over clients."""

import json

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

import fedensemble as fe
from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data import load, partition
from fedensemble.errors import DataError, InputError
from fedensemble.experiment.run import run
from fedensemble.experiment.setup import fingerprint
from fedensemble.report.comparison_report import write_comparison
from fedensemble.report.html import write_page
from fedensemble.report.run_report import write_report

CLIENTS, CLASSES = 7, 4


def random_prediction(rows=200, *, shape=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, *shape, CLASSES, generator=generator)
    mean = (3 * logits).softmax(-1)
    target = torch.randint(CLASSES, (rows, *shape), generator=generator)
    owner = torch.randint(-1, CLIENTS - 1, (rows,), generator=generator)  # the last has no rows
    return fe.Prediction(mean, mean.unsqueeze(0)), target, owner


@pytest.mark.parametrize("shape", [(), (5,)])
def test_every_client_agrees_with_the_metrics_of_its_rows_alone(shape):
    prediction, target, owner = random_prediction(shape=shape)
    result = fe.evaluate_clients(prediction, target, owner, CLIENTS)
    for client in range(CLIENTS - 1):
        mine = owner == client
        alone = fe.evaluate(
            fe.Prediction(prediction.mean[mine], prediction.members[:, mine]), target[mine]
        )
        for name in ("accuracy", "nll", "ece"):
            assert float(result.values[name][client]) == pytest.approx(alone[name], abs=1e-6)
        assert int(result.rows[client]) == int(mine.sum())
    assert all(bool(values[-1].isnan()) for values in result.values.values())
    assert result.summary()["clients"] == CLIENTS - 1


def test_confidences_on_the_edge_of_a_bin_count_as_in_torchmetrics():
    confidence = torch.arange(8, 16, dtype=torch.double).float().div(15).double()
    mean = torch.stack([confidence, 1 - confidence], 1)
    target = torch.tensor([0, 1] * 4)
    result = fe.evaluate_clients(fe.Prediction(mean, mean[None]), target, [0] * 8)
    expected = multiclass_calibration_error(mean, target, num_classes=2, n_bins=15)
    assert float(result.values["ece"][0]) == pytest.approx(float(expected), abs=1e-6)


def test_regression():
    mean = torch.tensor([[1.0], [2.0], [5.0]])
    result = fe.evaluate_clients(
        fe.Prediction(mean, mean[None], "regression", "outputs"), [[0.0], [0.0], [5.0]], [1, 1, 0]
    )
    assert result.values["mse"].tolist() == [0.0, 2.5]
    assert result.summary()["mse_worst"] == 2.5


@pytest.mark.parametrize("clients", [1, 2, 9, 10, 11, 57])
def test_statistics_agree_with_numpy(clients):
    rng = np.random.default_rng(clients)
    accuracy, nll = rng.random(clients), rng.random(clients)
    rows = torch.ones(clients, dtype=torch.int64)
    values = {"accuracy": torch.from_numpy(accuracy), "nll": torch.from_numpy(nll)}
    found = fe.ClientMetrics(values, rows).summary()
    tenth = -(-clients // 10)
    expected = {
        "accuracy_mean": accuracy.mean(),
        "accuracy_std": accuracy.std(),
        "accuracy_p10": np.percentile(accuracy, 10),
        "accuracy_worst_10": np.sort(accuracy)[:tenth].mean(),
        "accuracy_worst": accuracy.min(),
        "nll_mean": nll.mean(),
        "nll_std": nll.std(),
        "nll_p10": np.percentile(nll, 90),
        "nll_worst_10": np.sort(nll)[-tenth:].mean(),
        "nll_worst": nll.max(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5)
    assert list(found) == ["clients", *expected]
    hidden = fe.ClientMetrics(values, rows).summary(publish=False)
    assert not {"accuracy_worst", "accuracy_p10"} & set(hidden)
    assert ("accuracy_worst_10" in hidden) == (tenth >= 5)


def test_without_rows_there_are_no_statistics():
    none = fe.ClientMetrics({"accuracy": torch.tensor([float("nan")])}, torch.tensor([0]))
    assert none.summary() == {"clients": 0}
    assert repr(none) == "ClientMetrics(0 clients)"


def test_mistakes():
    prediction, target, owner = random_prediction(20)
    with pytest.raises(InputError, match=r"takes what Ensemble\.predict returns"):
        fe.evaluate_clients(prediction.mean, target, owner)
    with pytest.raises(DataError, match="of 20 test rows"):
        fe.evaluate_clients(prediction, target, owner[:5])
    with pytest.raises(InputError, match="there are 2 clients"):
        fe.evaluate_clients(prediction, target, owner, 2)


def test_new_clients_are_not_trained_on():
    whole = partition(load("digits"), "dirichlet", clients=20, seed=1)
    data = whole.with_new_clients(0.2, seed=1)
    new = data.new_clients
    assert (len(data), len(new)) == (16, 4)
    assert torch.equal(data.x_test, whole.x_test)
    assert len(new.x_test) == int((data.test_owner < 0).sum())
    assert int(data.size.sum() + new.size.sum()) == len(whole.x)
    order = [
        next(i for i in range(20) if torch.equal(whole.client(i)[0], part.client(k)[0]))
        for part in (data, new)
        for k in range(len(part))
    ]
    assert sorted(order) == list(range(20))
    for k, original in enumerate(order[16:]):  # tests of a new client are its own
        assert torch.equal(
            new.x_test[new.test_owner == k], whole.x_test[whole.test_owner == original]
        )
    # The order of the two splits makes no difference.
    first, second = data.with_calibration(0.2, seed=1), whole.with_calibration(0.2, seed=1)
    second = second.with_new_clients(0.2, seed=1)
    assert fingerprint(first) == fingerprint(second)
    assert torch.equal(first.new_clients.calibration.x, second.new_clients.calibration.x)
    assert fingerprint(first) != fingerprint(data)
    table = {"source": "digits", "partition": "dirichlet", "clients": 20, "seed": 1}
    config = resolve({"data": {**table, "new_clients": 0.2, "calibration": 0.2}})
    assert fingerprint(build_data(config)) == fingerprint(first)
    assert fingerprint(build_data(resolve({"data": dict(first.recipe)}))) == fingerprint(first)


def test_shares_of_new_clients_that_cannot_be():
    data = fe.FederatedData.from_clients([([[0.0]], [0]), ([[1.0]], [1])])
    assert data.with_new_clients(0.01).new_clients.x_test is None  # at least one; no test rows
    with pytest.raises(InputError, match="leaves none"):
        data.with_new_clients(0.9)
    with pytest.raises(InputError, match="above 0"):
        data.with_new_clients(0)
    with pytest.raises(InputError, match="already"):
        fe.FederatedData.from_arrays(torch.zeros(4, 1), [0, 1, 0, 1], [1] * 4).with_new_clients(
            0.3
        ).with_new_clients(0.3)


def settings(**report):
    return {
        "rounds": 4,
        "data": {"source": "digits", "partition": "dirichlet", "clients": 20, "new_clients": 0.1},
        "model": {"name": "mlp", "hidden": [8]},
        "ensemble": {"modes": 2, "clients_per_round": 6},
        "evaluation": {"every": 2},
        "report": report,
    }


def test_runs_record_and_report_the_clients(tmp_path):
    config = resolve(settings())
    summary = run(config, tmp_path / "a")
    records = [
        json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert ["test_clients" in record for record in records] == [False, True, False, True]
    found = summary["test_clients"]
    assert found == records[-1]["test_clients"]
    assert summary["test_new_clients"]["clients"] == 2
    federation = fe.Federation.load(tmp_path / "a")
    assert federation.evaluate_clients().summary() == found
    assert federation.evaluate_clients(new=True).summary() == summary["test_new_clients"]
    federation.evaluate()
    assert federation.history.records[-1]["test_clients"] == found
    write_report(tmp_path / "a")
    report = (tmp_path / "a/report.md").read_text()
    assert "## Clients" in report
    assert f"| accuracy % | {100 * found['accuracy_mean']:.2f} |" in report
    assert "| NLL, new clients |" in report
    assert "NLL, new clients" in write_page(tmp_path / "a").read_text()


def test_values_of_single_clients_can_stay_unpublished(tmp_path):
    summary = run(resolve(settings(publish_clients=False)), tmp_path / "a")
    assert set(summary["test_clients"]) == {
        "clients",
        *(f"{name}_{s}" for name in ("accuracy", "nll", "ece") for s in ("mean", "std")),
    }
    assert "| – |" in (write_report(tmp_path / "a"), (tmp_path / "a/report.md").read_text())[1]


def test_comparisons_have_a_table_of_clients(tmp_path):
    from fedensemble.experiment.run import RunCallbacks
    from fedensemble.experiment.studies.compare import compare, make_comparison

    rows = [(f"K = {k}", {"ensemble": {"modes": k}}) for k in (1, 2)]
    comparison = make_comparison("c", {**settings(), "name": "c"}, rows, [0, 1], "accuracy")
    results = compare(comparison, tmp_path, lambda label, seed: RunCallbacks(), lambda: None)
    folder = comparison.folder(tmp_path)
    table = write_comparison(folder, comparison, results, tmp_path)
    text = (folder / "clients.csv").read_text().splitlines()
    assert "worst tenth, mean" in text[0] and "new clients" in text[0]
    assert len(text) == 3
    page = write_page(folder).read_text()
    assert "worst tenth, mean" in page
    assert all(title in page for title in table.header)


def test_federations_without_owners_say_what_to_do():
    data = fe.FederatedData.from_clients([([[0.0]], [0]), ([[1.0]], [1])])
    federation = fe.Federation({"name": "mlp", "hidden": [4]}, data, modes=1)
    with pytest.raises(InputError, match=r"belong to no client: use partition\(\)"):
        federation.evaluate_clients()
    with pytest.raises(InputError, match=r"with_new_clients"):
        federation.evaluate_clients(new=True)
