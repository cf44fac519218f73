"""What predictions.json says of sets, inputs out of distribution and unsure examples, and its page."""

import base64
import io
import json

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import fedensemble as fe
from fedensemble.config.schema import resolve
from fedensemble.data import load, partition
from fedensemble.experiment.run import run
from fedensemble.experiment.storage.ensemble_file import load_ensemble
from fedensemble.experiment.uncertainty_summary import (
    describe_sets,
    describe_unsure,
    load_ood,
    shows_inputs,
)
from fedensemble.prediction import Prediction
from fedensemble.report.html import write_page
from fedensemble.uncertainty import Calibration, CalibrationSettings


def config(**changes):
    values = {
        "rounds": 3,
        "data": {
            "source": "digits",
            "partition": "dirichlet",
            "alpha": 0.5,
            "clients": 6,
            "calibration": 0.3,
        },
        "model": {"name": "mlp", "hidden": [4]},
        "ensemble": {"modes": 2, "clients_per_round": 6},
        "calibration": {"alpha": 0.2},
        "evaluation": {"ood": {"fake": {"source": "stand-in-images"}}},
        "engine": {"device": "cpu"},
    }
    return resolve({**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("summary") / "run"
    run(config(), path)
    return path


def calibrated(mean, threshold, **options):
    settings = CalibrationSettings(alpha=0.2, method="lac", **options)
    made = Calibration(settings, mean.shape[1], 1, 10, 2, thresholds=(threshold,))
    return Prediction(mean, mean.unsqueeze(0), calibration=made)


def test_coverage_of_clients_by_hand():
    mean = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8], [0.6, 0.4]])
    prediction, targets = calibrated(mean, 0.55), torch.tensor([0, 1, 0, 0])
    # sets: {0}, {0, 1}, {1}, {0}
    found = describe_sets(prediction, targets, torch.tensor([0, 0, 2, -1]), ["a", "b", "c"])
    assert found["sizes"] == [0, 3, 1] and found["level"] == 0.8
    assert found["clients"] == {
        "count": 2,
        "names": ["c", "a"],
        "rows": [1, 2],
        "coverage": [0.0, 1.0],
        "size": [1.0, 1.5],
    }
    assert found["worst_tenth"] == 0.0
    hidden = describe_sets(prediction, targets, torch.tensor([0, 0, 2, -1]), None, publish=False)
    assert "clients" not in hidden and "worst_tenth" not in hidden
    assert describe_sets(Prediction(mean, mean.unsqueeze(0)), targets) == {}


def test_many_clients_are_shown_from_the_worst_to_the_best():
    mean = torch.tensor([[0.9, 0.1]]).repeat(1000, 1)
    targets = (torch.arange(1000) < 100).long()  # the rows of the first 100 clients are missed
    found = describe_sets(calibrated(mean, 0.5), targets, torch.arange(1000))
    clients = found["clients"]
    assert (clients["count"], len(clients["names"])) == (1000, 200)
    assert clients["coverage"] == sorted(clients["coverage"]) and found["worst_tenth"] == 0.0


def test_a_run_records_what_its_page_shows(folder):
    content = json.loads((folder / "predictions.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())["calibration"]
    clients = content["sets"]["clients"]
    rows, coverage = np.array(clients["rows"]), np.array(clients["coverage"])
    test = summary["test"]
    assert (rows * coverage).sum() / rows.sum() == pytest.approx(test["set_coverage"], abs=1e-3)
    assert content["sets"]["worst_tenth"] == pytest.approx(
        summary["test_clients"]["set_coverage_worst_10"], rel=1e-4
    )
    scores = content["ood"]["fake"]["scores"]
    ensemble, data = load_ensemble(folder), load("digits")
    known = ensemble.predict(data.x_test)
    other = load_ood(config().evaluation.ood, partition(data, "iid", clients=2, seed=0))["fake"]
    assert other.shape == (200, 1, 8, 8)
    new = ensemble.predict(other)
    for score, values in scores.items():
        assert values["auroc"] == pytest.approx(fe.ood_metrics(known, new)[score]["auroc"])
        uncertainty = known.uncertainty(score).double()
        counts, _ = np.histogram(uncertainty, 30, (values["low"], values["high"]))
        assert np.abs(np.array(values["known"]) - counts).sum() <= 2  # edges may round
        assert sum(values["other"]) == 200
    page = write_page(folder).read_text()
    for text in ("Prediction sets", "Inputs out of distribution", "Most uncertain examples"):
        assert f"<h2>{text}</h2>" in page
    assert "In the worst tenth of the clients" in page and page.count("data:image/png") == 12
    assert 'id="chart-client-coverage"' in page or "Coverage of each client" in page


def test_the_most_uncertain_images(folder):
    examples = json.loads((folder / "predictions.json").read_text())["unsure"]
    data, prediction = load("digits"), load_ensemble(folder).predict(load("digits").x_test)
    order = prediction.entropy.argsort(descending=True, stable=True)[:12].tolist()
    for row, example in zip(order, examples, strict=True):
        assert example["target"] == str(int(data.y_test[row]))
        assert example["entropy"] == pytest.approx(float(prediction.entropy[row]), rel=1e-3)
        assert example["set"] == prediction.set_names[row]
        image = imread(io.BytesIO(base64.b64decode(example["png"])))[..., 0]
        largest = float(data.x_test.max())
        np.testing.assert_allclose(image, data.x_test[row, 0] / largest, atol=1 / 255)


def test_which_inputs_have_pictures():
    mean = torch.full((3, 2), 0.5)
    prediction, targets = Prediction(mean, mean.unsqueeze(0)), torch.zeros(3, dtype=torch.int64)
    color = torch.randint(256, (3, 3, 8, 8), dtype=torch.uint8)
    found = describe_unsure(prediction, targets, color)
    image = imread(io.BytesIO(base64.b64decode(found[0]["png"])))
    np.testing.assert_allclose(image[..., :3], color[0].permute(1, 2, 0) / 255, atol=1e-6)
    for shape in ((3, 4), (3, 2, 8, 8), (3, 1, 2, 8), (3, 1, 8, 900)):
        assert describe_unsure(prediction, targets, torch.zeros(shape)) == []


def test_pictures_of_own_data_are_not_published():
    data = partition(load("digits"), "iid", clients=2, seed=0)
    own = fe.FederatedData.from_clients([data.client(0), data.client(1)])
    assert shows_inputs(None, data) and shows_inputs(True, own)
    assert not shows_inputs(None, own) and not shows_inputs(False, data)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"x": {"source": "digit"}}, "digit"),
        ({"x": {"source": "gaussians"}}, "Only images in bytes can be given another shape"),
        ({"x": {}}, "dataset"),
    ],
)
def test_data_out_of_distribution_that_do_not_fit_train_nothing(table, says, tmp_path):
    with pytest.raises(fe.FedEnsembleError, match=says):
        run(config(evaluation={"ood": table}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
