"""Everything that is registered keeps its contract."""

import warnings

import pytest

from fedensemble import EMA, SWA, SWAG, Adam, FedAvg, FedProx, Snapshots
from fedensemble.algorithms import FedCross, FedSDD
from fedensemble.core.algorithm import algorithms
from fedensemble.core.average import averages
from fedensemble.core.engine import engines
from fedensemble.core.schedule import schedules
from fedensemble.testing import check_algorithm, check_average, check_engine, check_schedule
from fedensemble.testing.algorithm import simulation_engines
from fedensemble.testing.cases import CASES
from fedensemble.testing.engine import check_case


@pytest.mark.parametrize("name", list(algorithms))
def test_algorithm(name):
    passed = check_algorithm(algorithms[name])
    for engine in simulation_engines():
        assert f"resume, engine '{engine}'" in passed


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(lr=0.3, weighting="uniform", lr_decay=0.5, lr_decay_every=2),
        FedProx(lr=0.05, mu=1.0, optimizer=Adam()),
        FedCross(alpha=0.7, partner="lowest", same_start=False, weighting="uniform"),
        FedSDD(history=4, server_lr=0.3, deploy="ensemble", optimizer=Adam()),
    ],
    ids=["uniform weights and decay", "Adam", "FedCross", "FedSDD"],
)
def test_algorithm_with_settings(algorithm):
    check_algorithm(algorithm, "vector")


@pytest.mark.parametrize("name", list(schedules))
def test_schedule(name):
    check_schedule(schedules[name])


@pytest.mark.parametrize("name", list(averages))
def test_average(name):
    check_average(averages[name]())


@pytest.mark.parametrize(
    "average",
    [EMA(decay=0.0), SWA(start=3, every=3), Snapshots(every=2), SWAG(start=0, rank=2, every=2)],
    ids=repr,
)
def test_average_with_settings(average):
    check_average(average)


@pytest.mark.parametrize("name", simulation_engines())
def test_engine(name):
    check_engine(name)


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.name)
def test_vector_engine_in_small_blocks(case, block):
    check_case("vector", case, {"block": block})


def test_both_engines_are_there():
    assert {"loop", "vector"} <= set(engines)
    assert {"loop", "vector"} <= set(simulation_engines())


def test_no_warning_on_a_wide_model():
    # vmap warns where it falls back to a slow loop; none of the cases may.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in CASES[:3]:
            check_case("vector", case, {})
