"""Plug-ins that override a method under its earlier name still work."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedensemble import FedAvg
from fedensemble.core.schedule import Schedule
from fedensemble.participation import Devices, Everybody
from fedensemble.schedules import Balanced
from fedensemble.testing.toy_problems import small_federation


def test_an_override_under_the_earlier_name_takes_effect():
    with pytest.warns(DeprecationWarning, match="Halving.rate is called learning_rate now"):

        @dataclass(frozen=True, kw_only=True)
        class Halving(FedAvg):
            def rate(self, round):
                return self.lr / 2

    halved, plain = (
        next(small_federation(algorithm, "vector", 2, 2).rounds(1)).losses
        for algorithm in (Halving(lr=0.2), FedAvg(lr=0.1))
    )
    assert torch.equal(halved, plain)


def test_class_attributes_too():
    with pytest.warns(DeprecationWarning, match="one_mode_per_client"):

        @dataclass(frozen=True, kw_only=True)
        class Several(Balanced):
            one_mode_a_client: ClassVar[bool] = False

    assert Several().one_mode_per_client is False
    assert Schedule.one_mode_per_client is True


def test_the_current_name_wins():
    @dataclass(frozen=True, kw_only=True)
    class Both(FedAvg):
        def rate(self, round):
            return 1.0

        def learning_rate(self, round):
            return 0.5

    assert Both().learning_rate(0) == 0.5


def test_a_participation_that_overrides_asking():
    """Callers of either name get the override, and it may call the base class."""
    with pytest.warns(DeprecationWarning, match="One.asking is called selection_schedule now"):

        @dataclass(frozen=True, kw_only=True)
        class One(Everybody):
            def asking(self, schedule):
                return replace(super().asking(schedule), clients_per_round=1)

    schedule = Balanced(modes=1, clients_per_round=2)
    for method in (One().selection_schedule, One().asking):
        assert method(schedule).clients_per_round == 1
    more = Devices(ask=3)
    assert more.asking(schedule) == more.selection_schedule(schedule) != schedule
