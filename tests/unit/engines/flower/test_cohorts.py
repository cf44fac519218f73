"""A mode that too few clients trained is not updated: its mean would hand one client's upload to
the next.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

import fedensemble as fe
from fedensemble.core.round import finish_round, start_round
from fedensemble.engines.flower.client import check_visit
from fedensemble.engines.flower.deadline import RoundTimeout
from fedensemble.engines.flower.messages import MODEL, UPLOAD, Visit, unpack
from fedensemble.engines.flower.reply_validation import Limits
from fedensemble.engines.flower.suspension import SuspensionTracker, find_small_cohorts
from fedensemble.testing.toy_problems import small_federation

from .fake import FakeFleet


def make_fleet(algorithm, least, modes=3):
    federation = small_federation(algorithm, "loop", modes=modes, strata=1)
    federation.schedule = fe.Stratified(modes=modes, strata=3, clients_per_round=3)
    federation.state = federation.state.__class__(
        0,
        federation.state.modes,
        federation.state.buffers,
        federation.schedule.init(6, federation.seed),
    )
    return FakeFleet(
        federation, {"round_timeout": RoundTimeout(timeout=5.0), "limits": Limits(min_cohort=least)}
    )


@pytest.mark.parametrize("least", [1, 2])
def test_nobody_receives_another_clients_upload(least):
    fleet, uploads = make_fleet(fe.FedAvg(), least), []
    for node in fleet.nodes.values():
        node.bend = lambda message, answer: (
            uploads.append(unpack(answer.content, UPLOAD)["theta"]) or [answer]
        )
    fleet.rounds(9)
    models = [
        unpack(m.content, MODEL)["theta"]
        for m in fleet.grid.sent
        if m.metadata.message_type == "train"
    ]
    leaked = any(torch.equal(model, upload) for model in models for upload in uploads)
    assert leaked == (least == 1)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_small_cohorts_leave_no_trace(name):
    """The fleet equals the loop engine with plans without those visits, also where answers fail
    after all.
    """
    fleet = make_fleet(fe.algorithms[name](), 2, modes=2)
    federation, plans = small_federation(fe.algorithms[name](), "loop", modes=2, strata=1), []
    federation.schedule, seen = fleet.schedule, set()
    for round in range(8):
        for client in range(6):
            fleet.node(client).delay = 50.0 if client == round % 6 else 0.5
        wanted = fleet.schedule.plan(fleet.state.schedule, round)
        asked = len(fleet.grid.sent)
        [(report, log)] = fleet.rounds(1)
        small = find_small_cohorts(wanted.mode.tolist(), 2)
        sent = sum(m.metadata.message_type == "train" for m in fleet.grid.sent[asked:])
        assert sent == log.asked == sum(mode not in small for mode in wanted.mode.tolist())
        pairs = [
            (client, mode)
            for client, mode in zip(wanted.client.tolist(), wanted.mode.tolist(), strict=True)
            if client != round % 6 and mode not in small
        ]
        late = find_small_cohorts([mode for _, mode in pairs], 2)
        assert set(log.small_cohorts) == small | late
        assert log.unused == sorted(f"partition-{client}" for client, mode in pairs if mode in late)
        seen |= {("small", bool(small)), ("late", bool(late))}
        assert list(zip(*(t.tolist() for t in report.plan[:2]), strict=True)) == [
            p for p in pairs if p[1] not in late
        ]
        plans.append(report.plan)
    assert {("small", True), ("late", True)} <= seen
    for plan in plans:
        request = start_round(federation.state, federation.algorithm, federation.schedule)._replace(
            plan=plan
        )
        returned = federation.engine.run_visits(*request)
        federation.state, _ = finish_round(federation.state, request, returned, federation.schedule)
        federation.engine.commit()
    for key, ours in federation.state.modes.items():
        torch.testing.assert_close(fleet.state.modes[key], ours, rtol=0, atol=1e-12)


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_small_cohorts_are_those_with_some_clients_and_too_few(modes, least):
    assert find_small_cohorts(modes, least) == {mode for mode in modes if modes.count(mode) < least}


@given(
    st.lists(st.sampled_from(["passes", "fails", "planned not"]), max_size=60), st.integers(1, 4)
)
@settings(deadline=None, max_examples=50)
def test_suspensions_grow_and_end(history, after):
    """Client 0 against a count by hand; client 1 always passes."""
    tracker, row, left = SuspensionTracker(2, after), 0, 0
    for event in history:
        if event == "planned not":
            tracker.record([], [], [1])
        elif left:
            assert bool(tracker.is_suspended(torch.tensor([0])))
            tracker.record([0], [], [1])
            left -= 1
        else:
            assert not bool(tracker.is_suspended(torch.tensor([0])))
            row = row + 1 if event == "fails" else 0
            expected = min(2 ** (row - after + 1), 64) if row >= after else 0
            fresh = tracker.record([], [0] if row else [], [1] if row else [0, 1])
            assert fresh == ({0: expected} if expected else {})
            left = expected
    assert tracker.suspended.tolist() == [left, 0] and tracker.failures.tolist() == [row, 0]


GOOD = Visit("abc", 3, 2, 1, -1, 9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"client": 10**9},
        {"client": -1},
        {"mode": -1},
        {"mode": 2**40},
        {"round": -1},
        {"round": 2**62},
        {"largest": 0},
        {"largest": -5},
        {"largest": 2**60},
        {"counted": 3},
        {"counted": -2},
        {"training": "../../etc"},
        {"training": ""},
        {"training": "x" * 65},
        {"training": "a\n"},
    ],
)
def test_a_client_refuses_numbers_that_no_fleet_has(wrong):
    check_visit(GOOD)
    with pytest.raises(fe.InputError, match="The server") as caught:
        check_visit(GOOD._replace(**wrong))
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_a_client_with_a_large_number_trains_at_once():
    fleet = make_fleet(fe.FedAvg(), 1)
    sent = {"theta": fleet.state.modes["theta"][0]}
    _, trained, _ = fleet.client(0).run_visit(
        GOOD._replace(client=9_999_999), sent, fleet.state.buffers[0], None
    )
    assert bool(trained.uploads["theta"].isfinite().all())
