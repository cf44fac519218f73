"""From a config to an app to a run folder, with clients in this process."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import fedensemble
from fedensemble.cli.exit_codes import BAD_INPUT
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.deploy import example_client
from fedensemble.deploy import server as fleet_module
from fedensemble.deploy.app import build_client, client_app, server_app
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.server import run_fleet
from fedensemble.deploy.server_settings import Settings
from fedensemble.errors import InputError, StoreError
from fedensemble.experiment.ensemble_file import read_ensemble
from fedensemble.report.run_report import write_report

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
    assert read_app_spec(app / "fleet").config == config
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


def test_a_fleet_leaves_a_run_like_a_simulated_one(app, config, tmp_path):
    run_fleet(grid_of(app), read_app_spec(app / "fleet"), settings(tmp_path))
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    ensemble = read_ensemble(tmp_path / "run" / "modes.safetensors", config, torch.device("cpu"))
    torch.testing.assert_close(ensemble.theta, federation.state.modes["theta"], rtol=0, atol=1e-12)
    x = build_data(config).x_test[:20]
    torch.testing.assert_close(ensemble.predict(x).mean, federation.ensemble.predict(x).mean)
    assert "2 modes, 4 rounds" in write_report(tmp_path / "run").title
    # finished: asks nobody
    run_fleet(FakeGrid({}, Time()), read_app_spec(app / "fleet"), settings(tmp_path))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_server_killed_at_any_point_of_a_round_goes_on(app, config, tmp_path, at, monkeypatch):
    """It dies while it waits for answers, or before the round is on disk; clients have trained in
    either case.
    """
    from fedensemble.experiment.run_folder import RunFolder

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
    with pytest.raises(InputError, match=r"shape \(3,\)"):
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


def test_facts_that_make_no_sense_are_named(app):
    (app / "fleet" / "facts.toml").write_text("shape = 3")
    with pytest.raises(InputError, match=r"facts\.toml needs shape"):
        read_app_spec(app / "fleet")


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
