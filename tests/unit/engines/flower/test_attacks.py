"""What one client can do to a fleet: attacks that would stop or steer it, and what is left of
them.
"""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Error, Message
from torch import nn

import fedensemble as fe
from fedensemble.algorithms import FedCross
from fedensemble.engines.flower.deadline import MAX_STRAYS, RoundTimeout
from fedensemble.engines.flower.messages import BUFFERS, MODEL, RESULT, UPLOAD, pack, unpack
from fedensemble.engines.flower.mode_checks import FiniteModeCheck
from fedensemble.engines.flower.reply_validation import Limits
from fedensemble.engines.flower.running_statistics import BufferRules
from fedensemble.testing.toy_problems import classification, small_federation, small_model

from .fake import FakeFleet
from .test_refusals import BAD, NAME, change

SAFE = Limits(clip_factor=3.0, refuse_factor=15.0, min_loss=0.0, max_weight=3.0, suspend_after=3)


def make_fleet(limits=SAFE, modes=1, algorithm=None, **options):
    federation = small_federation(
        algorithm or fe.FedAvg(), "loop", modes=modes, strata=1, **options
    )
    federation.schedule = fe.Stratified(modes=modes, strata=1, clients_per_round=6)
    return FakeFleet(federation, {"round_timeout": RoundTimeout(timeout=20.0), "limits": limits})


def poison(make):
    """A misbehavior: an upload made from what was sent and what was learned."""

    def bend(message, answer):
        sent, learned = unpack(message.content, MODEL), unpack(answer.content, UPLOAD)
        answer.content[UPLOAD] = pack(
            {name: make(sent.get(name, 0.0), value) for name, value in learned.items()}
        )
        return [answer]

    return bend


@pytest.mark.parametrize("loss", [1e39, 3.3e38, 1e31, -5.0])
def test_a_loss_that_is_none_is_refused_in_the_runs_own_precision(loss):
    """1e39 is finite as a Python float and infinite in float32; it ended the run, at every
    start.
    """
    federation = fe.Federation(
        lambda: nn.Linear(4, 3),
        classification(),
        "fedavg",
        modes=1,
        clients_per_round=6,
        engine="loop",
        batch_size=3,
    )
    assert federation.state.modes["theta"].dtype == torch.float32
    fleet = FakeFleet(federation, {"limits": SAFE})
    fleet.node(BAD).bend = change(RESULT, loss=loss)
    [(report, log)] = fleet.rounds(1)
    assert (
        "loss is" in log.refused[NAME]
        and len(report.plan.client) == 5
        and torch.isfinite(torch.tensor(report.loss))
    )


def test_a_round_in_which_all_are_refused_changes_nothing():
    fleet = make_fleet()
    for client in range(6):
        fleet.node(client).bend = change(RESULT, loss=1e39)
    before = fleet.state.modes["theta"].clone()
    [(report, log)] = fleet.rounds(1)
    assert report.loss is None and len(log.refused) == 6 and fleet.state.round == 1
    assert torch.equal(fleet.state.modes["theta"], before) and not log.suspended


ATTACKS = {
    "twenty times the other way": poison(lambda sent, learned: sent - 20 * (learned - sent)),
    "large values": poison(lambda sent, learned: torch.full_like(learned, 9.9e5)),
    "noise": poison(
        lambda sent, learned: learned + torch.linspace(-50, 50, len(learned)).to(learned)
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_updates_out_of_proportion_are_refused_and_their_sender_suspended(attack):
    fleet = make_fleet()
    fleet.node(BAD).bend = ATTACKS[attack]
    logs = fleet.rounds(6)
    assert all("times as much" in log.refused[NAME] for _, log in logs[:3])
    assert [list(log.suspended.items()) for _, log in logs] == [
        [],
        [],
        [(NAME, 2)],
        [],
        [],
        [(NAME, 4)],
    ]
    assert [log.skipped for _, log in logs] == [[], [], [], [NAME], [NAME], []]
    assert [log.asked for _, log in logs] == [6, 6, 6, 5, 5, 6]
    assert all(set(log.refused) <= {NAME} for _, log in logs), "honest clients are not refused"
    without = make_fleet()
    without.serve()
    without.node(BAD).online = False
    without.rounds(6)
    assert torch.equal(fleet.state.modes["theta"], without.state.modes["theta"])


def test_a_long_update_counts_as_three_medians():
    fleet = make_fleet()
    fleet.node(BAD).bend = poison(lambda sent, learned: sent - 8 * (learned - sent))
    start = fleet.state.modes["theta"][0].clone()
    uploads, plain = {}, fleet.serve().collector.collect

    def collect(*args):
        found = plain(*args)
        uploads.update(
            {visit.client: answer.uploads["theta"] for visit, answer in found.replies.items()}
        )
        return found

    fleet.engine.collector.collect = collect
    [(_, log)] = fleet.rounds(1)
    lengths = torch.stack([(uploads[client] - start).norm() for client in range(6)])
    limit = 3 * lengths.median()
    assert lengths[BAD] > limit and log.clipped == {NAME: round(float(lengths[BAD] / limit), 4)}
    uploads[BAD] = start + (uploads[BAD] - start) * limit / lengths[BAD]
    weight = fleet.engine.weights / fleet.engine.weights.sum()
    expected = sum(weight[client] * uploads[client] for client in range(6))
    torch.testing.assert_close(fleet.state.modes["theta"][0], expected)


def test_limits_that_do_not_engage_leave_every_bit_as_it_is():
    for algorithm in (fe.FedAvg(), fe.Scaffold(), fe.Diana()):
        fleets = [
            make_fleet(limits, 2, algorithm)
            for limits in (Limits(), Limits(clip_factor=50, refuse_factor=90))
        ]
        for fleet in fleets:
            assert not any(log.clipped or log.refused for _, log in fleet.rounds(4))
        assert all(
            torch.equal(fleets[0].state.modes[n], fleets[1].state.modes[n])
            for n in fleets[0].state.modes
        )


def test_honest_clients_are_not_refused_because_the_model_is_large():
    fleet = make_fleet()
    fleet.state.modes["theta"][:, :5] = 5e6
    [(report, log)] = fleet.rounds(1)
    assert len(report.plan.client) == 6 and not log.refused


def test_small_rounds_go_by_the_lengths_of_the_rounds_before_also_after_a_restart():
    def grow(fleet):
        fleet.node(BAD).bend = poison(lambda sent, learned: sent + 30 * (learned - sent))
        for client in range(6):
            fleet.node(client).online = client in (BAD, BAD + 1)

    fleet = make_fleet()
    fleet.rounds(3)
    saved = {name: tensor.clone() for name, tensor in fleet.engine.client_state_tensors().items()}
    state = fleet.state
    grow(fleet)
    [(_, log)] = fleet.rounds(1)
    assert "times as much" in log.refused[NAME], "of two answers alone nobody could tell"
    first, fleet.state = fleet.state, state
    fleet.serve().load_client_state(saved)
    fleet.rounds(1)
    assert torch.equal(fleet.state.modes["theta"], first.modes["theta"])
    assert torch.equal(
        fleet.engine.recent_lengths, torch.as_tensor(fleet.engine.client_state_tensors()["recent"])
    )


def norm_fleet(limits, frozen=False):
    def model():
        layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        layers[0].bias.requires_grad_(not frozen)
        return layers

    data = fe.FederatedData.from_clients([classification().client(i) for i in (0, 2, 4, 5)])
    federation = fe.Federation(
        model, data, "fedavg", modes=1, engine="loop", batch_size=3, dtype=torch.float64
    )
    functional_model = federation.model
    options = {
        "buffer_rules": BufferRules.from_model(functional_model),
        "finite_check": FiniteModeCheck(functional_model, (4,)),
    }
    return FakeFleet(federation, {"limits": limits, **options})


def statistics(value):
    """A misbehavior: other running statistics."""

    def make(message, answer):
        tree = unpack(answer.content, UPLOAD)
        answer.content[UPLOAD] = pack({**tree, BUFFERS: value(tree[BUFFERS])})
        return [answer]

    return make


@pytest.mark.parametrize("limits", [SAFE, Limits(), Limits(clip=0.01)])
def test_statistics_that_make_a_variance_negative_are_refused(limits):
    fleet = norm_fleet(limits)
    fleet.node(BAD).bend = statistics(lambda moved: torch.full_like(moved, -9e5))
    [(report, log)] = fleet.rounds(1)
    assert "variance negative" in log.refused[NAME] and len(report.plan.client) == 3
    x = classification().x
    assert bool(
        fleet.federation.model.outputs(fleet.state.modes["theta"][0], fleet.state.buffers[0], x)
        .isfinite()
        .all()
    )


def test_statistics_are_limited_like_updates():
    fleet = norm_fleet(SAFE)
    fleet.node(BAD).bend = statistics(lambda moved: moved.abs() + 1e4)
    [(_, log)] = fleet.rounds(1)
    assert "'buffers' changes" in log.refused[NAME]
    fleet = norm_fleet(Limits(clip=0.01))
    fleet.node(BAD).bend = statistics(lambda moved: moved.abs() + 1e4)
    before = fleet.state.buffers.clone()
    fleet.rounds(1)
    assert 0 < float((fleet.state.buffers - before).norm()) <= 0.01 * (1 + 1e-9)


def test_parameters_that_are_not_trained_cannot_be_moved():
    fleet = norm_fleet(SAFE, frozen=True)
    assert not fleet.rounds(1)[0][1].refused
    fleet.node(BAD).bend = statistics(lambda moved: moved + 1e-3)
    [(_, log)] = fleet.rounds(1)
    assert "not trained" in log.refused[NAME]


def test_a_variance_that_rounding_makes_negative_is_no_offence():
    rules = BufferRules(torch.tensor([False, True, True]), torch.tensor([False, False, False]))
    before = torch.tensor([1.0, 1.0, 0.0])
    moved = torch.tensor([-5.0, -1.0 - 2e-7, 0.0])
    rules.check_change(before, moved)
    assert rules.clamp_variances((before + moved).unsqueeze(0)).tolist() == [[-4.0, 0.0, 0.0]]


@pytest.mark.parametrize("modes", [1, 2])
def test_a_mode_that_breaks_keeps_its_last_good_state(modes, monkeypatch):
    fleet = make_fleet(modes=modes)
    fleet.schedule = fe.Stratified(modes=modes, strata=3 if modes > 1 else 1, clients_per_round=6)
    fleet.state = replace(fleet.state, schedule=fleet.schedule.init(6, fleet.federation.seed))
    planned = [
        set(fleet.schedule.plan(fleet.state.schedule, round).mode.tolist()) for round in range(20)
    ]
    burst = next(
        round for round, found in enumerate(planned) if round and found == set(range(modes))
    )
    fleet.rounds(burst)
    before, counted = fleet.state.modes["theta"].clone(), fleet.engine.counted.clone()
    plain = fe.FedAvg.server_update

    def update(self, mode, uploads, cohort):
        made = plain(self, mode, uploads, cohort)["theta"]
        return {"theta": torch.cat([torch.full_like(made[:1], torch.inf), made[1:]])}

    with monkeypatch.context() as patch:
        patch.setattr(fe.FedAvg, "server_update", update)
        [(report, log)] = fleet.rounds(1)
    assert (
        log.broken == [0]
        and report.trained == tuple(range(1, modes))
        and 0 not in report.plan.mode.tolist()
    )
    assert torch.equal(fleet.state.modes["theta"][0], before[0])
    assert torch.equal(fleet.engine.counted[:, 0], counted[:, 0]), (
        "an answer that does not count leaves no trace"
    )
    if modes > 1:
        assert not torch.equal(fleet.state.modes["theta"][1], before[1])
        assert int(fleet.engine.counted[:, 1].max()) == burst
    [(report, log)] = fleet.rounds(1)
    assert not log.broken and report.loss is not None


def test_a_mode_that_breaks_does_not_break_those_it_is_mixed_with(monkeypatch):
    """The broken mode is found before modes are mixed, so that only its own replies do not count."""
    federation = fe.Federation(
        small_model,
        classification(),
        FedCross(alpha=0.5),
        schedule=fe.Balanced(modes=3, strata=3, clients_per_round=6),
        engine="loop",
        dtype=torch.float64,
    )
    fleet = FakeFleet(federation)
    fleet.rounds(1)
    plain = fe.FedAvg.server_update

    def update(self, mode, uploads, cohort):
        made = plain(self, mode, uploads, cohort)["theta"]
        return {"theta": torch.cat([torch.full_like(made[:1], torch.inf), made[1:]])}

    before = fleet.state.modes["theta"].clone()
    with monkeypatch.context() as patch:
        patch.setattr(fe.FedAvg, "server_update", update)
        [(report, log)] = fleet.rounds(1)
    assert log.broken == [0] and report.trained == (1, 2)
    theta = fleet.state.modes["theta"]
    assert bool(theta.isfinite().all()) and not bool((theta == before).all(1).any())


def test_mixing_that_fails_is_left_out_of_the_round(monkeypatch, caplog):
    fleet = FakeFleet(
        fe.Federation(small_model, classification(), FedCross(), modes=2, engine="loop")
    )
    with monkeypatch.context() as patch:
        patch.setattr(FedCross, "_mix", lambda self, value, partner: value / 0)
        [(report, log)] = fleet.rounds(1)
    assert report.trained and not log.broken and bool(fleet.state.modes["theta"].isfinite().all())
    assert "'fedcross' gave nan or infinity in mode 0 at round 1" in caplog.text
    assert "stay uncoupled" in caplog.text
    assert fleet.rounds(1)[0][0].loss is not None


def test_finite_weights_with_predictions_that_are_not_are_found():
    fleet = norm_fleet(Limits())
    fleet.serve()
    assert fleet.engine.finite_check.find_broken(fleet.state, [0]) == []
    assert fleet.engine.finite_check.find_broken(
        replace(fleet.state, buffers=fleet.state.buffers - 5), [0]
    ) == [0]


def test_error_texts_are_cut_and_cannot_forge_lines(caplog):
    fleet = make_fleet()
    words = "no disk\nround 9: all is well\x1b[2J" + "x" * 3_000_000
    fleet.node(BAD).bend = lambda message, answer: [Message(Error(0, words), reply_to=message)]
    [(_, log)] = fleet.rounds(1)
    assert (
        len(json.dumps(log.to_record())) < 1000
        and r"no disk\nround 9: all is well\x1b[2J" in log.lost[NAME]
    )
    assert all(
        "\n" not in record.getMessage() and len(record.getMessage()) < 400
        for record in caplog.records
    )


def test_a_flood_of_strays_is_counted_and_not_listed():
    fleet = make_fleet()

    def flood(message, answer):
        strays = [Message(answer.content, reply_to=message) for _ in range(500)]
        for stray in strays:
            stray.metadata.__dict__["_reply_to_message_id"] = "nothing"
        return [answer, *strays]

    fleet.node(BAD).bend = flood
    [(_, log)] = fleet.rounds(1)
    assert len(log.stray) == MAX_STRAYS and log.more_strays == 500 - MAX_STRAYS


def test_claimed_examples_count_up_to_a_multiple_of_the_median():
    fleet = make_fleet()
    fleet.node(BAD).client.examples = 10_000_000
    fleet.serve()
    median = sorted([7, 3, 1, 9, 4, 10_000_000])[2]
    assert fleet.engine.weights.tolist() == [min(n, 3 * median) for n in (7, 3, 10**7, 1, 9, 4)]
    [(_, log)] = fleet.rounds(1)
    assert not log.dominant
    free = make_fleet(Limits())
    free.node(BAD).client.examples = 10_000_000
    [(_, log)] = free.rounds(1)
    assert log.dominant == {NAME: 1.0}
    uniform = make_fleet(Limits(), algorithm=fe.FedAvg(weighting="uniform"))
    uniform.node(BAD).client.examples = 10_000_000
    [(_, log)] = uniform.rounds(1)
    assert not log.dominant


def test_a_silent_client_stops_delaying_rounds_and_may_come_back():
    fleet = make_fleet()
    fleet.serve()
    fleet.node(BAD).delay = 1e6
    times = []
    for _ in range(12):
        before = fleet.time.time
        fleet.rounds(1)
        times.append(fleet.time.time - before > 15)
    assert times == [True] * 3 + [False] * 2 + [True] + [False] * 4 + [True, False]
    fleet.node(BAD).delay = 0.5
    logs = fleet.rounds(9)
    assert [NAME in log.skipped for _, log in logs] == [True] * 7 + [False] * 2
    assert (
        int(fleet.engine.suspensions.failures[BAD]) == 0 and BAD in logs[-1][0].plan.client.tolist()
    )


def test_an_outage_of_everybody_suspends_nobody():
    fleet = make_fleet()
    fleet.serve()
    for client in range(6):
        fleet.node(client).delay = 1e6
    logs = fleet.rounds(5)
    assert all(len(log.lost) == 6 and not log.suspended and not log.skipped for _, log in logs)


def test_a_suspended_client_is_like_one_that_is_away_also_after_a_restart():
    """Memory, modes and the suspension itself are what they are without the restart."""
    fleets = []
    for restart in (False, True):
        fleet = make_fleet(modes=2, algorithm=fe.Scaffold())
        fleet.node(BAD).bend = change(RESULT, loss=-1.0)
        fleet.rounds(4)
        if restart:
            saved = {
                name: tensor.clone() for name, tensor in fleet.engine.client_state_tensors().items()
            }
            fleet.serve().load_client_state(saved)
        logs = fleet.rounds(4)
        fleets.append((fleet, [log.to_record() for _, log in logs]))
    assert fleets[0][1] == fleets[1][1] and any("skipped" in record for record in fleets[0][1])
    for name, value in fleets[0][0].state.modes.items():
        assert torch.equal(value, fleets[1][0].state.modes[name])


def test_checkpoints_of_earlier_versions_are_read():
    fleet = make_fleet()
    fleet.rounds(1)
    counted = fleet.engine.counted.clone()
    fleet.serve().load_client_state({"counted": counted})
    assert not fleet.rounds(1)[0][1].refused
