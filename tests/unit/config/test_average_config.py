"""`[average]` and cycles of the learning rate in a config: defaults, short form, errors, lists."""

import json

import pytest
from torch import nn
from typer.testing import CliRunner

from fedensemble import EMA, FedAvg, Federation, InputError, Snapshots, averages
from fedensemble.cli.main import app
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.config.toml import merge, with_settings
from fedensemble.core.average import NO_AVERAGE
from fedensemble.experiment.studies.run_groups import batch_key
from fedensemble.testing.toy_problems import classification, small_model

BASE = {
    "rounds": 2,
    "data": {"source": "gaussians", "n": 60, "n_test": 20, "clients": 12},
    "model": {"name": "mlp", "hidden": [3]},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 8, "schedule": "stratified"},
}


def federation(**tables):
    config = resolve(merge(BASE, tables))
    return build_federation(config, build_data(config))


def test_without_the_table_a_config_is_what_it_was():
    values = resolve(BASE).values()
    assert "average" not in values and "lr_cycle" not in values["algorithm"]
    assert resolve({**BASE, "engine": {"device": "cpu"}}).hash() == "80ee5f240e12"
    made = federation()
    assert made.average is NO_AVERAGE and made.last_ensemble is None


def test_the_table_and_its_short_form():
    short, table = (
        resolve({**BASE, "average": value}) for value in ("snapshots", {"name": "snapshots"})
    )
    assert short.average == {"name": "snapshots", "every": 1, "start": 0, "count": 5}
    assert short.hash() == table.hash() != resolve(BASE).hash()
    assert resolve(with_settings(BASE, ["average=ema"])).average == {"name": "ema", "decay": 0.9}
    made = federation(average="ema")
    assert made.average == EMA() and made.last_ensemble is not None
    over = resolve(merge({**BASE, "average": {"name": "ema", "decay": 0.5}}, {"average": "swa"}))
    assert over.average == {"name": "swa", "every": 1, "start": 50}
    kept = resolve(merge({**BASE, "average": "ema"}, {"average": {"decay": 0.5}}))
    assert kept.average == {"name": "ema", "decay": 0.5}
    assert resolve({**BASE, "average": {}}).average == {"name": "ema", "decay": 0.9}


def test_cycles_are_passed_on():
    table = {"name": "fedavg", "lr": 0.1, "lr_cycle": 4, "lr_cycle_end": 0.5}
    made = federation(algorithm=table)
    assert made.algorithm == FedAvg(lr=0.1, lr_cycle=4, lr_cycle_end=0.5)
    # Runs that differ in their rates train in one batch.
    assert batch_key(made) == batch_key(federation(algorithm={"name": "fedavg", "lr": 0.2}))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"average": "emma"}, "average.name: unknown average 'emma': did you mean 'ema'"),
        ({"average": {"name": "ema", "decay": 1.0}}, "average: EMA needs 0 <= decay < 1"),
        ({"average": {"name": "swa", "decay": 0.5}}, "average.decay: "),
        ({"average": {"name": "swa", "every": 0}}, "average: SWA needs every >= 1"),
        ({"average": {"name": "snapshots", "count": 0}}, "Snapshots needs count from 1"),
        ({"average": {"name": "swag", "rank": 1}}, "SWAG needs rank 0 or from 2"),
        ({"average": {"name": "swag", "samples": 0}}, "SWAG needs samples from 1"),
        ({"average": {"name": "swag", "scale": -1.0}}, "SWAG needs scale >= 0"),
        ({"average": 3}, "average: "),
        (
            {"average": "ema", "algorithm": {"name": "fedbe-nokd"}},
            "average: Average 'ema' cannot be used with algorithm 'fedbe-nokd'",
        ),
        ({"algorithm": {"name": "fedavg", "lr_cycle": 1}}, "FedAvg needs lr_cycle >= 2, or 0"),
        (
            {"algorithm": {"name": "fedavg", "lr_cycle_end": 0.5}},
            "FedAvg needs 0 < lr_cycle_end <= 1, and lr_cycle with it",
        ),
    ],
)
def test_problems_are_named(tables, message):
    with pytest.raises(InputError, match="1 problem") as error:
        resolve({**BASE, **tables})
    assert message in str(error.value)


def test_arguments_in_python():
    def make(average, algorithm="fedavg"):
        return Federation(small_model, classification(), algorithm, modes=2, average=average)

    assert make({"name": "snapshots", "count": 2}).average == Snapshots(count=2)
    with pytest.raises(InputError, match=r"average must be one such as EMA.*class EMA; write EMA"):
        make(EMA)
    with pytest.raises(InputError, match="predicts with models of its own"):
        make("swa", "fedbe-nokd")
    assert make("none", "fedbe-nokd").last_ensemble is None


def test_a_state_that_is_too_large_is_refused_before_it_is_made():
    with pytest.raises(InputError, match=r"average Snapshots\(.*count=10000\) of 2 modes takes"):
        Federation(
            lambda: nn.Linear(4, 1_000_000),
            classification(),
            modes=2,
            average=Snapshots(count=10_000),
        )


def test_lists_name_them():
    done = CliRunner().invoke(app, ["ls", "averages", "--json"])
    assert done.exit_code == 0
    assert [entry["name"] for entry in json.loads(done.output)] == list(averages)
    assert list(averages) == ["ema", "none", "snapshots", "swa", "swag"]
