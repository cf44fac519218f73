"""Frozen parameters on a fleet: each client builds them, and they are never sent."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

import fedensemble as fe
from fedensemble.engines.flower.messages import UnreadableError, build_query_message, read_frozen
from fedensemble.errors import InputError
from fedensemble.flat_params import payload_bytes

from .fake import FakeFleet

torch.manual_seed(0)
BODY = nn.Linear(6, 30)


def federation(body=BODY, engine="loop"):
    def model():
        return nn.Sequential(
            nn.Linear(4, 6), copy.deepcopy(body).requires_grad_(False), nn.Tanh(), nn.Linear(30, 2)
        )

    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = fe.FederatedData.from_arrays(x, (x.sum(1) > 0).long(), [8, 12, 20])
    return fe.Federation(
        model, data, fe.FedAvg(lr=0.2), modes=2, strata=1, batch_size=4, engine=engine
    )


def other_body():
    body = copy.deepcopy(BODY)
    with torch.no_grad():
        body.bias[3] += 0.01
    return body


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_fleet_trains_as_a_simulation_and_sends_only_what_is_trained(engine):
    fleet, simulated = FakeFleet(federation()), federation(engine=engine)
    fleet.rounds(3)
    simulated.train(3)
    theta = simulated.state.modes["theta"]
    torch.testing.assert_close(fleet.state.modes["theta"], theta, rtol=0, atol=1e-6)
    visits = [message for message in fleet.grid.sent if "visit" in message.content]
    for message in visits:
        arrays = message.content.array_records["model"]
        assert set(arrays) == {"theta"} and tuple(arrays["theta"].shape) == theta.shape[1:]
        assert len(read_frozen(message.content)) == 2  # a few numbers of weight and bias
    report, _ = fleet.rounds(1)[0]
    assert report.bytes_down == len(report.plan.client) * payload_bytes({"theta": theta[:1]})


def test_a_client_with_another_body_cannot_enrol():
    fleet = FakeFleet(federation())
    fleet.node(1).client.model = federation(other_body()).model
    with pytest.raises(InputError, match=r"partition-1 has built other frozen parameters"):
        fleet.roster.enrol(3, 10.0)
    fleet.node(1).client.model = federation().model
    fleet.roster.enrol(3, 100.0)


def test_a_body_that_changes_after_enrolment_trains_nothing():
    fleet = FakeFleet(federation())
    fleet.serve()
    client = fleet.node(1).client
    client.model = federation(other_body()).model
    with pytest.raises(InputError, match=r"other frozen parameters .* the same file of weights"):
        fleet.rounds(1)


@pytest.mark.parametrize("values", [[1.0], ["a", "b", "c"], 3.0, [1, 2, 3]])
def test_a_record_of_other_numbers_is_refused(values):
    message = build_query_message(1, 10.0, torch.zeros(1, 3))
    message.content.config_records["frozen"]["frozen"] = values
    with pytest.raises(UnreadableError, match="frozen"):
        read_frozen(message.content)
