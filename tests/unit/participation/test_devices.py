"""Simulated devices: duration of visits, replies that count, the clock, engines and resume."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from fedensemble import FedAvg, FederatedData, Federation, InputError, Scaffold, Stratified
from fedensemble.algorithms import QSGD, Dore, FedMA, FedPD
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.core.participation import Costs, participations
from fedensemble.core.types import Plan
from fedensemble.core.visits.batches import LocalWork, batch_table
from fedensemble.experiment.storage.run_folder import RunFolder
from fedensemble.participation import Devices, Everybody
from fedensemble.schedules import IndependentKFold
from fedensemble.testing.toy_problems import (
    SIZES,
    classification,
    small_federation,
    small_model,
    train,
)

# a round takes about an hour
UNRULY = Devices(ask=5, drop=0.15, least_hours=16, most_hours=23, factor=2000)
AGREE = 1e-10  # tolerance between engines in float64


def unruly(engine="vector", algorithm=None, **options):
    return small_federation(
        algorithm or Scaffold(lr=0.1), engine, 2, 2, **{"participation": UNRULY, **options}
    )


def test_engines_agree():
    loop, vector = unruly("loop"), unruly("vector")
    seen = set()
    for mine, theirs in zip(loop.rounds(12), vector.rounds(12), strict=True):
        assert (
            torch.equal(torch.stack(mine.plan[:2]), torch.stack(theirs.plan[:2]))
            and mine.turnout == theirs.turnout
        )
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        seen.add((mine.turnout.late > 0, mine.turnout.dropped > 0, mine.turnout.away > 0))
    assert len(seen) > 2
    torch.testing.assert_close(vector.state.modes, loop.state.modes, rtol=0, atol=AGREE)
    assert vector.state.participation["clock"].equal(loop.state.participation["clock"])


def test_a_loaded_federation_continues_as_if_never_interrupted(tmp_path):
    whole, part = unruly(), train(unruly(), 4)
    part.save(tmp_path)
    loaded = Federation.load(tmp_path, model=small_model, data=classification())
    assert loaded.participation == UNRULY
    reports = list(whole.rounds(9))[4:]
    for mine, theirs in zip(loaded.rounds(5), reports, strict=True):
        assert mine.turnout == theirs.turnout and mine.loss == theirs.loss
    tensors = whole.tensors()
    assert {name: value.tolist() for name, value in loaded.tensors().items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
    assert "participation/clock" in tensors


def test_files_without_participation_still_load(tmp_path):
    federation = train(small_federation(FedAvg(), "vector", 2, 2), 2)
    path = RunFolder(federation.save(tmp_path)).newest()[0]
    tensors, facts = read_checkpoint(path)
    facts["settings"].pop("participation")
    write_checkpoint(path, tensors, facts)
    loaded = Federation.load(tmp_path, model=small_model, data=classification())
    assert isinstance(loaded.participation, Everybody) and loaded.round == 2


def test_the_default_adds_nothing_to_checkpoints():
    federation = small_federation(FedAvg(), "vector", 2, 2)
    report = next(federation.rounds(1))
    assert report.turnout is None and not any(
        "participation" in name for name in federation.tensors()
    )
    assert list(participations) == ["devices", "everybody"]


def test_devices_that_are_all_fast_enough_equal_the_default():
    plain = train(small_federation(FedAvg(), "vector", 2, 2), 4)
    timed = train(small_federation(FedAvg(), "vector", 2, 2, participation=Devices()), 4)
    torch.testing.assert_close(timed.state.modes, plain.state.modes, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["loop", "vector"])
@pytest.mark.parametrize(
    "algorithm", [FedAvg(lr=0.1), Scaffold(lr=0.1)], ids=["fedavg", "scaffold"]
)
def test_no_client_replies(engine, algorithm):
    federation = unruly(engine, algorithm, participation=Devices(drop=1.0))
    before = {name: value.clone() for name, value in federation.tensors().items()}
    report = next(federation.rounds(1))
    after = federation.tensors()
    assert federation.round == report.round == 1
    assert (
        report.loss is None
        and report.trained == ()
        and len(report.losses) == len(report.plan.client) == 0
    )
    assert report.bytes_up == 0 and report.bytes_down == report.turnout.bytes_down > 0
    assert report.turnout.dropped == report.turnout.asked == 4
    assert float(after.pop("participation/clock")) == report.turnout.clock == 600
    del before["participation/clock"]
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_the_clock_advances_if_no_client_is_available():
    federation = unruly(participation=Devices(least_hours=0.5, most_hours=0.5, factor=500))
    answered = [report.loss is not None for report in federation.rounds(200)]
    waits = [first for first, second in pairwise(answered) if not first and second]
    assert len(waits) > 1 and not all(answered)


def test_seconds_of_a_visit():
    costs = Costs(
        FedAvg(),
        torch.zeros(1000),
        40,
        torch.tensor([10, 20, 30]),
        LocalWork(epochs=3, batch_size=8),
        0,
    )
    down, up = costs.traffic(0, modes=2)
    assert down.tolist() == up.tolist() == [4040, 4040]
    devices = Devices(
        compute_ms=20, compute_spread=0, bandwidth_kbps=800, bandwidth_spread=0, factor=2
    )
    asked = Plan(torch.tensor([0, 2]), torch.tensor([0, 1]))
    finish = devices.finish(devices.init(3, 0), asked, down + up, costs.examples(asked))
    transfer = 2 * 4040 * 8 / 800e3
    assert finish.tolist() == pytest.approx([30 * 0.020 * 2 + transfer, 90 * 0.020 * 2 + transfer])


def test_a_client_trains_its_modes_one_after_another():
    devices = Devices(
        compute_ms=1000, compute_spread=0, bandwidth_kbps=8, bandwidth_spread=0, factor=1
    )
    asked = Plan(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 0, 2]))
    finish = devices.finish(
        devices.init(3, 0), asked, torch.tensor([0, 0, 1000, 1000]), torch.tensor([1, 1, 3, 3])
    )
    assert finish.tolist() == [1, 2, 4, 8]


METHODS = [QSGD(), FedPD(p=0.5), Scaffold(), FedAvg(), Dore(block=8), FedMA()]


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_bytes_are_those_the_engine_counts(algorithm):
    """The simulated clock computes them before training; the engine counts them in training."""
    plain = small_federation(algorithm, "vector", 2, 2)
    timed = small_federation(algorithm, "vector", 2, 2, participation=Devices())
    seen = set()
    for expected, report in zip(plain.rounds(8), timed.rounds(8), strict=True):
        assert (report.bytes_up, report.bytes_down) == (expected.bytes_up, expected.bytes_down)
        seen.add((report.bytes_up, report.bytes_down))
    assert (len(seen) > 1) == isinstance(algorithm, (FedPD, Dore, FedMA))


def test_traffic_is_that_of_clients_that_missed_no_round():
    federation = unruly(algorithm=Dore(block=8), participation=Devices())
    change = federation.algorithm.codec.bytes(federation.model.theta_layout.total, 8)
    down, up = federation.costs.traffic(0, 2)
    assert down.tolist() == [change + 8] * 2 and up.tolist() == [change] * 2


@pytest.mark.parametrize("last_batch", ["keep", "wrap", "drop"])
@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 5}, {"steps": 1}], ids=str)
def test_samples_are_those_of_the_batch_table(last_batch, amount):
    work = LocalWork(**amount, batch_size=3, last_batch=last_batch)
    sizes = torch.tensor(SIZES)
    _, weight = batch_table(torch.arange(len(sizes)), sizes, work)
    assert work.samples(sizes).tolist() == weight.sum((0, 2)).tolist()


def test_a_deadline_ends_a_round():
    # 1 s per example
    slow = Devices(compute_ms=1000, compute_spread=0, bandwidth_spread=0, factor=1, deadline=9.5)
    federation = unruly(participation=slow, epochs=1)
    for report in federation.rounds(6):
        assert all(SIZES[client] < 9.5 for client in report.plan.client.tolist())
        longest = max(SIZES[client] for client in report.plan.client.tolist())
        assert report.turnout.seconds == (
            9.5 if report.turnout.late else pytest.approx(longest, abs=0.01)
        )
    report = next(unruly(participation=dataclasses.replace(slow, deadline=0.5)).rounds(1))
    assert report.loss is None and report.turnout.late == 4 and report.turnout.seconds == 0.5


def test_a_client_drops_out_if_its_window_closes():
    never = Devices(least_hours=23, most_hours=23, compute_ms=1e9, factor=1)  # a visit takes weeks
    report = next(unruly(participation=never).rounds(1))
    assert report.loss is None and report.turnout.dropped == report.turnout.asked > 0


def test_over_selection_as_in_the_paper():
    data = FederatedData.from_arrays(
        torch.randn(400, 4), torch.zeros(400, dtype=torch.int64), [2] * 200, classes=3
    )
    federation = Federation(
        small_model,
        data,
        modes=5,
        strata=10,
        clients_per_round=100,
        schedule="balanced",
        participation=Devices(ask=130),
    )
    for report in federation.rounds(5):
        assert (report.turnout.asked, report.turnout.late, len(report.plan.client)) == (
            130,
            30,
            100,
        )
        assert torch.bincount(report.plan.mode).tolist() == [20] * 5
    fast = next(
        Federation(
            small_model, data, modes=5, strata=10, clients_per_round=130, participation=Devices()
        ).rounds(1)
    )
    assert report.turnout.seconds < fast.turnout.seconds  # the server does not wait for the slowest


def test_kfold_keeps_as_many_of_each_mode():
    schedule = IndependentKFold(modes=3, strata=1, clients_per_round=3)
    federation = Federation(
        small_model, classification(), schedule=schedule, participation=Devices(ask=5)
    )
    for report in federation.rounds(3):
        assert torch.bincount(report.plan.mode).tolist() == [3, 3, 3] and report.turnout.asked == 15


def test_a_trace_gives_clients_its_devices_and_is_kept_with_the_run(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "client_id,compute_ms_per_sample,bandwidth_kbps\n1,10,1000\n2,20,2000\n3,30,3000\n"
    )
    devices = Devices(trace=str(trace), factor=1)
    state = devices.init(50, seed=1)
    seconds = devices.finish(
        state,
        Plan(torch.arange(50), torch.zeros(50).long()),
        torch.zeros(50),
        torch.full((50,), 100),
    )
    assert set(seconds.tolist()) == {1.0, 2.0, 3.0}
    federation = train(unruly(participation=devices), 2)
    federation.save(tmp_path)
    expected = next(federation.rounds(1)).turnout
    # a resumed run continues with the trace it started with
    trace.write_text("compute_ms_per_sample,bandwidth_kbps\n99,9\n")
    assert (
        next(Federation.load(tmp_path, model=small_model, data=classification()).rounds(1)).turnout
        == expected
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "needs the columns compute_ms_per_sample and bandwidth_kbps; it has a, b"),
        ("compute_ms_per_sample,bandwidth_kbps\n", "has no devices"),
        ("", "needs the columns"),
        (
            "compute_ms_per_sample,bandwidth_kbps\n5,fast\n",
            "line 2, bandwidth_kbps must be a number above 0; got 'fast'",
        ),
        (
            "compute_ms_per_sample,bandwidth_kbps\n5,1\n0,1\n",
            "line 3, compute_ms_per_sample must be .* got '0'",
        ),
        ("compute_ms_per_sample,bandwidth_kbps\n5,nan\n", "got 'nan'"),
        ("compute_ms_per_sample,bandwidth_kbps\n5\n", "got None"),
    ],
)
def test_bad_traces(tmp_path, content, says):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(InputError, match=says):
        Devices(trace=str(tmp_path / "t.csv")).init(3, 0)


def test_a_trace_that_is_missing_or_not_text(tmp_path):
    with pytest.raises(InputError, match=r"Cannot read trace .*No such file"):
        Devices(trace=str(tmp_path / "none.csv")).init(3, 0)
    (tmp_path / "t.csv").write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="is not a CSV file of device speeds"):
        Devices(trace=str(tmp_path / "t.csv")).init(3, 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drop": 1.5}, "0 <= drop <= 1; got 1.5"),
        ({"factor": 0}, "factor > 0; got 0"),
        ({"deadline": -1}, "deadline > 0; got -1"),
        ({"compute_spread": -1}, "compute_spread >= 0; got -1"),
        ({"least_hours": 9, "most_hours": 8}, "got 9 and 8"),
        ({"least_hours": 0}, "0 < least_hours"),
        ({"ask": 3}, "ask >= clients_per_round; got ask=3, clients_per_round=4"),
        ({"ask": 7}, "ask <= clients; got ask=7, clients=6"),
    ],
    ids=str,
)
def test_bad_settings(settings, says):
    with pytest.raises(InputError, match=says):
        small_federation(FedAvg(), "vector", 2, 2, participation=Devices(**settings))


def test_participation_of_a_wrong_type():
    with pytest.raises(InputError, match="participation must be one such as"):
        small_federation(FedAvg(), "vector", 2, 2, participation=Stratified())
    with pytest.raises(InputError, match="unknown participation 'devises': did you mean 'devices'"):
        small_federation(FedAvg(), "vector", 2, 2, participation="devises")


def test_speeds_are_log_normal():
    devices = Devices(compute_ms=40, compute_spread=0.5, factor=1)
    client = torch.arange(20_000)
    seconds = devices.finish(
        devices.init(20_000, 7),
        Plan(client, torch.zeros_like(client)),
        torch.zeros(20_000),
        torch.full((20_000,), 1000),
    )
    logs = seconds.log()
    assert float(seconds.median()) == pytest.approx(40, rel=0.03)
    assert float(logs.std()) == pytest.approx(0.5, rel=0.03)
