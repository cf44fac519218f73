"""A fleet calibrates as a simulation does, by messages that a server and clients check."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.deploy import example_client
from fedensemble.deploy.app import build_client
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.calibration_messages import PROBLEM, check_query, read_query
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.server import run_fleet
from fedensemble.engines.flower.messages import UPLOAD, build_reply, pack, unpack
from fedensemble.errors import InputError
from fedensemble.experiment.storage.ensemble_file import load_ensemble
from fedensemble.experiment.storage.run_folder import RunFolder

from .fake import FakeGrid, Node, Time

VALUES = {
    "name": "fleet",
    "rounds": 3,
    "data": {
        "source": "digits",
        "clients": 4,
        "partition": "dirichlet",
        "alpha": 0.5,
        "calibration": 0.3,
    },
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "lr": 0.3},
    "ensemble": {"modes": 2, "strata": 2, "clients_per_round": 4},
    "engine": {"name": "loop", "device": "cpu", "dtype": "float64"},
}


class Here:
    """What a client app is told of its node."""

    def __init__(self, number):
        self.node_config = {"partition-id": number}


def fleet(tmp_path, bend=None, **calibration):
    """The nodes, the app and the settings of a fleet with this table `[calibration]`."""
    config = resolve({**VALUES, "calibration": calibration})
    write_app(config, tmp_path / "app")
    folder = tmp_path / "app" / "fleet"
    spec = read_app_spec(folder)
    nodes = {}
    for number in range(4):
        client = build_client(folder, lambda node: example_client(folder, node), Here(number))
        node = Node(client, number, delay=0.0, spec=spec)
        node.bend = (bend or {}).get(number, node.bend)
        nodes[number + 10] = node
    test = build_data(config)
    np.savez(tmp_path / "test.npz", x=test.x_test.numpy(), y=test.y_test.numpy())
    options = {
        "run-dir": str(tmp_path / "run"),
        "clients": 4,
        "poll": 0.01,
        "timeout": 5.0,
        "identity": "partition",
        "min-cohort": 1,
        "clip-factor": 0.0,
        "refuse-factor": 0.0,
        "max-weight": 0.0,
        "test-file": str(tmp_path / "test.npz"),
    }
    return config, FakeGrid(nodes, Time()), spec, options


def simulated(config):
    federation = build_federation(config, build_data(config))
    federation.train(3)
    return federation.calibrate(**config.calibration.model_dump())


def record_of(made):
    values = made.to_record()
    del values["client_names"]  # nodes of a fleet have names
    return values


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scope": "client", "method": "aps", "alpha": 0.2},
        {"scope": "class", "alpha": 0.3, "temperature": "member", "abstain": []},
        {"scope": "pool", "method": "raps", "temperature": "none"},
        {"method": "none", "abstain": ["entropy", "mutual_information"]},
    ],
)
def test_a_fleet_calibrates_as_a_simulation_does(settings, tmp_path):
    config, grid, spec, options = fleet(tmp_path, **settings)
    run_fleet(grid, spec, options)
    made, expected = load_ensemble(tmp_path / "run").calibration, simulated(config)
    one, other = record_of(made), record_of(expected)
    for name in ("temperatures", "nll", "thresholds", "client_thresholds"):
        assert one.pop(name) == pytest.approx(other.pop(name), abs=1e-9), name
    assert one == other  # rows, clients, histograms of answers and bytes
    entry = RunFolder(tmp_path / "run").summary()["calibration"]
    assert entry["test"]["accuracy"] > 0.2 and entry["bytes_up"] == made.bytes_up
    if made.has_sets:
        assert 0.5 < entry["test"]["set_coverage"] <= 1
    # The models were sent once to each client, and each answer is at most 4 KB, or the sums.
    queries = [m for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert sum("model" in m.content for m in queries) == 4


def test_a_client_that_leaves_is_left_out_of_all_sums(tmp_path):
    """It fails at the last query: all sums are asked again without it."""
    config, grid, spec, options = fleet(tmp_path)

    def leave(message, answer):
        query = message.content.config_records.get("query")
        if query is not None and json.loads(query["query"])["kind"] == "uncertainty":
            grid.nodes[12].online = False
            return []
        return [answer]

    grid.nodes[12].bend = leave
    run_fleet(grid, spec, {**options, "timeout": 0.2})
    made = load_ensemble(tmp_path / "run").calibration
    data = build_data(config)
    held = data.calibration
    kept = held.owner != 2
    federation = build_federation(
        config,
        replace(
            data, calibration=replace(held, x=held.x[kept], y=held.y[kept], owner=held.owner[kept])
        ),
    )
    federation.train(3)
    expected = federation.calibrate()
    assert made.clients == 3 and made.rows == int(kept.sum())
    assert made.temperatures == pytest.approx(expected.temperatures, abs=1e-9)
    assert made.thresholds == pytest.approx(expected.thresholds, abs=1e-9)
    assert made.abstention == expected.abstention


def altered(change):
    """A node that changes its answers to one kind of query."""

    def bend(message, answer):
        query = message.content.config_records.get("query")
        if query is None:
            return [answer]
        tensors = unpack(answer.content, UPLOAD)
        changed = change(json.loads(query["query"])["kind"], tensors)
        return [build_reply(message, {UPLOAD: pack(changed)})]

    return bend


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("models", "rows", torch.tensor([100_000], dtype=torch.int32)),
        ("models", "rows", torch.tensor([-1], dtype=torch.int32)),
        ("models", "rows", torch.tensor([1.0])),
        ("temperature", "mean", torch.full((21, 3), torch.nan, dtype=torch.double)),
        ("temperature", "mean", torch.full((21, 3), 1e30, dtype=torch.double)),
        ("temperature", "count", torch.tensor([10_000], dtype=torch.int32)),
        ("histogram", "counts", torch.full((1, 1000), 5, dtype=torch.int32)),
        ("histogram", "counts", torch.full((1, 1000), -1, dtype=torch.int32)),
        ("histogram", "counts", torch.zeros(1, 10, dtype=torch.int32)),
        ("uncertainty", "counts", torch.full((2, 500), 5, dtype=torch.int32)),
        ("threshold", "threshold", torch.tensor([7.0], dtype=torch.double)),
    ],
)
def test_answers_that_are_not_possible_do_not_count(kind, name, value, tmp_path):
    def change(asked, tensors):
        return tensors | {name: value} if asked == kind else tensors

    scope = "client" if kind == "threshold" else "mixture"
    _, grid, spec, options = fleet(tmp_path, bend={1: altered(change)}, scope=scope)
    run_fleet(grid, spec, options)
    made = load_ensemble(tmp_path / "run").calibration
    assert made.clients == 3 and 0 < made.thresholds[0] < 1


def test_without_enough_clients_the_run_is_finished_uncalibrated(tmp_path, caplog):
    def refuse(message, answer):
        if message.content.config_records.get("query") is None:
            return [answer]
        return [build_reply(message, {PROBLEM: ConfigRecord({PROBLEM: "no\nthanks"})})]

    _, grid, spec, options = fleet(tmp_path, bend=dict.fromkeys(range(3), refuse))
    run_fleet(grid, spec, {**options, "min-cohort": 2})
    assert load_ensemble(tmp_path / "run").calibration is None
    assert "calibration" not in RunFolder(tmp_path / "run").summary()
    assert "is not calibrated: 1 clients with calibration rows answer" in caplog.text


def test_a_client_says_when_it_has_lost_the_models(tmp_path):
    _, grid, spec, options = fleet(tmp_path)
    kinds = []

    def forget(message, answer):
        kinds.append(message.metadata.message_type)
        if kinds.count("evaluate") == 2:  # after its answer to the first query
            grid.nodes[10].state = RecordDict()
        return [answer]

    grid.nodes[10].bend = forget
    run_fleet(grid, spec, options)
    assert load_ensemble(tmp_path / "run").calibration.clients == 3


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"kind": "inputs"},
        {"kind": "histogram", "lower": [0.0], "upper": [1.0], "bins": 10**9},
        {"kind": "histogram", "lower": [0.0] * 99, "upper": [1.0] * 99, "bins": 10},
        {"kind": "histogram", "lower": [0.0], "upper": [], "bins": 10},
        {"kind": "histogram", "lower": ["0"], "upper": [1.0], "bins": 10},
        {"kind": "nll", "temperatures": [0.0]},
        {"kind": "nll", "temperatures": [1.0] * 50},
        {"kind": "threshold", "lower": [0.0], "upper": [1.0], "bins": 10, "pool": [1] * 5000},
        {"kind": "temperature", "bins": True},
    ],
)
def test_queries_that_no_calibration_has(query):
    with pytest.raises(InputError, match="no calibration has"):
        check_query(query, 3, 10)


@pytest.mark.parametrize(
    "record",
    [
        None,
        {"training": "a", "models": "b"},
        {"training": "../a", "models": "b", "query": "{}"},
        {"training": "a", "models": "b", "query": "[" * 5000},
        {"training": "a", "models": "b", "query": "[]"},
        {"training": "a", "models": "b", "query": "0" * 200_000},
        {"training": 1, "models": "b", "query": "{}"},
    ],
)
def test_messages_that_are_no_query(record):
    content = RecordDict({} if record is None else {"query": ConfigRecord(record)})
    with pytest.raises(InputError, match="query"):
        read_query(content)


def test_clients_use_the_masks_of_mc_dropout(tmp_path, monkeypatch):
    """A model predicts several times, as on the server."""
    monkeypatch.setitem(VALUES, "model", {"name": "mlp", "hidden": [8], "dropout": 0.3})
    monkeypatch.setitem(VALUES, "ensemble", {**VALUES["ensemble"], "dropout_samples": 3})
    _, grid, spec, options = fleet(tmp_path)
    run_fleet(grid, spec, options)
    made = load_ensemble(tmp_path / "run").calibration
    assert made.clients == 4 and made.has_sets
    for node in grid.nodes.values():
        outputs = unpack(node.state, "calibration outputs")["outputs"]
        assert outputs.shape[:2] == (2, 3)
        assert not torch.equal(outputs[:, 0], outputs[:, 1])
