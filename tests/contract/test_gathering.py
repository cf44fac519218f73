"""What each client sent reaches the server alike on every engine, and the battery notices who
misuses it.
"""

from dataclasses import dataclass

import pytest
import torch

from fedensemble import FedAvg
from fedensemble.testing import check_algorithm
from fedensemble.testing.toy_problems import small_federation

CLOSE = 1e-10  # float64; engines add up in another order


@dataclass(frozen=True, kw_only=True)
class Gathers(FedAvg):
    """FedAvg, from each client's upload."""

    gathers = True

    def server_update(self, mode, uploads, cohort):
        shares = cohort.members.shares(len(mode["theta"]))
        return {"theta": shares @ cohort.members.uploads["theta"]}


@dataclass(frozen=True, kw_only=True)
class Mixes(Gathers):
    """Takes the clients of all modes for those of each."""

    def server_update(self, mode, uploads, cohort):
        return {"theta": cohort.members.uploads["theta"].mean(0).expand_as(mode["theta"])}


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_method_that_gathers_keeps_the_contract(engine):
    check_algorithm(Gathers(), engine)


def test_mixed_modes_are_noticed():
    with pytest.raises(AssertionError, match="mode the same result alone"):
        check_algorithm(Mixes(), "loop")


@pytest.mark.parametrize("options", [{}, {"block": 1}, {"block": 3}], ids=str)
def test_members_are_the_same_in_any_block(options):
    reference = small_federation(Gathers(), "loop", modes=3, strata=3)
    expected = reference.engine.run_visits(*reference.next_request())
    other = small_federation(Gathers(), "vector", modes=3, strata=3, engine_options=options)
    got = other.engine.run_visits(*other.next_request())
    for name in ("client", "mode", "weight", "buffers"):
        assert torch.equal(
            getattr(got.cohort.members, name), getattr(expected.cohort.members, name)
        )
    torch.testing.assert_close(
        got.cohort.members.uploads["theta"],
        expected.cohort.members.uploads["theta"],
        rtol=0,
        atol=CLOSE,
    )
    assert got.cohort.members.client.tolist() == sorted(got.cohort.members.client.tolist())
    mean = got.cohort.members.shares(3) @ got.cohort.members.uploads["theta"]
    torch.testing.assert_close(mean, got.uploads["theta"], rtol=0, atol=CLOSE)


def test_nothing_is_gathered_unasked():
    federation = small_federation(FedAvg(), "vector", modes=2, strata=2)
    assert federation.engine.run_visits(*federation.next_request()).cohort.members is None
