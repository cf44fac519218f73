"""Real processes on loopback: a deployment computes what the simulator does, and outlives its parts."""

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedensemble.core.round import begin_round, finish_round
from fedensemble.core.types import Plan
from fedensemble.experiment.build import build_data, build_federation
from fedensemble.experiment.modes import read_ensemble
from fedensemble.report.predictions import predict_file
from fedensemble.report.run import write_report

from .conftest import CLIENTS, configure

pytestmark = [pytest.mark.fleet, pytest.mark.xdist_group("fleet"), pytest.mark.timeout(600)]

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
        request = begin_round(federation.state, federation.algorithm, federation.schedule)
        request = request._replace(plan=Plan(torch.tensor(clients), torch.tensor(modes)))
        federation.state, report = finish_round(
            federation.state, request, federation.engine.visit(*request), federation.schedule
        )
        federation.engine.commit()
        yield report


def test_scaffold_outlives_serverapp_and_superlink_equals_the_loop_engine_and_predicts(fleet, tmp_path):
    """What clients remember is on their own disks: a new SuperLink and a new run find it there."""
    config = configure(algorithm={"name": "scaffold"})
    before = fleet.received()
    run = fleet.begin(config, "scaffold")
    # Killed in the middle of sending, it would leave nodes waiting for the rest until Flower gives up, a minute later.
    fleet.until(lambda: fleet.received() == before + 3, "the second round, after a query and the first, does not begin")
    fleet.kill_server_app()
    assert fleet.saved(run) == 1
    fleet.begin(config, "scaffold")  # the same run again
    fleet.until(lambda: fleet.received() == before + 5, "the third round does not begin")
    fleet.kill("superlink")
    assert fleet.saved(run) == 2 and not (run / "summary.json").exists()
    second = fleet.number
    fleet.superlink()
    fleet.until(lambda: len(fleet.online()) == CLIENTS, "the nodes do not come back")
    fleet.until(lambda: not fleet.processes("flwr-serverapp"), "the ServerApp outlives its SuperLink")
    fleet.begin(config, "scaffold")
    records = finished(fleet, run)
    for number, done in ((second, 1), (fleet.number, 2)):
        assert f"after round {done}" in fleet.flwr("log", number, "fleet", "--show").stdout

    federation = build_federation(config, build_data(config))
    reports = list(federation.rounds(3))
    assert [record["fleet"] for record in records] == [{"asked": CLIENTS}] * 3, "nobody lost, nobody forgot"
    for record, report in zip(records, reports, strict=True):
        assert (record["round"], record["visits"]) == (report.round, CLIENTS)
        assert record["loss"] == pytest.approx(report.loss, abs=TOLERANCE)
        assert (record["bytes_up"], record["bytes_down"]) == (report.bytes_up, report.bytes_down)
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)

    data = build_data(config)
    np.savez(tmp_path / "in.npz", x=data.x_test.numpy())
    predict_file(run, tmp_path / "in.npz", tmp_path / "out.npz", members=False, device="cpu")
    with np.load(tmp_path / "out.npz") as out:
        assert np.array_equal(out["label"], federation.ensemble.predict(data.x_test).label.numpy())
    assert "3 rounds" in write_report(run).title


@pytest.fixture(scope="module")
def interrupted(fleet):
    """A run one of whose clients is killed in the first round, and started again as soon as Flower lets it in.

    That takes a minute. The second round, which does not need this client, waits for it, the third asks it again.
    """
    config = configure(algorithm={"name": "fedavg"},
                       ensemble={"modes": 1, "strata": 1, "clients_per_round": 2})  # fmt: skip
    federation = build_federation(config, build_data(config))
    plans = [federation.schedule.plan(federation.state.schedule, round).client.tolist() for round in range(3)]
    victim = next(c for c in plans[0] if c not in plans[1] and c in plans[2])
    log = fleet.log(f"client-{victim}")
    before = log.read_text().count("Receiving: train")
    fleet.let_through("interrupted", [client for client in plans[0] if client != victim], 1)
    run = fleet.begin(config, "interrupted", gated=True, timeout=50.0)
    fleet.until(lambda: log.read_text().count("Receiving: train") > before, "the client is not asked")
    fleet.kill(f"client-{victim}")

    def come_back():
        fleet.come_back(victim)
        for training in (1, 2, 3):
            fleet.let_through("interrupted", range(CLIENTS), training)

    supervisor = threading.Thread(target=come_back)
    supervisor.start()
    yield config, federation, plans, victim, run
    supervisor.join()


def test_strangers_get_nothing(fleet, interrupted):
    """An unregistered key, and a node or a command that believes another authority; each works once that is mended."""
    fleet.module.make_node_key(fleet.folder / "nodes" / "client-5")
    fleet.module.make_certificates(fleet.folder / "stranger", ["localhost", fleet.module.HOST])
    fifth = fleet.register("client-4")
    fleet.node(5)
    fleet.node(4, "stranger")
    refused = fleet.flwr("list", "mistrusted", "--format", "json", check=False)
    assert not fleet.module.read_json(refused.stdout)["success"] and "run-id" not in refused.stdout
    trusted = fleet.module.read_json(fleet.flwr("list", "fleet", "--format", "json").stdout)
    assert trusted["success"] and trusted["runs"]
    before = fleet.online()
    for stranger in EXTRA:
        log = fleet.log(stranger)
        fleet.until(lambda log=log: "Connection attempt failed" in log.read_text(), f"{stranger} is not refused")
        assert "SuperNode ID" not in log.read_text() and "Receiving" not in log.read_text()
    assert fleet.online() <= before and fifth not in before

    sixth = fleet.register("client-5")
    for number in (4, 5):
        fleet.kill(f"client-{number}")  # and start it anew, for it tries ever more seldom
        fleet.node(number)
    fleet.until(lambda: {fifth, sixth} <= fleet.online(), "the mended nodes are not there")


def test_a_node_killed_in_mid_round_is_named_and_welcome_back(fleet, interrupted):
    config, federation, plans, victim, run = interrupted
    records = finished(fleet, run)
    assert list(records[0]["fleet"]["lost"]) == [f"client-{victim}"] and records[0]["visits"] == 1
    assert [record["visits"] for record in records[1:]] == [2, 2], records
    heard = [[client for client in plans[0] if client != victim], *plans[1:]]
    list(train_on(federation, [(clients, [0] * len(clients)) for clients in heard]))
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)


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
    six.until(lambda: answers() == [number + 2 for number in before], "the slow do not answer: enrolment, and a round")
    six.let_through("six", quick, 2)
    records = finished(six, run)

    assert [record["visits"] for record in records] == [4, 4]
    assert [record["fleet"] for record in records] == [
        {"asked": 6, "surplus": names},
        {"asked": 6, "surplus": names, "late": names},
    ]
    heard = [(quick, plan.mode[quick].tolist()) for plan in plans]  # everybody is asked: client i is visit i
    for record, report in zip(records, train_on(federation, heard), strict=True):
        assert record["loss"] == pytest.approx(report.loss, abs=TOLERANCE)
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)
