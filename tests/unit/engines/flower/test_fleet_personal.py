"""Clients of a fleet make the personal models of a simulation, and keep them across restarts."""

import stat

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from fedensemble.cli.commands.predict import AbstentionRule, predict_file
from fedensemble.config.build import build_data, build_federation
from fedensemble.config.schema import resolve
from fedensemble.deploy import example_client
from fedensemble.deploy.app import build_client, client_app
from fedensemble.deploy.app_spec import read_app_spec
from fedensemble.deploy.generate import write_app
from fedensemble.deploy.server import run_fleet
from fedensemble.engines.flower.messages import (
    UPLOAD,
    build_query_message,
    build_reply,
    pack,
    read_problem,
    unpack,
)
from fedensemble.errors import InputError
from fedensemble.experiment.storage.ensemble_file import load_ensemble
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.personal.personalize import personalize
from fedensemble.personal.result import file_name, read_personalization
from fedensemble.report.html import write_page
from fedensemble.report.run_report import write_report
from fedensemble.report.tables.result_table import show

from .fake import FakeGrid, Node, Time

CLIENTS, ROUNDS = 4, 2
METHODS = ["select", "mix", "posterior", "tune", "head"]
PERSONALIZE = {"methods": METHODS, "steps": 3, "lr": 0.2, "head": ["*weight*"]}
VALUES = {
    "name": "fleet",
    "rounds": ROUNDS,
    "data": {
        "source": "digits",
        "clients": CLIENTS,
        "partition": "dirichlet",
        "alpha": 0.5,
        "calibration": 0.3,
    },
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedavg", "lr": 0.3, "lr_decay": 0.5, "lr_decay_every": 1},
    "ensemble": {"modes": 3, "strata": 3, "clients_per_round": 4},
    "engine": {"name": "loop", "device": "cpu", "dtype": "float64"},
    "personalize": PERSONALIZE,
}


class Here:
    """What a client app is told of its node."""

    def __init__(self, number):
        self.node_config = {"partition-id": number}


class Fleet:
    """An app, its nodes with a memory-dir each, and a server's settings."""

    def __init__(self, path, memory=range(CLIENTS), **changes):
        self.path, self.config = path, resolve({**VALUES, **changes})
        write_app(self.config, path / "app")
        folder = path / "app" / "fleet"
        self.spec = read_app_spec(folder)
        self.nodes = {}
        for number in range(CLIENTS):
            client = build_client(folder, lambda node: example_client(folder, node), Here(number))
            node = Node(client, number, delay=0.0, spec=self.spec)
            if number in memory:
                node.config = {"memory-dir": str(path / f"site-{number}")}
            self.nodes[number + 10] = node
        self.grid = FakeGrid(self.nodes, Time())
        self.run = RunFolder(path / "run")

    def train(self, **settings):
        options = {
            "run-dir": str(self.run.path),
            "clients": CLIENTS,
            "poll": 0.01,
            "timeout": 5.0,
            "identity": "partition",
            "min-cohort": 1,
            "clip-factor": 0.0,
            "refuse-factor": 0.0,
            "max-weight": 0.0,
        }
        run_fleet(self.grid, self.spec, options | settings)
        return self.run.summary()

    def folder(self, number):
        (found,) = (self.path / f"site-{number}" / "personal").iterdir()
        return found

    def kept(self, number, method):
        folder = self.folder(number)
        return read_personalization(folder / file_name(method), load_ensemble(folder))


def simulated(config):
    federation = build_federation(config, build_data(config))
    federation.train(ROUNDS)
    return federation, {
        each.method: personalize(
            federation, **{name: getattr(each, name) for name in each.__dataclass_fields__}
        )
        for each in config.personalize.settings()
    }


@pytest.mark.parametrize("average", [None, {"name": "swag", "samples": 2, "start": 1}])
def test_a_fleet_has_the_personal_models_of_a_simulation(average, tmp_path):
    changes = {} if average is None else {"average": average}
    fleet = Fleet(tmp_path, **changes)
    summary = fleet.train()["personalize"]
    federation, expected = simulated(fleet.config)
    x = build_data(fleet.config).x_test[:20]
    for method, made in expected.items():
        for number in range(CLIENTS):
            own = fleet.kept(number, method)
            torch.testing.assert_close(own.weights[0], made.weights[number], rtol=0, atol=1e-6)
            assert int(own.rows) == int(made.rows[number]) > 0
            assert int(own.choice) == int(made.choice[number])
            if made.theta is not None:
                torch.testing.assert_close(own.theta[0], made.theta[number], rtol=0, atol=1e-6)
            torch.testing.assert_close(
                own.predict(x, 0).mean, made.predict(x, number).mean, rtol=0, atol=1e-6
            )
    # Metrics: those of each client's own model on its own rows.
    held = federation.data.calibration
    for method, made in {"all modes": federation, **expected}.items():
        own = made.predict(held.x, held.owner) if method in expected else made.predict(held.x)
        p = own.mean.double()
        loss = -p.gather(1, held.y.long().unsqueeze(1)).log().mean()
        found = summary["validation"][method]
        assert found["nll"] == pytest.approx(float(loss), abs=1e-6), method
        right = (p.argmax(1) == held.y).double().mean()
        assert found["accuracy"] == pytest.approx(float(right), abs=1e-9), method
    assert (summary["clients"], summary["rows"], summary["without_rows"]) == (4, len(held), 0)


def test_values_of_a_regression(tmp_path):
    fleet = Fleet(
        tmp_path,
        data={"source": "sine", "clients": CLIENTS, "points": 12, "calibration": 0.3},
        training={"loss": "mse"},
        personalize={"methods": ["select", "mix", "tune"], "steps": 3, "lr": 0.1},
    )
    found = fleet.train()["personalize"]
    federation, expected = simulated(fleet.config)
    held = federation.data.calibration
    for method, made in expected.items():
        for number in range(CLIENTS):
            own = fleet.kept(number, method)
            torch.testing.assert_close(own.weights[0], made.weights[number], rtol=0, atol=1e-6)
        error = made.predict(held.x, held.owner).mean.double() - held.y.double()
        mse = float((error**2).mean())
        assert found["validation"][method] == {"mse": pytest.approx(mse, abs=1e-6)}


def test_running_statistics_are_personal(tmp_path):
    """With BatchNorm, the modes' statistics travel, and local steps change a client's own."""
    fleet = Fleet(
        tmp_path,
        model={"name": "mobilenet", "width": 0.1, "dropout": 0.0},
        data={"source": "digits", "clients": CLIENTS, "partition": "iid", "calibration": 0.1},
        training={"steps": 1, "batch_size": 8},
        personalize={"methods": ["tune"], "steps": 2, "lr": 0.05},
    )
    summary = fleet.train()["personalize"]
    expected = simulated(fleet.config)[1]["tune"]
    assert summary["bytes_down"] == expected.bytes_down
    for number in range(CLIENTS):
        own = fleet.kept(number, "tune")
        torch.testing.assert_close(own.theta[0], expected.theta[number], rtol=0, atol=1e-6)
        torch.testing.assert_close(own.buffers[0], expected.buffers[number], rtol=0, atol=1e-6)
        assert not torch.equal(own.buffers[0], own.bank.ensemble.buffers[int(own.choice)])


def test_the_modes_travel_once_and_the_ledger_says_so(tmp_path):
    fleet = Fleet(tmp_path)
    summary = fleet.train()
    queries = [m for m in fleet.grid.sent if m.metadata.message_type == "evaluate"]
    assert len(queries) == CLIENTS
    federation, expected = simulated(fleet.config)
    found = summary["personalize"]
    assert found["bytes_down"] == expected["select"].bytes_down
    # rows, labels; 6 pairs of sums; K losses; weights of 5 methods
    assert found["bytes_up"] == CLIENTS * (4 + 4 + 8 * (6 * 2 + 3 + 5 * 3))
    rounds = fleet.run.metrics()
    for key in ("bytes_up", "bytes_down"):
        assert summary[key] == sum(record[key] for record in rounds) + found[key]
    assert federation.ensemble.theta.numel() * 8 * CLIENTS == found["bytes_down"]
    weights = found["weights"]["mix"]
    assert len(weights) == CLIENTS
    np.testing.assert_allclose(
        [weights[name] for name in sorted(weights)], expected["mix"].weights, atol=1e-6
    )


def test_the_report_has_the_methods_and_their_bytes(tmp_path):
    fleet = Fleet(tmp_path, personalize={"methods": ["select", "mix"]})
    summary = fleet.train()
    found = summary["personalize"]["validation"]
    rows = [
        f"| {method} | {show('nll', found[method]['nll'])} "
        f"| {show('accuracy', found[method]['accuracy'])} |"
        for method in ("all modes", "select", "mix")
    ]
    write_report(fleet.run.path)
    text = (fleet.run.path / "report.md").read_text()
    assert "## Personal models of 4 clients, on the rows that chose them" in text
    assert "\n".join(rows) in text
    page = write_page(fleet.run.path, tmp_path / "page.html").read_text()
    assert "Personal models of 4 clients" in page and ">personal models<" in page


def test_the_server_learns_no_weights_unless_clients_are_published(tmp_path):
    fleet = Fleet(tmp_path, report={"publish_clients": False})
    answers = []

    def watch(message, answer):
        if message.content.config_records.get("query") is not None:
            answers.append(set(unpack(answer.content, UPLOAD)))
        return [answer]

    for node in fleet.nodes.values():
        node.bend = watch
    found = fleet.train()["personalize"]
    assert "weights" not in found and "validation" in found
    assert answers == [{"rows", "labels", "sums", "mode losses"}] * CLIENTS


def test_without_training_no_losses_of_single_modes_are_sent(tmp_path):
    table = {"methods": ["select", "select"]}  # once is enough
    fleet = Fleet(tmp_path, report={"publish_clients": False}, personalize=table)
    assert fleet.train()["personalize"]["bytes_up"] == CLIENTS * (4 + 4 + 8 * 4)


def test_a_restarted_client_predicts_as_before_to_the_bit(tmp_path):
    fleet = Fleet(tmp_path)
    answers = {}

    def restart(message, answer):
        """After its answer, the process and all that it remembers are gone."""
        answers.setdefault("all", []).append(answer)
        fleet.nodes[10].state = RecordDict()
        return [answer]

    fleet.nodes[10].bend = restart
    fleet.train()
    folder = fleet.folder(0)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    # The server asks again, as after a failure between the answers and the end of the run.
    fleet.run.summary_file.unlink()
    fleet.train()
    after = {path.name: path.read_bytes() for path in fleet.folder(0).iterdir() if path.is_file()}
    assert after == before and {file_name(method) for method in METHODS} <= set(before)
    for path in (folder.parent, folder, *folder.glob("personal-*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    # The command predicts with them.
    x = build_data(fleet.config).x_test[:7]
    np.savez(tmp_path / "in.npz", x=x.numpy())
    for method in METHODS:
        predict_file(
            folder,
            tmp_path / "in.npz",
            tmp_path / "out.npz",
            members=False,
            device="cpu",
            rule=AbstentionRule(),
            personal=method,
            client="0",
        )
        with np.load(tmp_path / "out.npz") as out:
            expected = fleet.kept(0, method).predict(x, 0).mean.numpy()
            np.testing.assert_array_equal(out["mean"], expected)


def test_a_client_without_rows_starts_from_the_best_mode_of_all(tmp_path):
    fleet = Fleet(tmp_path, personalize={**PERSONALIZE, "methods": ["select", "tune"]})
    client = fleet.nodes[12].client
    held = client.data.calibration
    none = torch.zeros(0, dtype=torch.int64)
    empty = type(held)(held.x[none], held.y[none], held.owner[none])
    client.data = type(client.data)(**{**vars(client.data), "calibration": empty})
    found = fleet.train()["personalize"]
    assert (found["clients"], found["without_rows"]) == (4, 1)
    rows = found["weights"]["select"].values()
    alone = [row for row in rows if row == pytest.approx([1 / 3] * 3)]
    assert len(alone) == 1
    federation, _ = simulated(fleet.config)
    data = federation.data
    kept = data.calibration.owner != 2
    rows = data.calibration
    p = torch.stack(
        [federation.ensemble.predict(rows.x[kept]).modes[mode].double() for mode in range(3)]
    )
    own = p.gather(2, rows.y[kept].long().reshape(1, -1, 1).expand(3, -1, 1))
    best = int(own.log().sum((1, 2)).argmax())
    tuned = fleet.kept(2, "tune")
    assert int(tuned.choice) == best and fleet.kept(2, "select").choice == -1
    assert not torch.equal(tuned.theta[0], load_ensemble(fleet.folder(2)).theta[best])
    # The models were sent once, and the second message brought none.
    queries = [m for m in fleet.grid.sent if m.metadata.message_type == "evaluate"]
    assert ["model" in m.content for m in queries] == [True] * 4 + [False]


@pytest.mark.parametrize("has_memory", [False, True])
def test_a_node_without_memory_dir_does_not_enrol(has_memory, tmp_path):
    """The end of the run would be too late to say so."""
    write_app(resolve(VALUES), tmp_path / "app")
    folder = tmp_path / "app" / "fleet"
    app = client_app(folder, lambda node: example_client(folder, node))
    message = build_query_message(1, 10.0)
    message.metadata.__dict__["_message_id"] = "m0"
    node = {"partition-id": 0} | ({"memory-dir": str(tmp_path)} if has_memory else {})
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    problem = read_problem(app._registered_funcs["query.default"](message, context).content)
    if has_memory:
        assert problem is None
    else:
        assert problem.startswith("cannot enrol: ") and "add memory-dir=" in problem


def test_a_pattern_that_fits_no_parameter_is_named_before_anybody_is_asked(tmp_path):
    fleet = Fleet(tmp_path, personalize={"methods": ["head"], "head": ["nose.*"]})
    with pytest.raises(InputError, match="nose"):
        fleet.train()
    assert not fleet.grid.sent


def test_a_client_without_memory_dir_says_so_and_the_others_go_on(tmp_path, caplog):
    fleet = Fleet(tmp_path, memory=range(3), personalize={"methods": ["mix"]})
    assert fleet.train()["personalize"]["clients"] == 3
    assert "does not count: it has no memory-dir" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", torch.tensor([100_000], dtype=torch.int32)),
        ("sums", torch.full((2, 2), torch.nan, dtype=torch.double)),
        ("sums", torch.tensor([[1.0, 1e5], [1.0, 1e5]], dtype=torch.double)),
        ("sums", torch.tensor([[1e300, 1.0], [1.0, 1.0]], dtype=torch.double)),
        ("weights", torch.tensor([[2.0, -1.0, 0.0]], dtype=torch.double)),
        ("weights", torch.ones(1, 2, dtype=torch.double)),
    ],
)
def test_answers_that_are_not_possible_do_not_count(name, value, tmp_path):
    fleet = Fleet(tmp_path, personalize={"methods": ["mix"]})

    def lie(message, answer):
        if message.content.config_records.get("query") is None:
            return [answer]
        changed = unpack(answer.content, UPLOAD) | {name: value}
        return [build_reply(message, {UPLOAD: pack(changed)})]

    fleet.nodes[11].bend = lie
    found = fleet.train()["personalize"]
    assert found["clients"] == 3 and 0 < found["validation"]["mix"]["nll"] < 10


def test_no_client_and_few_clients(tmp_path, caplog):
    fleet = Fleet(tmp_path, memory=(), personalize={"methods": ["mix"]})
    assert "personalize" not in fleet.train()
    assert "No personal models were made: no client answers" in caplog.text
    few = Fleet(tmp_path / "few", memory=(0,), personalize={"methods": ["mix"]})
    found = few.train(**{"min-cohort": 2})["personalize"]
    assert found["clients"] == 1 and "validation" not in found


@pytest.mark.parametrize(
    "changes", [{"algorithm": {"name": "ditto"}}, {"ensemble": {"modes": 2, "personal": ["*"]}}]
)
def test_models_of_clients_own_are_not_compared_on_a_fleet(changes, tmp_path):
    config = resolve({**VALUES, **changes})
    with pytest.raises(InputError, match=r"take the table \[personalize\] out"):
        write_app(config, tmp_path / "app")
