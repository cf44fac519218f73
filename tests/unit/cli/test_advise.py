"""`fedensemble advise`: the pilot, the extrapolation, the sentences and the errors."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fedensemble.cli.commands.advise import caveats, explain
from fedensemble.cli.main import app
from fedensemble.config.schema import resolve
from fedensemble.experiment.studies.advise import (
    Advice,
    Candidate,
    expected_gain,
    pilot_rounds,
    plan_pilot,
)

CONFIG = {
    "rounds": 40,
    "data": {"clients": 12},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"clients_per_round": 6},
    "training": {"steps": 1, "batch_size": 8},
    "engine": {"device": "cpu"},
    "average": {"name": "snapshots", "count": 3},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(resolve(CONFIG).toml(empty=False))
    return path


def advise(file, *options):
    return CliRunner().invoke(app, ["advise", str(file), "--runs", str(file.parent), *options])


def test_a_pilot_on_a_config_prints_the_table_and_the_advice(file):
    result = advise(file, "--modes", "2,3", "--pilot", "6", "--seeds", "0")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "Pilot: 6 of 40 rounds, 1 seed, tested on a part of the training data" in text
    for start in ("| FedAvg | 240 | 6.0 |", "| K = 2 | 120 | 3.0 |", "| K = 3 | 80 | 2.0 |"):
        assert start in text
    assert "Advice: --set ensemble.modes=" in text
    assert "a pilot of 6 rounds is short (default: 20), and one seed does not show" in text
    # A second time, nothing is trained: the runs are found.
    assert "round 6/6" not in advise(file, "--modes", "2,3", "--pilot", "6", "--seeds", "0").output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--modes", "0"], "--modes takes numbers of modes of 2 and more"),
        (["--modes", "1,3"], "FedAvg (one mode) is always tried; got 1, 3."),
        (["--modes", "a"], "--modes takes integers separated by commas; got 'a'."),
        (["--modes", "7,9"], "none of 7, 9 modes can be trained with ensemble.clients_per_round"),
        (["--pilot", "1"], "must have 2 to 40 rounds"),
        (["--pilot", "41"], "must have 2 to 40 rounds"),
        (["--set", "algorithm=fedcross"], "'fedcross' predicts with a single model."),
        (["--set", "algorithm=fedbe"], "whose modes predict with one model"),
    ],
)
def test_mistakes(file, options, message):
    result = CliRunner().invoke(app, ["advise", str(file), *options])
    assert result.exit_code != 0
    assert message in " ".join(str(result.exception or result.output).split())


def test_the_pilot_compares_on_validation_data_with_the_same_average():
    comparison = plan_pilot(resolve(CONFIG), 10, (2, 3, 20))
    values = [config for row in comparison.rows for config in row.configs]
    assert [config.ensemble.modes for config in values] == [1, 1, 2, 2, 3, 3]
    assert {config.data["validation"] for config in values} == {0.1}
    assert {config.average["name"] for config in values} == {"ema"}
    assert {config.ensemble.schedule for config in values} == {"balanced"}


def test_the_extrapolation_is_the_least_squares_fit_to_the_second_half():
    rounds, random = np.arange(1.0, 11), np.random.default_rng(0)
    gains = 0.05 - 0.7 / rounds + 0.01 * random.normal(size=10)
    design = np.stack([np.ones(5), 1 / rounds[5:]], 1)
    (a, b), *_ = np.linalg.lstsq(design, gains[5:], rcond=None)
    assert expected_gain(rounds, gains, 200) == pytest.approx(a + b / 200, rel=1e-9)


def test_caveats_are_those_of_the_pilot():
    config = resolve({**CONFIG, "rounds": 500})
    assert pilot_rounds(config, None) == 50
    assert "care" not in caveats(config, 50, 2)[0]
    assert "short (default: 50)" in caveats(config, 20, 2)[0]
    assert "one seed" in caveats(config, 50, 1)[0]


def test_a_loss_of_the_average_is_not_praised():
    single = Candidate(1, 240, 6.0, 0.5)
    best = Candidate(3, 80, 2.0, 0.4, 0.1, 0.2, 0.01)
    lines = explain(resolve(CONFIG), Advice(3, "none", (single, best), -0.003, "nll"))
    assert lines[0].endswith("average.name=none") and "ensemble's NLL" in lines[1]
    assert lines[-1].endswith("made the NLL 0.003 higher.")
