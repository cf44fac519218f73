"""The round loop over a grid: equal to the loop engine, whatever happens to single answers."""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array
from torch import nn

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint
from fedensemble.core.round import finish_round, start_round
from fedensemble.core.types import Plan
from fedensemble.engines.flower.deadline import RoundTimeout
from fedensemble.engines.flower.reply_validation import Limits
from fedensemble.engines.flower.running_statistics import BufferRules
from fedensemble.errors import InputError
from fedensemble.participation.quotas import first_to_finish, quotas
from fedensemble.testing.assertions import remembered
from fedensemble.testing.toy_problems import classification, small_federation, small_model, train

from .fake import FIRST_NODE, FakeFleet

ALGORITHMS = sorted(fe.algorithms)


def close(fleet, federation):
    for name, ours in federation.state.modes.items():
        torch.testing.assert_close(fleet.state.modes[name], ours, rtol=0, atol=1e-12)
    torch.testing.assert_close(fleet.state.buffers, federation.state.buffers, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ages_equal_the_loop_engine(name):
    federation = small_federation(fe.algorithms[name](), "loop", modes=2, strata=2)
    fleet = FakeFleet(federation)
    logs = fleet.rounds(4)
    close(fleet, train(federation, 4))
    assert not any(log.lost or log.refused or log.forgot for _, log in logs)


@pytest.mark.parametrize("name", ["ifca", "fedem"])
def test_joint_visits_travel_with_all_modes(name):
    """Three modes with running statistics down; one of them, or all, up."""
    federation = fe.Federation(
        normed,
        classification(),
        fe.algorithms[name](),
        modes=3,
        clients_per_round=4,
        batch_size=3,
        engine="loop",
        dtype=torch.float64,
    )
    assert fe.algorithms[name].joint
    rules = BufferRules.from_model(federation.model, modes=3)
    fleet = FakeFleet(federation, {"buffer_rules": rules, "limits": Limits(clip_factor=9.0)})
    [(first, _), *_] = fleet.rounds(5)
    close(fleet, train(federation, 5))
    one, statistics = (
        8 * layout.total
        for layout in (federation.model.theta_layout, federation.model.buffer_layout)
    )
    assert first.bytes_down == 4 * 3 * (one + statistics)
    upload = one + 8 if name == "ifca" else 3 * one
    assert first.bytes_up == 4 * (upload + 3 * statistics)


def normed():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def test_a_mode_that_one_client_chose_is_not_updated():
    """Its update would be that client's upload, which the next client would get."""
    federation = small_federation(fe.algorithms.IFCA(), "loop", 3, 2)
    fleet = FakeFleet(federation, {"limits": Limits(min_cohort=2)})
    before, alone = fleet.state.modes["theta"].clone(), 0
    for _ in range(4):
        [(report, log)] = fleet.rounds(1)
        alone += len(log.small_cohorts)
        for k in range(3):
            changed = not torch.equal(fleet.state.modes["theta"][k], before[k])
            assert changed == (k in report.trained)
        assert not set(log.small_cohorts) & set(report.trained)
        assert len(log.unused) >= len(log.small_cohorts)
        before = fleet.state.modes["theta"].clone()
    assert alone


def test_clusters_of_first_updates_have_enough_clients():
    """Of four clients. A mode without a cluster is the mean over all; with one, all modes are."""

    def make():
        algorithm = fe.algorithms.IFCA(start="clusters")
        options = {"clients_per_round": 4, "batch_size": 3, "dtype": torch.float64}
        return fe.Federation(normed, classification(), algorithm, modes=3, **options)

    def fleet(least):
        made = make()
        rules = BufferRules.from_model(made.model, modes=3)
        return FakeFleet(made, {"buffer_rules": rules, "limits": Limits(min_cohort=least)})

    fleets = {least: fleet(least) for least in (1, 2, 3)}
    for each in fleets.values():
        each.rounds(1)
    theta = {least: each.state.modes["theta"] for least, each in fleets.items()}
    assert {least: len(torch.unique(value, dim=0)) for least, value in theta.items()} == {
        1: 3,
        2: 3,
        3: 1,
    }
    torch.testing.assert_close(theta[2][2], theta[3][0])
    fleets[1].rounds(3)
    close(fleets[1], train(make(), 4))


def test_a_client_that_claims_a_mode_that_is_not_there_is_refused():
    federation = small_federation(fe.algorithms.IFCA(), "loop", 3, 2)
    fleet = FakeFleet(federation)

    def lie(message, reply):
        upload = reply.content.array_records["upload"]
        upload["mode"] = Array(torch.tensor([7.0]).double().numpy())
        return [reply]

    fleet.serve()
    fleet.node(2).bend = lie
    logs = [log for _, log in fleet.rounds(3)]
    assert any("there is no mode 7" in str(log.refused) for log in logs)


@pytest.mark.parametrize("name", ["worst-mode", "best-mode", "by-gradient-once-per-age"])
def test_clients_report_what_a_schedule_asks_for(name):
    schedule = fe.schedules[name](modes=3, strata=2, clients_per_round=4)
    federation = small_federation(fe.FedAvg(), "loop", 3, 2, schedule=schedule)
    fleet = FakeFleet(federation)
    fleet.serve().reports_visits = schedule.needs_reports
    fleet.rounds(7)
    train(federation, 7)
    close(fleet, federation)
    for entry, ours in federation.state.schedule.items():
        torch.testing.assert_close(fleet.state.schedule[entry], ours)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 1e31])
def test_reports_that_cannot_be_are_refused(value):
    schedule = fe.schedules["by-gradient"](modes=2, clients_per_round=6)
    federation = small_federation(fe.FedAvg(), "loop", 2, 1, schedule=schedule)
    fleet = FakeFleet(federation)
    fleet.serve().reports_visits = True

    def lie(message, reply):
        reply.content.metric_records["result"]["received_gradient"] = value
        return [reply]

    fleet.node(2).bend = lie
    [(report, log)] = fleet.rounds(1)
    assert 2 not in report.plan.client.tolist()
    assert "received_gradient" in str(log.refused)
    assert bool(fleet.state.schedule["norm"].isfinite().all())


def test_visits_have_as_many_steps_as_the_plan_asks_for():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Hurried(fe.Stratified):
        def plan(self, state, round):
            plan = super().plan(state, round)
            return plan._replace(steps=1 + torch.arange(len(plan.client)))

    schedule = Hurried(modes=2, strata=2, clients_per_round=4)
    federation = small_federation(fe.Scaffold(), "loop", 2, 2, schedule=schedule)
    fleet = FakeFleet(federation)
    fleet.rounds(3)
    close(fleet, train(federation, 3))


EXACT = [
    fe.FedSplit(average="all"),
    fe.FedPD(average="all", weighting="examples"),
    fe.FedAdam(server_lr_decay=0.5),
]


@pytest.mark.parametrize("algorithm", EXACT, ids=lambda a: type(a).__name__)
def test_settings_that_need_the_round_or_first_visits(algorithm):
    """Clipping at a length that no update has must not touch the flag of a first visit either."""
    algorithm = dataclasses.replace(algorithm, lr_decay=0.7, lr_decay_every=2)
    federation = small_federation(algorithm, "loop", modes=2, strata=2)
    fleet = FakeFleet(federation, {"limits": Limits(clip=0.9)})
    fleet.rounds(6)
    close(fleet, train(federation, 6))


def test_running_statistics_travel_too():
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def make():
        data = fe.FederatedData.from_clients([classification().client(i) for i in range(3)])
        return fe.Federation(
            model, data, "fedavg", modes=2, engine="loop", batch_size=3, dtype=torch.float64
        )

    federation = make()
    fleet = FakeFleet(federation)
    fleet.rounds(3)
    close(fleet, train(federation, 3))
    assert not torch.equal(fleet.state.buffers, federation.model.init_params(0, 2)[1])


@pytest.mark.parametrize("name", list(fe.aggregators))
def test_every_aggregator_equals_the_loop_engine(name):
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    federation = fe.Federation(
        model,
        classification(),
        "fedavg",
        modes=2,
        strata=2,
        engine="loop",
        batch_size=3,
        dtype=torch.float64,
        aggregator=name,
    )
    fleet = FakeFleet(federation)
    fleet.rounds(3)
    close(fleet, train(federation, 3))


def test_a_median_outvotes_a_client_that_sends_something_else():
    """One of three clients of a mode sends 1e5 times its update; the mode stays where honest ones
    would bring it.
    """

    def bend(message, answer):
        for record in answer.content.array_records.values():
            for name, array in list(record.items()):
                record[name] = Array(array.numpy() * 1e5)
        return [answer]

    reached = {}
    for rule in ("mean", "median"):
        federation = fe.Federation(
            small_model,
            classification(),
            "fedavg",
            modes=2,
            strata=2,
            engine="loop",
            batch_size=3,
            dtype=torch.float64,
            aggregator=rule,
        )
        fleet = FakeFleet(federation)
        fleet.node(0).bend = bend
        fleet.rounds(1)
        reached[rule] = float(fleet.state.modes["theta"].abs().max())
    assert reached["mean"] > 1e3 and reached["median"] < 10


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "diana"])
def test_whoever_is_not_heard_leaves_no_trace(name):
    """A fleet that loses answers is the loop engine with plans without those visits: memory does
    not run ahead.
    """
    federation = small_federation(fe.algorithms[name](), "loop", modes=2, strata=2)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=5.0)})
    plans = []
    for round in range(6):
        slow = round % 3
        for client in range(6):
            fleet.node(client).delay = 50.0 if client == slow else 0.5
        [(report, log)] = fleet.rounds(1)
        planned = fleet.schedule.plan(fleet.state.schedule, round).client.tolist()
        assert set(log.lost) == {f"partition-{slow}"} & {
            f"partition-{client}" for client in planned
        }
        assert report.plan.client.tolist() == [client for client in planned if client != slow]
        plans.append(report.plan)
    for plan in plans:
        request = start_round(federation.state, federation.algorithm, federation.schedule)._replace(
            plan=plan
        )
        federation.state, _ = finish_round(
            federation.state, request, federation.engine.run_visits(*request), federation.schedule
        )
        federation.engine.commit()
    close(fleet, federation)


def test_the_first_four_of_six_count_and_the_others_do_not_leak():
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    federation.schedule = fe.Stratified(modes=2, strata=2, clients_per_round=6)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=50.0, keep=4)})
    for client, delay in enumerate((9.0, 0.5, 1.5, 0.5, 12.0, 2.5)):
        fleet.node(client).delay = delay
    fleet.serve()
    before = fleet.time.time
    (first, log), (second, later) = fleet.rounds(2)
    for report in (first, second):
        assert report.plan.client.tolist() == [1, 2, 3, 5]
    assert fleet.time.time - before < 8, "a round must not wait for those it does not need"
    assert (
        log.surplus == later.surplus == ["partition-0", "partition-4"]
        and not log.lost
        and not later.late
    )
    fleet.time.sleep(20.0)  # now the first two rounds' last answers are in
    [(third, last)] = fleet.rounds(1)
    assert last.late == ["partition-0", "partition-4"] * 2 and third.plan.client.tolist() == [
        1,
        2,
        3,
        5,
    ]

    plain = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    plain.schedule, plain.state = federation.schedule, copy.copy(federation.state)
    for report in (first, second, third):
        request = start_round(plain.state, plain.algorithm, plain.schedule)._replace(
            plan=report.plan
        )
        plain.state, _ = finish_round(
            plain.state, request, plain.engine.run_visits(*request), plain.schedule
        )
    close(fleet, plain)


def test_nobody_answers_and_the_round_changes_nothing():
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=3.0)})
    fleet.serve()
    for client in range(6):
        fleet.node(client).delay = 99.0
    before = fleet.state
    [(report, log)] = fleet.rounds(1)
    assert report.loss is None and report.trained == () and len(log.lost) == 4
    assert torch.equal(fleet.state.modes["theta"], before.modes["theta"]) and fleet.state.round == 1


def test_offline_clients_are_named_and_welcome_back():
    federation = small_federation(fe.FedAvg(), "loop", modes=1, strata=1)
    federation.schedule = fe.Stratified(modes=1, strata=1, clients_per_round=6)
    fleet = FakeFleet(federation)
    fleet.serve()
    fleet.node(2).online = False
    [(report, log)] = fleet.rounds(1)
    assert (
        log.lost == {"partition-2": "its node is offline"} and 2 not in report.plan.client.tolist()
    )
    fleet.nodes[999] = fleet.nodes.pop(FIRST_NODE + 2)  # it comes back under a new number
    fleet.nodes[999].online = True
    fleet.rounds(1)  # a stranger is asked who it is; nobody waits for it
    [(report, log)] = fleet.rounds(1)
    assert not log.lost and 2 in report.plan.client.tolist()


def test_a_server_that_starts_again_goes_on_as_if_nothing_had_happened():
    federation = small_federation(fe.Scaffold(), "loop", modes=2, strata=2)
    fleet = FakeFleet(federation)
    fleet.rounds(3)
    state, counted = fleet.state, fleet.engine.client_state_tensors()["counted"].clone()
    fleet.rounds(1)  # the server dies before this round is on disk; its clients have trained it
    fleet.serve().load_client_state({"counted": counted})
    fleet.state = state
    logs = fleet.rounds(3)
    close(fleet, train(federation, 6))
    assert not any(log.forgot for _, log in logs)


def test_a_client_that_lost_its_memory_says_so_unless_it_has_a_folder(tmp_path):
    for folder in (None, tmp_path / "memory"):
        federation = small_federation(fe.Scaffold(), "loop", modes=1, strata=1)
        federation.schedule = fe.Stratified(modes=1, strata=1, clients_per_round=6)
        fleet = FakeFleet(federation)
        for client in range(6):
            fleet.node(client).config = {"memory-dir": str(folder / str(client))} if folder else {}
        fleet.rounds(2)
        fleet.node(4).state.clear()  # its process is gone
        [(_, log)] = fleet.rounds(1)
        assert log.forgot == ([] if folder else ["partition-4"])
    assert len(list((tmp_path / "memory").rglob("*.safetensors"))) == 6 * 2, "old memory is deleted"


@pytest.mark.parametrize("alternate", [False, True])
def test_personal_parts_stay_with_the_client_and_outlive_its_process(alternate, tmp_path):
    """The head and BatchNorm, with its running statistics, are never in a message."""

    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def make():
        data = fe.FederatedData.from_clients([classification().client(i) for i in range(3)])
        return fe.Federation(
            model,
            data,
            fe.FedAvgM(lr=0.1),
            modes=2,
            engine="loop",
            batch_size=3,
            dtype=torch.float64,
            personal=["1.*", "3.*"],
            alternate=alternate,
        )

    federation = make()
    fleet = FakeFleet(federation)
    for client in range(3):
        fleet.node(client).config = {"memory-dir": str(tmp_path / str(client))}
    first = fleet.rounds(3)
    for client in range(3):
        fleet.node(client).state.clear()  # its process is gone; the folder is there
    logs = [*first, *fleet.rounds(3)]
    reports = list(federation.rounds(6))
    close(fleet, federation)
    body = 8 * (4 * 5 + 5)
    for (mine, log), theirs in zip(logs, reports, strict=True):
        assert not log.forgot
        assert mine.bytes_up == theirs.bytes_up == body * len(mine.plan.client)
        assert mine.bytes_down == theirs.bytes_down == mine.bytes_up
    arrays = {
        name
        for message in fleet.grid.sent
        for record in message.content.array_records.values()
        for name in record
    }
    assert arrays == {"theta"}
    assert {
        len(m.content["model"]["theta"].numpy()) for m in fleet.grid.sent if "model" in m.content
    } == {25}
    # What the clients keep is what the loop engine keeps.
    state = remembered(federation.engine)
    kept = {name: row for name, row in state.items() if name.endswith("client 2, mode 1")}
    [file] = [
        f
        for f in (tmp_path / "2").rglob("*.safetensors")
        if f.parent.name == "1"
        and f.stem == str(max(int(g.stem) for g in f.parent.glob("*.safetensors")))
    ]
    stored = read_checkpoint(file)[0]
    for name, row in kept.items():
        torch.testing.assert_close(stored[name.partition(" of ")[0]], row, rtol=0, atol=1e-12)
    assert len(stored["personal part"]) == 2 * 5 + 5 * 3 + 3
    assert len(stored["personal statistics"]) == 2 * 5


def test_messages_are_as_long_for_twenty_modes_as_for_one():
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    lengths = {}
    for modes in (1, 20):
        federation = small_federation(
            fe.FedAvg(), "loop", modes=modes, strata=4 if modes > 1 else 1
        )
        fleet = FakeFleet(federation)
        fleet.serve()
        asked = len(fleet.grid.sent)
        answers = []
        for node in fleet.nodes.values():
            node.bend = lambda message, answer, kept=answers: kept.append(answer) or [answer]
        [(report, _)] = fleet.rounds(1)
        for way, messages in (("down", fleet.grid.sent[asked:]), ("up", answers)):
            sizes = {
                sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
                for message in messages
            }
            assert len(sizes) == 1
            lengths.setdefault(way, set()).update(sizes)
        lengths.setdefault("counted", set()).add((report.bytes_up, report.bytes_down))
    assert all(len(values) == 1 for values in lengths.values()), lengths


def test_settings_are_checked():
    for wrong in ({"timeout": 0.0}, {"keep": 0}, {"poll": -1.0}):
        with pytest.raises(InputError, match="timeout > 0"):
            RoundTimeout(**wrong)


def test_answered_plans_are_what_schedules_observe(monkeypatch):
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    fleet = FakeFleet(federation)
    seen = []

    def observe(self, state, plan, loss):
        seen.append((plan, loss))
        return state

    monkeypatch.setattr(type(federation.schedule), "observe", observe)
    [(report, _)] = fleet.rounds(1)
    assert isinstance(report.plan, Plan) and report.plan.client.tolist() == sorted(
        report.plan.client.tolist()
    )
    plan, loss = seen[-1]
    assert plan is report.plan and torch.equal(loss, report.losses)


def test_of_answers_that_come_together_no_more_than_wanted_count():
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    federation.schedule = fe.Stratified(modes=2, strata=2, clients_per_round=6)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=50.0, keep=4)})
    [(report, log)] = fleet.rounds(1)
    assert report.plan.client.tolist() == [0, 1, 3, 4] and log.surplus == [
        "partition-2",
        "partition-5",
    ]
    assert report.plan.mode.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(12))
def test_places_go_to_whom_they_go_to_in_a_simulation_with_the_same_delays(seed):
    """Each mode has its own, even where all of its clients are slow; what dead ones leave goes to
    the others.
    """
    federation = small_federation(fe.FedAvg(), "loop", modes=2, strata=2)
    federation.schedule = fe.Stratified(modes=2, strata=2, clients_per_round=6)
    fleet = FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=50.0, keep=4)})
    fleet.serve()
    delay = torch.randperm(6, generator=torch.Generator().manual_seed(seed)) * 2.0 + 0.5
    dead = torch.tensor([client in (3, 4) and seed % 3 == 0 for client in range(6)])
    plan = fleet.schedule.plan(fleet.state.schedule, 0)
    places = quotas(torch.bincount(plan.mode), 4, federation.seed, 0)
    expected = first_to_finish(plan.mode, delay, ~dead, places)
    for client in range(6):
        fleet.node(client).delay = 999.0 if dead[client] else float(delay[client])
    before = fleet.time.time
    [(report, log)] = fleet.rounds(1)
    assert (
        report.plan.client.tolist() == plan.client[expected].tolist()
        and len(expected.nonzero()) == 4
    )
    assert fleet.time.time - before < 12 or dead.any()
    assert len(log.surplus) + len(log.lost) == 2
