"""Real processes on loopback: a deployment computes what the simulator does, outlives its parts and
is closed.
"""

import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, RegisterNodeRequest

from fedensemble.cli.commands.predict import AbstentionRule, predict_file
from fedensemble.config.build import build_data, build_federation
from fedensemble.core.round import finish_round, start_round
from fedensemble.core.types import Plan
from fedensemble.deploy.supernode import client_context
from fedensemble.experiment.storage.ensemble_file import load_ensemble, read_ensemble
from fedensemble.personal.personalize import personalize
from fedensemble.personal.result import file_name, read_personalization
from fedensemble.report.run_report import write_report

from .conftest import CLIENTS, configure

pytestmark = [pytest.mark.fleet, pytest.mark.xdist_group("fleet"), pytest.mark.timeout(900)]

EXTRA = ("client-4", "client-5")  # nodes that only some of the tests start
TOLERANCE = 1e-6  # the wire carries every bit; two machines' sums may differ in the last


def finished(fleet, run):
    fleet.until((run / "summary.json").exists, f"{run.name} is not finished")
    return fleet.rounds(run)


def trained(run, config):
    return read_ensemble(run / "modes.safetensors", config, torch.device("cpu")).theta


def train_on(federation, plans):
    """Trains a federation on other plans than its own."""
    for clients, modes in plans:
        request = start_round(federation.state, federation.algorithm, federation.schedule)
        request = request._replace(plan=Plan(torch.tensor(clients), torch.tensor(modes)))
        federation.state, report = finish_round(
            federation.state, request, federation.engine.run_visits(*request), federation.schedule
        )
        federation.engine.commit()
        yield report


def test_scaffold_outlives_serverapp_and_superlink_equals_the_loop_engine_and_predicts(
    fleet, tmp_path
):
    """What clients remember is on their own disks: a new SuperLink and a new run find it there."""
    config = configure(algorithm={"name": "scaffold"})
    before = fleet.received()
    run = fleet.begin(config, "scaffold")
    # Killed in the middle of sending, it would leave nodes waiting for the rest until Flower gives
    # up, a minute later.
    fleet.until(
        lambda: fleet.received() == before + 3,
        "the second round, after a query and the first, does not begin",
    )
    fleet.kill_server_app()
    assert fleet.saved(run) == 1
    fleet.begin(config, "scaffold")  # the same run again
    fleet.until(lambda: fleet.received() == before + 5, "the third round does not begin")
    fleet.kill("superlink")
    assert fleet.saved(run) == 2 and not (run / "summary.json").exists()
    second = fleet.number
    fleet.superlink()
    fleet.until(lambda: len(fleet.online()) == CLIENTS, "the nodes do not come back")
    fleet.until(
        lambda: not fleet.processes("flwr-serverapp"), "the ServerApp outlives its SuperLink"
    )
    fleet.begin(config, "scaffold")
    records = finished(fleet, run)
    for number, done in ((second, 1), (fleet.number, 2)):
        continued = f"after round {done}"

        def logged(number=number, continued=continued):
            return continued in fleet.flwr("log", number, "fleet", "--show").stdout

        # A ServerApp sends its log in pieces, and the last one may come after its run has ended.
        fleet.until(logged, f"the log of run {number} does not say '{continued}'", seconds=60)

    federation = build_federation(config, build_data(config))
    reports = list(federation.rounds(3))
    assert [record["fleet"] for record in records] == [{"asked": CLIENTS}] * 3, (
        "nobody lost, nobody forgot"
    )
    for record, report in zip(records, reports, strict=True):
        assert (record["round"], record["visits"]) == (report.round, CLIENTS)
        assert record["loss"] == pytest.approx(report.loss, abs=TOLERANCE)
        assert (record["bytes_up"], record["bytes_down"]) == (report.bytes_up, report.bytes_down)
    torch.testing.assert_close(
        trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE
    )

    data = build_data(config)
    np.savez(tmp_path / "in.npz", x=data.x_test.numpy())
    files = (tmp_path / "in.npz", tmp_path / "out.npz")
    predict_file(run, *files, members=False, device="cpu", rule=AbstentionRule())
    with np.load(tmp_path / "out.npz") as out:
        assert np.array_equal(out["label"], federation.ensemble.predict(data.x_test).label.numpy())
    assert "3 rounds" in write_report(run).title


def test_a_fleet_calibrates_and_makes_personal_models_as_the_simulator_does(fleet):
    """On rows that each node splits off its own, and that never leave it."""
    config = configure(
        data={"calibration": 0.3},
        calibration={"scope": "client", "alpha": 0.2},
        personalize={"methods": ["mix", "tune"], "steps": 3},
        rounds=2,
    )
    run = fleet.begin(config, "calibrated", max_weight=0)
    finished(fleet, run)
    federation = build_federation(config, build_data(config))
    federation.train(2)
    expected = federation.calibrate(**config.calibration.model_dump()).to_record()
    made = load_ensemble(run).calibration.to_record()
    for name in ("temperatures", "nll", "thresholds", "client_thresholds"):
        assert made.pop(name) == pytest.approx(expected.pop(name), abs=TOLERANCE), name
    assert len(made.pop("client_names")) == CLIENTS and expected.pop("client_names") is None
    assert made == expected
    for method, options in (("mix", {}), ("tune", {"steps": 3})):
        personal = personalize(federation, method, **options)
        for number in range(CLIENTS):
            # Written by a process that has ended: the file alone remembers.
            (own,) = (fleet.folder / "memory" / f"client-{number}" / "personal").iterdir()
            found = read_personalization(own / file_name(method), load_ensemble(own))
            torch.testing.assert_close(
                found.weights[0], personal.weights[number], rtol=0, atol=TOLERANCE
            )
            if method == "tune":
                torch.testing.assert_close(
                    found.theta[0], personal.theta[number], rtol=0, atol=TOLERANCE
                )


def test_clients_do_not_run_an_app_that_is_not_signed(fleet):
    before = {
        number: fleet.log(f"client-{number}").read_text().count("could not be verified")
        for number in range(4)
    }
    fleet.begin(configure(), "unsigned", gated=True, signed=False, enrol_timeout=20)
    for number, count in before.items():
        log = fleet.log(f"client-{number}")
        fleet.until(
            lambda log=log, count=count: log.read_text().count("could not be verified") > count,
            "an unsigned app is not refused",
        )
    fleet.flwr("stop", fleet.number, "fleet", check=False)
    assert not (fleet.folder / "gates" / "unsigned").exists(), "code of the app ran"


@pytest.fixture(scope="module")
def interrupted(fleet):
    """A run one of whose clients is killed in the first round, and started again as soon as Flower
    lets it in.

    That takes a minute. The second round, which does not need this client, waits for it, the third
    asks it again.
    """
    config = configure(
        algorithm={"name": "fedavg"}, ensemble={"modes": 1, "strata": 1, "clients_per_round": 2}
    )
    federation = build_federation(config, build_data(config))
    plans = [
        federation.schedule.plan(federation.state.schedule, round).client.tolist()
        for round in range(3)
    ]
    victim = next(c for c in plans[0] if c not in plans[1] and c in plans[2])
    log = fleet.log(f"client-{victim}")
    before = log.read_text().count("Receiving: train")
    fleet.let_through("interrupted", [client for client in plans[0] if client != victim], 1)
    run = fleet.begin(config, "interrupted", gated=True, timeout=50.0)
    fleet.until(
        lambda: log.read_text().count("Receiving: train") > before, "the client is not asked"
    )
    fleet.kill(f"client-{victim}")

    def come_back():
        fleet.come_back(victim)
        for training in (1, 2, 3):
            fleet.let_through("interrupted", range(CLIENTS), training)

    supervisor = threading.Thread(target=come_back)
    supervisor.start()
    yield config, federation, plans, victim, run
    supervisor.join()


def known(fleet):
    """Runs and nodes that the SuperLink knows of, as its operator sees them."""
    runs = fleet.module.read_json(fleet.flwr("list", "fleet", "--format", "json").stdout)["runs"]
    nodes = fleet.module.read_json(
        fleet.flwr("supernode", "list", "fleet", "--format", "json").stdout
    )["nodes"]
    return {run["run-id"] for run in runs}, {node["node-id"] for node in nodes}


def test_outsiders_can_neither_list_register_nor_run(fleet, interrupted):
    """They have what is public: the authority's certificate and the address that clients use."""
    key = fleet.folder / "nodes" / "outsider"
    fleet.module.make_node_key(key)
    before = known(fleet)
    assert before[0] and len(before[1]) >= CLIENTS, "an operator on the server sees both"
    commands = (
        ["list", "outside"],
        ["supernode", "list", "outside"],
        ["supernode", "register", f"{key}.pub", "outside", "--name", "client-0"],
        ["run", fleet.folder / "app-interrupted", "outside"],
    )
    with ThreadPoolExecutor() as pool:  # each tries for a while before it gives up
        refused = list(
            pool.map(
                lambda words: fleet.flwr(*words, "--format", "json", check=False).stdout, commands
            )
        )
    for printed in refused:
        assert not fleet.module.read_json(printed)["success"], printed
        assert "run-id" not in printed and "node-id" not in printed
    assert known(fleet) == before


def test_the_control_api_is_for_the_servers_own_machine(fleet, interrupted):
    """Not for outsiders, and not for a registered client with its certificate; the calls as such
    are in order.
    """
    authority, key = fleet.folder / "keys" / "ca.crt", fleet.folder / "nodes" / "client-0"
    outsider = ssl.create_default_context(cafile=authority)
    client = client_context(authority, Path(f"{key}.crt"), key)
    for name, message in (("list-runs", ListRunsRequest()), ("list-nodes", ListNodesRequest())):
        path = f"/v1/control/{name}"
        assert fleet.post(fleet.port, path, message, outsider)[0] == 200, (
            "on the server it would work"
        )
        assert fleet.post(fleet.public, path, message, outsider)[0] == 0
        assert fleet.post(fleet.public, path, message, client)[0] == 403
    register = RegisterNodeRequest(name="client-0")
    assert fleet.post(fleet.public, "/v1/control/register-node", register, client)[0] == 403


def test_nodes_that_lack_one_proof_get_nothing_until_it_is_mended(fleet, interrupted):
    """One is not registered, one has no certificate, one believes another authority."""
    fleet.make_node("client-5")
    fleet.module.make_certificates(fleet.folder / "stranger", ["localhost", fleet.module.HOST])
    fifth = fleet.register("client-4")
    fleet.node(5)
    fleet.node(4, "stranger")
    fleet.start(
        "uncertified",
        [
            "flower-supernode",
            "--superlink",
            f"{fleet.module.HOST}:{fleet.public}",
            "--port",
            fleet.module.free_port(),
            "--root-certificates",
            fleet.folder / "keys" / "ca.crt",
            "--auth-supernode-private-key",
            fleet.folder / "nodes" / "client-4",
        ],
    )
    before = fleet.online()
    for stranger in (*EXTRA, "uncertified"):
        log = fleet.log(stranger)
        fleet.until(
            lambda log=log: "Connection attempt failed" in log.read_text(),
            f"{stranger} is not refused",
        )
        assert "SuperNode ID" not in log.read_text() and "Receiving" not in log.read_text()
    assert fleet.online() <= before and fifth not in before
    fleet.kill("uncertified")

    sixth = fleet.register("client-5")
    for number in (4, 5):
        fleet.kill(f"client-{number}")  # and start it again, for it tries ever more seldom
        fleet.node(number)
    fleet.until(lambda: {fifth, sixth} <= fleet.online(), "the mended nodes are not there")


def test_a_node_killed_in_mid_round_is_named_and_welcome_back(fleet, interrupted):
    config, federation, plans, victim, run = interrupted
    records = finished(fleet, run)
    assert list(records[0]["fleet"]["lost"]) == [f"client-{victim}"] and records[0]["visits"] == 1
    assert [record["visits"] for record in records[1:]] == [2, 2], records
    heard = [[client for client in plans[0] if client != victim], *plans[1:]]
    list(train_on(federation, [(clients, [0] * len(clients)) for clients in heard]))
    torch.testing.assert_close(
        trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE
    )


@pytest.fixture
def six(fleet):
    """Six nodes, all there; the mended strangers among them, if they have been tested."""
    for number in (4, 5):
        if f"client-{number}" not in fleet.started:
            fleet.register(f"client-{number}")
            fleet.node(number)
    fleet.until(lambda: len(fleet.online()) == 6, "six nodes are not there")
    yield fleet
    for name in EXTRA:
        fleet.kill(name)


def test_of_six_that_are_asked_the_first_four_count_and_the_others_do_not_leak(six):
    """Two clients answer the first round in the middle of the second, and the second never."""
    changes = {"algorithm": {"name": "fedavg"}, "rounds": 2, "seed": 2, "data": {"clients": 6}}
    config = configure(**changes, participation={"name": "devices", "ask": 6})
    everybody = configure(**changes, ensemble={"clients_per_round": 6})
    federation = build_federation(everybody, build_data(everybody))
    plans = [federation.schedule.plan(federation.state.schedule, round) for round in range(2)]
    slow = sorted(max(plans[0].client[plans[0].mode == mode].tolist()) for mode in range(2))
    names = [f"client-{client}" for client in slow]
    quick = [client for client in range(6) if client not in slow]

    def answers():
        return [six.log(name).read_text().count("Sent successfully") for name in names]

    before = answers()
    run = six.begin(config, "six", clients=6, gated=True)
    six.let_through("six", quick, 1)
    six.until(lambda: six.saved(run) == 1, "the first round waits for more than four answers")
    six.let_through("six", slow, 1)
    six.until(
        lambda: answers() == [number + 2 for number in before],
        "the slow do not answer: enrolment, and a round",
    )
    six.let_through("six", quick, 2)
    records = finished(six, run)

    assert [record["visits"] for record in records] == [4, 4]
    assert [record["fleet"] for record in records] == [
        {"asked": 6, "surplus": names},
        {"asked": 6, "surplus": names, "late": names},
    ]
    # everybody is asked: client i is visit i
    heard = [(quick, plan.mode[quick].tolist()) for plan in plans]
    for record, report in zip(records, train_on(federation, heard), strict=True):
        assert record["loss"] == pytest.approx(report.loss, abs=TOLERANCE)
    torch.testing.assert_close(
        trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE
    )
