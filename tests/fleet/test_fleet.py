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

TOLERANCE = 1e-6  # the wire carries every bit; two machines' sums may differ in the last


def finished(fleet, run):
    fleet.until((run / "summary.json").exists, f"{run.name} is not finished")
    return fleet.rounds(run)


def trained(run, config):
    return read_ensemble(run / "modes.safetensors", config, torch.device("cpu")).theta


def test_fedavg_equals_the_loop_engine_and_its_run_predicts(fleet, tmp_path):
    config = configure(algorithm={"name": "fedavg"}, ensemble={"clients_per_round": 2})
    run = fleet.begin(config, "fedavg")
    records = finished(fleet, run)
    federation = build_federation(config, build_data(config))
    reports = list(federation.rounds(4))
    assert [record["fleet"] for record in records] == [{"asked": 2}] * 4
    assert [record["visits"] for record in records] == [2] * 4
    for record, report in zip(records, reports, strict=True):
        assert record["loss"] == pytest.approx(report.loss, abs=TOLERANCE)
        assert (record["bytes_up"], record["bytes_down"]) == (report.bytes_up, report.bytes_down)
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)

    data = build_data(config)
    np.savez(tmp_path / "in.npz", x=data.x_test.numpy())
    predict_file(run, tmp_path / "in.npz", tmp_path / "out.npz", members=False, device="cpu")
    with np.load(tmp_path / "out.npz") as out:
        assert np.array_equal(out["label"], federation.ensemble.predict(data.x_test).label.numpy())
    assert "4 rounds" in write_report(run).title


def test_scaffold_goes_on_after_the_superlink_was_killed_and_equals_the_loop_engine(fleet):
    """What clients remember is on their own disks: a new SuperLink and a new run find it there."""
    config = configure(algorithm={"name": "scaffold"})
    run = fleet.begin(config, "scaffold")
    fleet.until(lambda: len(fleet.rounds(run)) >= 2, "the second round is not over")
    fleet.kill("superlink")
    done = len(fleet.rounds(run))
    assert 2 <= done < 4 and not (run / "summary.json").exists()
    fleet.superlink()
    fleet.until(lambda: len(fleet.online()) == CLIENTS, "the nodes do not come back")
    fleet.begin(config, "scaffold")  # the same run again
    records = finished(fleet, run)
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    assert not any("forgot" in record["fleet"] or "lost" in record["fleet"] for record in records), records
    assert f"after round {done}" in fleet.flwr("log", fleet.number, "fleet", "--show").stdout
    federation = build_federation(config, build_data(config))
    list(federation.rounds(4))
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def interrupted(fleet):
    """A run one of whose clients is killed in the first round, and started again as soon as Flower lets it in."""
    config = configure(algorithm={"name": "fedavg"}, rounds=4, seed=1,
                       ensemble={"modes": 1, "strata": 1, "clients_per_round": 2})  # fmt: skip
    federation = build_federation(config, build_data(config))
    plans = [federation.schedule.plan(federation.state.schedule, round).client.tolist() for round in range(4)]
    victim = next(c for c in plans[0] if c not in plans[1] + plans[2] and c in plans[3])
    log = fleet.log(f"client-{victim}")
    before = log.read_text().count("Receiving: train")
    run = fleet.begin(config, "interrupted", timeout=75.0)  # Flower keeps a killed node's place for 60 s
    fleet.until(lambda: log.read_text().count("Receiving: train") > before, "the client is not asked")
    fleet.kill(f"client-{victim}")
    supervisor = threading.Thread(target=fleet.come_back, args=(victim,))
    supervisor.start()
    yield config, federation, plans, victim, run
    supervisor.join()


def test_strangers_get_nothing(fleet, interrupted):
    """An unregistered key, and a node or a command that believes another authority; each works once that is mended."""
    name = "unregistered"
    fleet.module.make_node_key(fleet.folder / "nodes" / name)
    fleet.module.make_certificates(fleet.folder / "stranger", ["localhost", fleet.module.HOST])
    fifth = fleet.register("client-4")
    fleet.node(0, name=name)
    fleet.node(4, "stranger")
    refused = fleet.flwr("list", "mistrusted", "--format", "json", check=False)
    assert not fleet.module.read_json(refused.stdout)["success"] and "run-id" not in refused.stdout
    trusted = fleet.module.read_json(fleet.flwr("list", "fleet", "--format", "json").stdout)
    assert trusted["success"] and trusted["runs"]
    before = fleet.online()
    for stranger in (name, "client-4"):
        log = fleet.log(stranger)
        fleet.until(lambda log=log: "Connection attempt failed" in log.read_text(), f"{stranger} is not refused")
        assert "SuperNode ID" not in log.read_text() and "Receiving" not in log.read_text()
    assert fleet.online() <= before and fifth not in before

    sixth = fleet.register(name)
    for stranger in (name, "client-4"):
        fleet.kill(stranger)  # and start it anew, for it tries ever more seldom
    fleet.node(0, name=name)
    fleet.node(4)
    fleet.until(lambda: {fifth, sixth} <= fleet.online(), "the mended nodes are not there")
    fleet.kill("client-4")
    fleet.kill(name)


def test_a_node_killed_in_mid_round_is_named_and_welcome_back(fleet, interrupted):
    config, federation, plans, victim, run = interrupted
    records = finished(fleet, run)
    assert list(records[0]["fleet"]["lost"]) == [f"client-{victim}"] and records[0]["visits"] == 1
    assert [record["visits"] for record in records[1:]] == [2, 2, 2], records
    for plan, record in zip(plans, records, strict=True):
        heard = torch.tensor([client for client in plan if f"client-{client}" not in record["fleet"].get("lost", ())])
        request = begin_round(federation.state, federation.algorithm, federation.schedule)
        request = request._replace(plan=Plan(heard, torch.zeros_like(heard)))
        federation.state, _ = finish_round(
            federation.state, request, federation.engine.visit(*request), federation.schedule
        )
    torch.testing.assert_close(trained(run, config), federation.state.modes["theta"], rtol=0, atol=TOLERANCE)
