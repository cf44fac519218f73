"""From a config to an app to a run folder, with clients in this process."""

import copy
import json
import logging
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

import fedensemble
import fedensemble as fe
from fedensemble.cli.exit_codes import BAD_INPUT
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.data import FederatedData, Standardise
from fedensemble.data.schema import Schema
from fedensemble.deploy import app as app_module
from fedensemble.deploy import example_client, load_file
from fedensemble.deploy import server as fleet_module
from fedensemble.deploy.app import build_client, client_app, server_app
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.server import run_fleet
from fedensemble.deploy.server_settings import Settings
from fedensemble.engines.flower.messages import build_query_message, read_problem
from fedensemble.errors import FedEnsembleError, InputError, StoreError
from fedensemble.experiment.records import environment
from fedensemble.experiment.storage.ensemble_file import load_ensemble, read_ensemble
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.models import models
from fedensemble.report.html.page import run_page
from fedensemble.report.run_report import write_report
from fedensemble.report.tables.run_row import run_record

from .fake import FakeGrid, Node, Time

VALUES = {
    "name": "My fleet".replace(" ", "-"),
    "rounds": 4,
    "data": {"source": "digits", "clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "scaffold"},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 3},
    "engine": {"name": "loop", "device": "cpu", "dtype": "float64"},
}


@pytest.fixture
def config():
    return resolve(VALUES)


@pytest.fixture
def app(config, tmp_path):
    write_app(config, tmp_path / "app")
    return tmp_path / "app"


class Here:
    """What a client app is told of its node."""

    def __init__(self, **node):
        self.node_config = node


def grid_of(app):
    folder = app / "fleet"
    nodes = {}
    for number in range(3):
        client = build_client(
            folder, lambda node: example_client(folder, node), Here(**{"partition-id": number})
        )
        nodes[number + 10] = Node(client, number, delay=0.0)
    return FakeGrid(nodes, Time())


def settings(tmp_path, **more):
    """Settings of a small fleet that computes what the simulator computes, whatever the plan."""
    exact = {"min-cohort": 1, "clip-factor": 0.0, "refuse-factor": 0.0}
    return {
        "run-dir": str(tmp_path / "run"),
        "clients": 3,
        "poll": 0.01,
        "timeout": 5.0,
        "identity": "partition",
        **exact,
        **more,
    }


def assert_predicts_as_simulated(config, run):
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(run / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)
    x = build_data(config).x_test[:20]
    torch.testing.assert_close(ensemble.predict(x).mean, federation.ensemble.predict(x).mean)


def test_the_app_is_one_that_flower_takes(app, config, monkeypatch):
    from flwr.cli.config_utils import load_and_validate

    # the example's, if another test has loaded it
    monkeypatch.delitem(sys.modules, "fleet", raising=False)
    table = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert table["components"] == {
        "serverapp": "fleet.server_app:app",
        "clientapp": "fleet.client_app:app",
    }
    assert set(table["config"]) == {
        name.replace("_", "-") for name in Settings.__dataclass_fields__
    }
    assert Settings.read(table["config"]) == Settings(clients=3)
    load_and_validate(app / "pyproject.toml")
    spec = read_app_spec(app / "fleet")
    assert spec.config.model == config.model and spec.config.training == config.training
    assert spec.schema == Schema.from_data(build_data(config)) and spec.shape == (1, 8, 8)
    assert spec.config.data["source"] == "schema" and spec.config.data["clients"] == 3
    compile((app / "fleet" / "data.py").read_text(), "data.py", "exec")
    text = (app / "README.md").read_text()
    assert (
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1" in text
        and "seq 0 2" in text
        and "$$" not in text
    )


def test_an_app_is_never_overwritten(app, config):
    (app / "fleet" / "data.py").write_text("mine")
    with pytest.raises(StoreError, match=r"data\.py may be yours"):
        write_app(config, app)
    assert (app / "fleet" / "data.py").read_text() == "mine"


def test_both_halves_are_made_without_reading_anything(tmp_path):
    assert server_app(tmp_path) and client_app(tmp_path, lambda node: (None, None))


def test_a_fleet_aggregates_as_its_config_says(tmp_path):
    config = resolve(
        {
            **VALUES,
            "algorithm": {"name": "fedavg"},
            "aggregator": {"name": "median"},
            "ensemble": {"modes": 1, "strata": 1, "clients_per_round": 3},
        }
    )
    write_app(config, tmp_path / "app")
    run_fleet(
        grid_of(tmp_path / "app"), read_app_spec(tmp_path / "app" / "fleet"), settings(tmp_path)
    )
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(tmp_path / "run" / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)


def test_a_fleet_shares_parameters_as_its_config_says(tmp_path, monkeypatch):
    shared = {"modes": 2, "strata": 2, "clients_per_round": 2, "shared": ["layers.1.*"]}
    config = resolve({**VALUES, "algorithm": {"name": "fedavgm"}, "ensemble": shared})
    write_app(config, tmp_path / "app")
    app, train = tmp_path / "app", fleet_module.Fleet.train_one_round

    def stop_after_two_rounds(fleet):
        if fleet.state.round == 2:
            raise KeyboardInterrupt
        train(fleet)

    monkeypatch.setattr(fleet_module.Fleet, "train_one_round", stop_after_two_rounds)
    with pytest.raises(KeyboardInterrupt):
        run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    monkeypatch.undo()
    run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(tmp_path / "run" / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)
    first, second = (ensemble.module(mode).state_dict() for mode in range(2))
    assert {name for name in first if torch.equal(first[name], second[name])} == {
        "layers.1.weight",
        "layers.1.bias",
    }
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["prediction_bytes"] == federation.ensemble.prediction_bytes


def test_a_fleet_continues_with_frozen_parameters_and_only_with_these(tmp_path, monkeypatch):
    body = torch.nn.Linear(64, 5)

    class Tuned(torch.nn.Module):
        def __init__(self, shape, outputs):
            super().__init__()
            self.head = torch.nn.Linear(5, outputs)
            self.body = copy.deepcopy(body).requires_grad_(False)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.flatten(1))))

    monkeypatch.setattr(models, "_items", {**models._items, "tuned": Tuned})
    config = resolve({**VALUES, "algorithm": {"name": "fedavg"}, "model": {"name": "tuned"}})
    app, train = tmp_path / "app", fleet_module.Fleet.train_one_round
    write_app(config, app)

    def stop_after_two_rounds(fleet):
        if fleet.state.round == 2:
            raise KeyboardInterrupt
        train(fleet)

    with monkeypatch.context() as patch:
        patch.setattr(fleet_module.Fleet, "train_one_round", stop_after_two_rounds)
        with pytest.raises(KeyboardInterrupt):
            run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    bias = body.bias.detach().clone()
    body.bias.data += 1
    with pytest.raises(StoreError, match="written with other frozen parameters"):
        run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    body.bias.data.copy_(bias)
    run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    assert_predicts_as_simulated(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    sent = 8 * (5 * 10 + 10)  # of each visit: the head in float64
    assert summary["bytes_up"] == summary["bytes_down"] == 4 * 3 * sent


@pytest.mark.parametrize("alternate", [False, True])
def test_a_fleet_keeps_personal_parts_as_its_config_says(alternate, tmp_path):
    """Also if server and clients are stopped after two rounds and started again."""
    table = {**VALUES["ensemble"], "personal": ["layers.1.*"], "alternate": alternate}
    config = resolve({**VALUES, "algorithm": {"name": "fedavg"}, "ensemble": table})
    write_app(config, tmp_path / "app")
    spec, store = read_app_spec(tmp_path / "app" / "fleet"), RunFolder(tmp_path / "run")

    def grid():
        made = grid_of(tmp_path / "app")
        for number, node in made.nodes.items():
            node.config = {"memory-dir": str(tmp_path / f"node-{number}")}
        return made

    store.claim(spec.config)
    fleet = fleet_module.Fleet(grid(), spec, Settings.read(settings(tmp_path)), store)
    fleet.train_one_round()
    fleet.train_one_round()
    store.release()
    run_fleet(grid(), spec, settings(tmp_path))
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(tmp_path / "run" / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    records = federation.history.records
    assert summary["bytes_up"] == sum(record["bytes_up"] for record in records)


@pytest.mark.parametrize(
    "average", [{"name": "snapshots", "count": 2}, {"name": "swag", "start": 1, "samples": 3}]
)
def test_a_fleet_averages_as_its_config_says(average, tmp_path):
    """Also if the server is stopped after two rounds and started again."""
    config = resolve({**VALUES, "algorithm": {"name": "fedavg"}, "average": average})
    federation = build_federation(config, build_data(config))
    x, y = federation.data.x_test[:40], federation.data.y_test[:40]
    np.savez(tmp_path / "test.npz", x=x.numpy(), y=y.numpy())
    write_app(config, tmp_path / "app")
    spec, options = read_app_spec(tmp_path / "app" / "fleet"), settings(tmp_path)
    options["test-file"] = str(tmp_path / "test.npz")
    store = RunFolder(tmp_path / "run")
    store.claim(spec.config)
    fleet = fleet_module.Fleet(grid_of(tmp_path / "app"), spec, Settings.read(options), store)
    fleet.train_one_round()
    fleet.train_one_round()
    store.release()
    run_fleet(grid_of(tmp_path / "app"), spec, options)
    list(federation.rounds(4))
    expected = federation.ensemble
    ensemble = read_ensemble(store.modes_file, config, torch.device("cpu"))
    assert ensemble.prediction_models == expected.prediction_models > 2
    torch.testing.assert_close(ensemble.predictors, expected.predictors, rtol=0, atol=1e-12)
    summary = store.summary()
    for key, predicting in (("test", expected), ("test_last", federation.last_ensemble)):
        metrics = fe.evaluate(predicting.predict(x), y)
        assert summary[key] == pytest.approx(metrics, abs=1e-9)


def test_a_fleet_leaves_a_run_like_a_simulated_one(app, config, tmp_path):
    run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    assert_predicts_as_simulated(config, tmp_path / "run")
    assert "2 modes, 4 rounds" in write_report(tmp_path / "run").title
    # finished: asks nobody
    run_fleet(FakeGrid({}, Time()), read_app_spec(app / "fleet"), settings(tmp_path))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_server_killed_at_any_point_of_a_round_goes_on(app, config, tmp_path, at, monkeypatch):
    """It dies while it waits for answers, or before the round is on disk; clients have trained in
    either case.
    """
    from fedensemble.experiment.storage.run_folder import RunFolder

    grid, plain = grid_of(app), RunFolder.save

    def save(store, tensors, round, facts):
        if round == at + 1:
            raise KeyboardInterrupt
        plain(store, tensors, round, facts)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", save)
        with pytest.raises(KeyboardInterrupt):
            run_fleet(grid, read_app_spec(app / "fleet"), settings(tmp_path))
    run_fleet(grid, read_app_spec(app / "fleet"), settings(tmp_path))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["round"] for line in lines] == [1, 2, 3, 4] and not any(
        "forgot" in line["fleet"] for line in lines
    )
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(tmp_path / "run" / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)


def test_methods_whose_server_needs_data_say_so(tmp_path):
    config = resolve({**VALUES, "algorithm": {"name": "fedbe"}})
    write_app(config, tmp_path / "app")
    with pytest.raises(InputError, match="server"):
        run_fleet(
            grid_of(tmp_path / "app"),
            read_app_spec(tmp_path / "app" / "fleet"),
            settings(tmp_path),
        )


def test_clients_know_the_models_layers(tmp_path):
    """A client of FedMA must know which weights are frozen, which follows from the model's
    structure.
    """
    values = {"data": {"source": "digits", "clients": 4}, "algorithm": {"name": "fedma"}}
    write_app(
        resolve({**values, "ensemble": {"modes": 1, "clients_per_round": 2}}), tmp_path / "app"
    )
    folder = tmp_path / "app" / "fleet"
    client = build_client(
        folder, lambda node: example_client(folder, node), Here(**{"partition-id": 0})
    )
    assert client.algorithm.structure is not None


def test_over_selection_in_the_config_is_kept_by_the_fleet(tmp_path):
    ensemble = {"modes": 2, "strata": 2, "clients_per_round": 2}
    config = resolve(
        {**VALUES, "ensemble": ensemble, "participation": {"name": "devices", "ask": 3}}
    )
    write_app(config, tmp_path / "app")
    run_fleet(
        grid_of(tmp_path / "app"), read_app_spec(tmp_path / "app" / "fleet"), settings(tmp_path)
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(line["visits"], line["fleet"]["asked"]) for line in lines] == [(2, 3)] * 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"time-out": 3}, "did you mean 'timeout'"),
        ({"timeout": "long"}, "such as 300.0"),
        ({"clients": 2.5}, "such as 2"),
        ({"clients": True}, "such as 2"),
        ({"identity": "face"}, "one of auto"),
        ({"clip": -1.0}, "must be positive"),
        ({"clip-factor": -1.0}, "must be positive"),
        ({"suspend-after": -1}, "must be positive"),
        ({"min-cohort": 0}, "at least 1"),
        ({"max-weight": 0.5}, "at least 1"),
        ({"max-loss": 1e39}, "at most 1e30"),
        ({"keep": -1}, "keep >= 1"),
    ],
)
def test_wrong_settings_are_named(app, tmp_path, given, words):
    with pytest.raises(InputError, match=words):
        run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path) | given)


def test_data_of_another_shape_are_refused_by_the_client(app):
    description = read_app_spec(app / "fleet")
    with pytest.raises(InputError, match=r"shape \(3,\), and the schema says \(1, 8, 8\)"):
        description.build_client_data(([[1.0, 2.0, 3.0]], [0]))
    with pytest.raises(InputError, match=r"clients 0 to 2; got partition-id 3"):
        example_client(app / "fleet", {"partition-id": 3})


def test_tokens_that_the_model_does_not_have_are_refused_by_the_client(tmp_path):
    tokens = np.arange(30).reshape(6, 5) % 7
    np.savez(tmp_path / "texts.npz", x=tokens, y=tokens)
    data = {"source": "npz", "path": str(tmp_path / "texts.npz"), "clients": 2}
    values = {
        **VALUES,
        "data": data,
        "model": {"name": "lstm", "hidden": 4},
        "algorithm": {"name": "fedavg"},
    }
    write_app(
        resolve({**values, "ensemble": {"modes": 1, "clients_per_round": 2}}), tmp_path / "app"
    )
    build_client(tmp_path / "app" / "fleet", lambda node: (tokens, tokens), Here())
    other = tokens.copy()
    other[3, 1] = 9
    with pytest.raises(
        InputError, match="embeds 7 tokens, 0 to 6, but row 3 of the clients' data holds 9"
    ):
        build_client(tmp_path / "app" / "fleet", lambda node: (other, tokens), Here())


def test_a_schema_that_makes_no_sense_is_named(app):
    file = app / "fleet" / "config.toml"
    file.write_text(file.read_text().replace("classes = 10", "classes = 0"))
    with pytest.raises(InputError, match="classes must be 1 or more"):
        read_app_spec(app / "fleet")


SITES = {
    **VALUES,
    "data": {
        "source": "schema",
        "clients": 3,
        "columns": ["age", "pulse"],
        "target": "outcome",
        "class_names": ["home", "ward"],
        "mean": [50.0, 80.0],
        "std": [20.0, 15.0],
    },
    "rounds": 3,
    "evaluation": {"every": 2},
    "algorithm": {"name": "fedavg"},
}


def write_site(file, seed, rows=30):
    """A CSV file whose columns are in another order than in the schema, and one more than needed."""
    ages, pulses = np.random.default_rng(seed).normal([[50], [80]], [[20], [15]], (2, rows))
    lines = [
        f"{'ward' if pulse > 80 else 'home'},{pulse},x,{age}"
        for age, pulse in zip(ages, pulses, strict=True)
    ]
    file.write_text("\n".join(["outcome,pulse,comment,age", *lines, ""]))
    return np.stack([ages, pulses], 1), (pulses > 80).astype(int)


@pytest.fixture
def sites(tmp_path):
    """A fleet that is deployed from a schema, its sites' files, and what is in them."""
    write_app(resolve(SITES), tmp_path / "app")
    contents = [write_site(tmp_path / f"site-{number}.csv", number) for number in range(3)]
    write_site(tmp_path / "test.csv", 3, 40)
    nodes = {}
    folder = tmp_path / "app" / "fleet"
    for number in range(3):
        node = {"partition-id": number, "data": str(tmp_path / f"site-{number}.csv")}
        client = build_client(folder, lambda node: load_file(folder, node["data"]), Here(**node))
        nodes[number + 10] = Node(client, number, name=f"site-{number}", delay=0.0)
    return tmp_path, FakeGrid(nodes, Time()), contents


def test_a_fleet_from_a_schema_trains_as_a_simulation_of_its_files_and_is_tested(sites):
    tmp_path, grid, contents = sites
    more = {"identity": "name", "test-file": str(tmp_path / "test.csv")}
    spec = read_app_spec(tmp_path / "app" / "fleet")
    run_fleet(grid, spec, settings(tmp_path, **more))
    data = FederatedData.from_clients(
        [(x.astype(np.float32), y) for x, y in contents],
        standardise=Standardise((50.0, 80.0), (20.0, 15.0)),
    )
    federation = build_federation(spec.config, data)
    list(federation.rounds(3))
    run = tmp_path / "run"
    ensemble = read_ensemble(run / "modes.safetensors", spec.config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)

    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["test" in record for record in records] == [False, True, True]
    x, y = write_site(tmp_path / "again.csv", 3, 40)
    expected = fe.evaluate(ensemble.predict(x.astype(np.float32)), y)
    assert records[-1]["test"]["accuracy"] == pytest.approx(expected["accuracy"])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["test"] == records[-1]["test"] and len(records[-1]["modes"]) > 0

    assert write_report(run).rows[0][0] == "accuracy %"
    page = run_page(run)
    assert (
        "fleet,\N{NO-BREAK SPACE}3\N{NO-BREAK SPACE}clients" in page
        and "run it again" not in page
        and "? clients" not in page
    )
    for text in ("site-0", "site-2", "3 clients enrolled with 90 examples", "on 40 examples"):
        assert text in page, text
    report = (run / "report.md").read_text()
    assert "uploaded, MB | " in report and "uploaded, MB | 0.0 " not in report
    assert run_record(RunFolder(run))["data"] == "fleet, 3 clients"


def test_the_report_of_a_fleet_of_an_earlier_version_takes_names_from_its_roster(sites):
    tmp_path, grid, _ = sites
    spec = read_app_spec(tmp_path / "app" / "fleet")
    run_fleet(grid, spec, settings(tmp_path, identity="name"))
    run = tmp_path / "run"
    (run / "clients.json").unlink()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records[1]["fleet"]["lost"] = {"site-1": "no reply in 5 s"}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    page = run_page(run)
    assert "3 clients enrolled with 90 examples" in page
    assert "round 2: no reply in 5 s" in page


def test_names_of_clients_are_not_published_if_the_config_says_so(sites):
    tmp_path, grid, _ = sites
    spec = read_app_spec(tmp_path / "app" / "fleet")
    config = resolve({**spec.config.values(), "report": {"publish_clients": False}})
    run_fleet(grid, replace(spec, config=config), settings(tmp_path, identity="name"))
    assert "site-1" not in (tmp_path / "run" / "clients.json").read_text()
    page = run_page(tmp_path / "run")
    assert "site-1" not in page and "not published" in page


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read: No such file"),
        ("age,pulse\n1,2\n", "no column 'outcome'"),
        ("age,pulse,outcome\n1,high,ward\n", r"line 2: 'high' in column 'pulse' is not a number"),
        ("age,pulse,outcome\n1,2,icu\n1,2,ward\n", "'icu' .first in row 0"),
        ("age,pulse,outcome\n1,2\n", "line 2: 2 values for 3 columns"),
        ("age,pulse,outcome\n", "one line per example"),
    ],
)
def test_a_wrong_test_file_is_named_before_anybody_is_asked(sites, content, words):
    tmp_path, _, _ = sites
    file = tmp_path / "wrong.csv"
    if content:
        file.write_text(content)
    spec = read_app_spec(tmp_path / "app" / "fleet")
    with pytest.raises(FedEnsembleError, match=words) as caught:
        run_fleet(FakeGrid({}, Time()), spec, settings(tmp_path, **{"test-file": str(file)}))
    assert "wrong.csv" in str(caught.value)


def test_a_site_without_its_file_says_so_in_its_reply(sites, monkeypatch):
    """The reply carries the reason: a site is named by what the server knows of it."""
    tmp_path, _, _ = sites
    folder = tmp_path / "app" / "fleet"
    monkeypatch.setattr(app_module.logger, "error", lambda *text, exc_info: None)
    for load, words in (
        (
            lambda node: load_file(folder, tmp_path / "gone.csv"),
            "cannot load its data: FileNotFoundError",
        ),
        (lambda node: {}["pulse"], "cannot load its data: KeyError: 'pulse'"),
        (lambda node: ([[1.0]], ["ward"]), "cannot enrol: .*shape"),
        (lambda node: example_client(folder, node), "cannot load its data: .*without a file"),
    ):
        query = client_app(folder, load)._registered_funcs["query.default"]
        message = build_query_message(1, 10.0)
        message.metadata.__dict__["_message_id"] = "m0"
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        reply = query(message, context)
        assert re.match(words, read_problem(reply.content)), read_problem(reply.content)


def test_errors_of_the_server_are_logged_without_a_traceback():
    error = logging.LogRecord(
        "flwr", 40, "f", 1, "%s raised", ("x",), (None, InputError("do"), None)
    )
    other = logging.LogRecord("flwr", 40, "f", 1, "%s raised", ("x",), (None, OSError("no"), None))
    assert app_module._hide_traceback(error) and app_module._hide_traceback(other)
    assert (error.getMessage(), error.exc_info) == ("do", None)
    assert other.getMessage() == "x raised" and other.exc_info


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "triage-models==0.3  # provides the model 'triage'",
            "triage-models==0.3 is not installed, which provides the model 'triage'",
        ),
        ("numpy==0.1", "is installed where numpy==0.1 is needed"),
        ("numpy=0.1", "is not a requirement of pip"),
    ],
)
def test_a_machine_that_lacks_a_package_says_which(app, line, words):
    file = app / "fleet" / "requirements.txt"
    assert "fedensemble[flower]==" in file.read_text() and "flwr==1." in file.read_text()
    file.write_text(f"{file.read_text()}{line}\n")
    with pytest.raises(InputError, match=words):
        read_app_spec(app / "fleet")


def test_packages_of_own_models_are_required_and_named(tmp_path, monkeypatch):
    """The model is that of a package which this machine has, and the next one has not."""
    info = tmp_path / "site" / "triage_models-0.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triage-models\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[fedensemble.models]\ntriage = triage_models:Net\n")
    (info.parent / "triage_models.py").write_text("from fedensemble.models.mlp import MLP as Net\n")
    monkeypatch.setattr(models, "_items", dict(models._items))
    monkeypatch.setattr(models, "_external", None)
    with monkeypatch.context() as here:
        here.syspath_prepend(info.parent)
        config = resolve({**SITES, "model": {"name": "triage", "hidden": [4]}})
        write_app(config, tmp_path / "app")
        assert read_app_spec(tmp_path / "app" / "fleet").config.model["name"] == "triage"
        assert environment(config)["packages"] == {"model 'triage'": ("triage-models", "0.3")}
    text = (tmp_path / "app" / "fleet" / "requirements.txt").read_text()
    assert "triage-models==0.3  # provides the model 'triage'" in text
    assert '"triage-models==0.3"' in (tmp_path / "app" / "pyproject.toml").read_text()
    assert (
        "`triage-models==0.3` (provides the model 'triage')"
        in (tmp_path / "app" / "README.md").read_text()
    )
    with pytest.raises(InputError, match=r"triage-models==0\.3 is not installed"):
        read_app_spec(tmp_path / "app" / "fleet")

    # a run of that model, where the package is not installed
    monkeypatch.setattr(models, "_items", {k: v for k, v in models._items.items() if k != "triage"})
    monkeypatch.setattr(models, "_external", None)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config.toml())
    (run / "env.json").write_text(
        json.dumps({"packages": {"model 'triage'": ["triage-models", "0.3"]}})
    )
    with pytest.raises(InputError, match="model 'triage' of the package 'triage-models'"):
        load_ensemble(run)
    (run / "env.json").unlink()
    with pytest.raises(InputError, match="known where that package is installed"):
        load_ensemble(run)


def test_an_app_can_be_written_without_flower(tmp_path):
    code = (
        "import sys; sys.modules['flwr'] = None  # as if it were not installed\n"
        "from fedensemble.cli.main import main\n"
        "sys.argv = ['fedensemble', 'deploy', '--out', 'app']; main()"
    )
    source = str(Path(fedensemble.__file__).parents[1])
    for expected in (0, BAD_INPUT):  # the second time the folder is there
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={"PYTHONPATH": source},
            capture_output=True,
            text=True,
        )
        assert done.returncode == expected, done.stderr
    assert "data.py" in done.stderr and (tmp_path / "app" / "fleet" / "data.py").exists()


def test_a_run_goes_on_with_the_identities_it_began_with_and_says_so(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(
        fleet_module.logger, "warning", lambda text, *values: lines.append(text % values)
    )
    roster = {"training": "t", "identity": "name", "members": [["clinic-1", 5]]}
    file = tmp_path / "roster.json"
    file.write_text(json.dumps(roster))
    for wanted, count in (("key", 1), ("name", 1), ("auto", 1), ("partition", 2)):
        found, training = fleet_module.load_or_enrol(
            FakeGrid({}, Time()), Settings(identity=wanted), tmp_path / "roster.json"
        )
        assert (found.identity, training, found.members[0].identity) == ("name", "t", "clinic-1")
        assert len(lines) == count
    assert "enrolled by name" in lines[0]
