"""`[aggregator]` and `[attack]` in a config: defaults, hashes, errors, notes, lists."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedensemble.cli.main import app
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.config.toml import merge
from fedensemble.deploy.generate import write_app
from fedensemble.errors import InputError
from fedensemble.experiment.records import run_notes
from fedensemble.robust import ALIE, Krum, Mean, TrimmedMean, aggregators

BASE = {
    "rounds": 2,
    "data": {"source": "gaussians", "n": 60, "n_test": 20, "clients": 12},
    "model": {"name": "mlp", "hidden": [3]},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 8, "schedule": "stratified"},
}


def federation(**tables):
    config = resolve(merge(BASE, tables))
    return build_federation(config, build_data(config))


def test_without_the_tables_a_config_is_what_it_was():
    values = resolve(BASE).values()
    assert "aggregator" not in values and "attack" not in values
    assert resolve({**BASE, "engine": {"device": "cpu"}}).hash() == "80ee5f240e12"
    made = federation()
    assert (made.aggregator, made.attack) == (Mean(), None)


def test_tables_are_filled_and_built():
    config = resolve(
        {**BASE, "aggregator": {"name": "trimmed-mean", "trim": 0.3}, "attack": {"name": "alie"}}
    )
    assert config.aggregator == {"name": "trimmed-mean", "trim": 0.3}
    assert config.attack == {"name": "alie", "share": 0.1, "z": None}
    made = federation(
        aggregator={"name": "trimmed-mean", "trim": 0.3}, attack={"name": "alie", "share": 0.25}
    )
    assert (made.aggregator, made.attack) == (TrimmedMean(trim=0.3), ALIE(share=0.25))
    assert int(made.malicious.sum()) == 3
    assert config.hash() != resolve(BASE).hash()


def test_another_rule_drops_stale_options():
    under = {
        **BASE,
        "aggregator": {"name": "trimmed-mean", "trim": 0.3},
        "attack": {"name": "noise", "share": 0.25},
    }
    over = resolve(merge(under, {"aggregator": {"name": "krum"}, "attack": {"name": "ipm"}}))
    assert over.aggregator == {"name": "krum", "malicious": Krum().malicious}
    assert over.attack == {"name": "ipm", "share": 0.25, "epsilon": 2.0}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"aggregator": {"name": "medain"}},
            "aggregator.name: unknown aggregator 'medain': did you mean 'median'",
        ),
        (
            {"aggregator": {"name": "trimmed-mean", "trim": 0.7}},
            "aggregator: TrimmedMean needs 0 <= trim < 0.5",
        ),
        ({"aggregator": {"name": "krum", "trim": 0.2}}, "aggregator.trim"),
        ({"aggregator": {"name": "krum", "malicious": "many"}}, "aggregator.malicious"),
        (
            {"aggregator": {"name": "median"}, "algorithm": {"name": "scaffold"}},
            "'median' cannot be used with algorithm 'scaffold'",
        ),
        (
            {"aggregator": {"name": "median"}, "algorithm": {"name": "qsgd"}},
            "Use 'geometric-median'",
        ),
        ({"attack": {"name": "alie", "share": 2.0}}, "attack: ALIE needs 0 <= share <= 1"),
        ({"attack": {"name": "sign", "share": 0.1}}, "attack.name: unknown attack 'sign'"),
    ],
)
def test_problems_are_named(tables, message):
    with pytest.raises(InputError, match="1 problem") as error:
        resolve({**BASE, **tables})
    assert message in str(error.value)


def test_notes_on_the_attack_and_on_small_modes():
    notes = " ".join(run_notes(federation(attack={"name": "alie", "share": 0.25})))
    assert "Simulated attack 'alie': 3 of 12 clients are malicious." in notes
    notes = " ".join(run_notes(federation(aggregator={"name": "krum"}, ensemble={"modes": 4})))
    assert "About 2 clients train a mode per round" in notes
    assert not run_notes(federation(aggregator={"name": "krum"}))


def test_a_fleet_takes_no_attack(tmp_path):
    config = resolve({**BASE, "attack": {"name": "ipm"}})
    with pytest.raises(InputError, match="'ipm' is for simulation only"):
        write_app(config, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_the_rule_of_the_page_trains(monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "how-to-robust.md").read_text(encoding="utf-8")
    example = re.findall(r"^```python\n(from dataclasses.*?)^```$", page, re.DOTALL | re.MULTILINE)[
        0
    ]
    # registered for this test only
    monkeypatch.setattr(aggregators, "_items", {name: aggregators[name] for name in aggregators})
    exec(example, {"__name__": "page"})
    made = federation(aggregator={"name": "first-half"})
    before = made.state.modes["theta"]
    list(made.rounds(1))
    assert not torch.equal(made.state.modes["theta"], before)


def test_lists_name_them():
    for what, name in (("aggregators", "centered-clipping"), ("attacks", "label-flip")):
        done = CliRunner().invoke(app, ["ls", what, "--json"])
        assert done.exit_code == 0 and name in [entry["name"] for entry in json.loads(done.output)]
