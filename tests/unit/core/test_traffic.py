"""Bytes of a visit, as algorithms with two or three arguments count them."""

from dataclasses import dataclass

import torch
from torch import nn

import fedensemble as fe
from fedensemble.algorithms import FedMA
from fedensemble.core.visits.traffic import bytes_down, bytes_up, takes_optional_argument
from fedensemble.testing.toy_problems import classification, small_federation, train

COIN = torch.full((2, 1), 0.5)


@dataclass(frozen=True, kw_only=True)
class OfTwoArguments(fe.FedAvg):
    """Overrides without the last argument, which was added later."""

    def upload_bytes(self, uploads, shared_draw):
        return 7 + super().upload_bytes(uploads, shared_draw)

    def download_bytes(self, sent, shared_draw):
        return 9 + super().download_bytes(sent, shared_draw)


@dataclass(frozen=True, kw_only=True)
class CountsVisits(fe.FedAvg):
    """The first message is long, later ones are short."""

    def init_client_state(self, theta):
        return {"visits": torch.zeros_like(theta[..., :1])}

    def local_training(self, sent, memory, problem):
        return {"theta": problem.descend(sent["theta"])}, {"visits": memory["visits"] + 1}

    def download_bytes(self, sent, shared_draw, memory=None):
        return 5 if memory is None else torch.where(memory["visits"] > 0, 5, 50)


def test_overrides_with_two_arguments_work():
    method, tree = OfTwoArguments(), {"theta": torch.zeros(2, 10)}
    assert bytes_up(method, tree, tree, COIN) == 47 and bytes_down(method, tree, {}, COIN) == 49
    assert not takes_optional_argument(
        OfTwoArguments, "upload_bytes"
    ) and not takes_optional_argument(OfTwoArguments, "download_bytes")
    report = next(small_federation(method, "vector", modes=2, strata=2).rounds(1))
    size = 8 * 43
    assert (report.bytes_up, report.bytes_down) == (4 * (size + 7), 4 * (size + 9))


def test_client_state_is_read_only_for_overrides_that_take_it():
    assert not takes_optional_argument(fe.FedAvg, "download_bytes") and not takes_optional_argument(
        fe.QSGD, "upload_bytes"
    )
    assert (
        takes_optional_argument(fe.Dore, "download_bytes")
        and takes_optional_argument(FedMA, "upload_bytes")
        and takes_optional_argument(CountsVisits, "download_bytes")
    )


def test_bytes_of_each_visit_on_every_engine():
    for engine in ("loop", "vector"):
        federation = small_federation(CountsVisits(), engine, modes=2, strata=2)
        visited = set()
        for report in federation.rounds(6):
            visits = set(zip(report.plan.client.tolist(), report.plan.mode.tolist(), strict=True))
            assert report.bytes_down == sum(5 if visit in visited else 50 for visit in visits)
            visited |= visits


def test_fedma_does_not_upload_frozen_layers():
    """Of three layers, all are uploaded, then the last two, then the last one, and so on."""

    def model():
        return nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
        )

    sizes = (4 * 6 + 6, 6 * 5 + 5, 5 * 3 + 3)
    federation = fe.Federation(
        model, classification(), FedMA(lr=0.1), modes=1, strata=1, clients_per_round=4
    )
    for round, report in enumerate(federation.rounds(6)):
        assert report.bytes_up == 4 * 4 * sum(sizes[round % 3 :])
        assert report.bytes_down == 4 * 4 * (sum(sizes) + 2)
    free = fe.Federation(
        model, classification(), FedMA(lr=0.1, freeze=False), modes=1, strata=1, clients_per_round=4
    )
    assert {report.bytes_up for report in free.rounds(3)} == {4 * 4 * sum(sizes)}


def test_client_state_that_is_read_is_that_of_the_visits():
    federation = train(small_federation(CountsVisits(), "vector", modes=2, strata=1), 3)
    counts = torch.zeros(6, 2)
    for round in range(3):
        plan = federation.schedule.plan(federation.state.schedule, round)
        counts[plan.client, plan.mode] += 1
    all_visits = fe.Plan(torch.arange(6).repeat_interleave(2), torch.arange(2).repeat(6))
    memory = federation.engine.read_client_state(
        all_visits, {"visits": torch.zeros(12, 1).double()}
    )
    assert memory["visits"].flatten().tolist() == counts.flatten().tolist()
