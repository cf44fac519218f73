"""The report of `fedensemble reproduce theory`, from a few rounds, against its own parts."""

import numpy as np
import pytest
import torch

from fedensemble.config.build import build_data
from fedensemble.errors import DataError
from fedensemble.experiment.run import RunCallbacks
from fedensemble.experiment.storage.ensemble_file import read_ensemble
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.experiment.studies.paper_table import find_paper_table, read_reproduction
from fedensemble.experiment.studies.reproduce import reproduce
from fedensemble.report.figures.theory import theory
from fedensemble.report.theory.theory_posterior import posterior_study
from fedensemble.report.theory.theory_runs import WidthStudy, circle_grid, variance_study

COLUMNS = ("64", "256", "the same clients", "too few parameters", "anchored", "anchored network")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    settings = ["rounds=20", "engine.device=cpu"]
    reproduction = read_reproduction(find_paper_table("theory"), "smoke", settings)
    only = [f"/ {column}" for column in COLUMNS]
    root = tmp_path_factory.mktemp("runs")
    callbacks = lambda label, seed: RunCallbacks()  # noqa: E731
    results = reproduce(reproduction, root, callbacks, lambda: None, only)
    return reproduction, results, {result.cell.column: result for result in results}


def test_table_and_figures_show_what_was_trained(study):
    reproduction, results, _ = study
    report = theory(reproduction, results)
    names = {"error", "process", "variance", "drift", "posterior"}
    assert set(report.figures) == {f"{name}.png" for name in names}
    cases = " ".join(row[1] for row in report.table.rows)
    for case in ("width 64", "width 256", "the same clients", "too few parameters", "anchored"):
        assert case in cases
    assert "width 1024" not in cases and "weight decay" not in cases  # not trained
    few = theory(reproduction, [r for r in results if r.cell.column == "the same clients"])
    assert set(few.figures) == {"variance.png"}
    with pytest.raises(DataError, match="--only"):
        theory(reproduction, [])


def test_errors_start_before_training_and_end_at_the_modes_in_the_file(study):
    result = study[2]["256"]
    found = WidthStudy().evaluate(result)
    assert found.rounds == [0, 10, 20]
    config, folder = result.cell.configs[0], RunFolder(result.runs.folders[0])
    data = build_data(config)
    ensemble = read_ensemble(folder.modes_file, config, torch.device("cpu"))
    last = (ensemble.predict(data.x).modes - data.y.double()).square().mean((1, 2))
    assert found.error[0][-1] == pytest.approx(float(last.mean()))
    assert found.error[0][0] > 10 * found.error[0][-1]
    assert found.bound[0][0] == found.error[0][0] and (np.diff(found.bound[0]) < 0).all()
    assert np.mean(found.distance) < 0.1  # a wrong plan or rate would be of order 1
    assert len(found.distance) == len(found.scores) == config.ensemble.modes
    functions = ensemble.predict(circle_grid()[1]).modes[..., 0]
    assert np.allclose(found.functions[0], functions)


def test_variances_are_over_runs(study):
    found = variance_study(study[2]["the same clients"])
    assert found.sizes == [1, 2, 3, 4, 6, 12]
    assert found.variances[0] > found.variances[-1] > 0


def test_the_linear_posterior_is_that_of_the_features(study):
    result = study[2]["anchored"]
    found = posterior_study(result)
    data = build_data(result.cell.configs[0])
    centres = (
        read_ensemble(
            RunFolder(result.runs.folders[0]).modes_file,
            result.cell.configs[0],
            torch.device("cpu"),
        )
        .module(0)
        .centres.double()
    )
    phi, at = (
        torch.exp(-((x.double() - centres) ** 2) / (2 * 0.35**2))
        for x in (data.x, torch.from_numpy(found.place)[:, None])
    )
    covariance = torch.linalg.inv(phi.T @ phi / 0.5**2 + torch.eye(8).double())
    mean = at @ covariance @ phi.T @ data.y[:, 0].double() / 0.5**2
    assert torch.allclose(found.exact.mean, mean, atol=1e-6)
    assert torch.allclose(found.exact.covariance, at @ covariance @ at.T, atol=1e-6)
    assert found.other is None and posterior_study(study[2]["anchored network"]).other is not None
