"""Defaults that comparisons rest on: one weighting, compressors by their papers' names, bytes of a
prediction.
"""

from dataclasses import fields

import pytest
import torch
from torch import nn

from fedensemble import QSGD, Diana, Ensemble, FederatedData, Federation, InputError, algorithms
from fedensemble.algorithms.compressed.compressors import Dither
from fedensemble.config.schema import resolve
from fedensemble.config.toml import default_file, read_toml
from fedensemble.experiment.run import run
from fedensemble.models import models
from fedensemble.report.tables.result_table import run_table
from fedensemble.testing.toy_problems import labels, numbers


@pytest.mark.parametrize("name", list(algorithms))
def test_all_methods_weigh_clients_alike(name):
    defaults = {field.name: field.default for field in fields(algorithms[name])}
    assert defaults["weighting"] == "examples"


def test_compressors_have_the_names_of_their_papers():
    assert QSGD().codec == QSGD(compressor="terngrad", norm="2").codec == Dither(256, "inf", 1)
    assert QSGD(compressor="qsgd", levels=7).codec == Dither(256, "2", 7)
    assert Diana(compressor="qsgd", block=64).codec == Dither(64, "2", 4)
    with pytest.raises(
        InputError, match="'ternary', 'dither', 'terngrad', 'qsgd', 'rand-k' or 'top-k'; got 'sign'"
    ):
        QSGD(compressor="sign")


BASE = {
    "rounds": 1,
    "data": {"source": "gaussians", "n": 120, "classes": 3, "clients": 4, "partition": "iid"},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"modes": 2, "clients_per_round": 4},
    "engine": {"device": "cpu"},
}


def test_summaries_count_the_models_of_a_prediction(tmp_path):
    plain = run(resolve({**BASE, "algorithm": {"name": "fedavg"}}, "test"), tmp_path / "a")
    sampled = run(
        resolve({**BASE, "algorithm": {"name": "fedbe-nokd", "samples": 5}}, "test"), tmp_path / "b"
    )
    assert (plain["prediction_models"], sampled["prediction_models"]) == (2, 10)
    assert plain["prediction_bytes"] == 2 * 4 * plain["parameters"]
    assert sampled["prediction_bytes"] == 5 * plain["prediction_bytes"]
    rows = {row[0]: row[1] for row in run_table(sampled).rows}
    assert rows["prediction models"] == "10"
    older = {key: value for key, value in sampled.items() if not key.startswith("prediction")}
    assert "prediction models" not in {row[0] for row in run_table(older).rows}


def test_the_authors_way_of_testing_is_train_mode(tmp_path, monkeypatch):
    """Dropout active, and BatchNorm with the statistics of batches of 16; without BatchNorm,
    dropout alone.
    """

    def normed(shape, outputs):
        return nn.Sequential(
            nn.Linear(*shape, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, outputs)
        )

    monkeypatch.setitem(models._items, "normed", normed)
    asked, predict = [], Ensemble.predict

    def watched(self, x, **options):
        asked.append((options["batch_size"], options["dropout"], options["batch_statistics"]))
        return predict(self, x, **options)

    monkeypatch.setattr(Ensemble, "predict", watched)
    for name, way in (("normed", (16, True, True)), ("mlp", (1024, True, False))):
        values = {**BASE, "model": {"name": name}, "evaluation": {"dropout": True}}
        run(resolve(values, "test"), tmp_path / name)
        assert asked == [(1024, False, False), way]
        asked.clear()


def test_shakespeare_averages_logits_as_the_authors_code():
    folder = default_file("digits.toml").parent.parent / "papers" / "fed_ensemble" / "base"
    assert read_toml(folder / "shakespeare.toml")["ensemble"]["combine"] == "logits"
    assert "combine" not in read_toml(folder / "mnist.toml")["ensemble"]


def test_batch_size_does_not_change_dropout_without_batchnorm():
    data = FederatedData.from_arrays(numbers(12, 4), labels(12), [6, 6])
    made = Federation(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), data, modes=1
    )
    x = numbers(20, 4).float()
    first, second = (
        made.ensemble.predict(x, dropout=True, batch_statistics=flag).mean for flag in (False, True)
    )
    assert torch.equal(first, second)
