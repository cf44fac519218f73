"""Registries as users see them: by name, by class name, and each part in the registry of its
kind.
"""

import importlib
import subprocess
import sys
from dataclasses import dataclass

import pytest

import fedensemble as fe
from fedensemble.core.algorithm import algorithms
from fedensemble.core.participation import participations
from fedensemble.core.schedule import schedules
from fedensemble.errors import InputError
from fedensemble.registry import Registry


@pytest.fixture(autouse=True)
def unchanged_registries():
    """Puts the registries back as they were."""
    before = {
        registry: {name: registry[name] for name in registry}
        for registry in (algorithms, schedules, participations)
    }
    yield
    for registry, items in before.items():
        registry._items.clear()
        registry._items.update(items)


def run_python(program: str) -> None:
    """Runs a program in a new process, which has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_the_registries():
    assert isinstance(fe.schedules, Registry) and fe.schedules is schedules
    assert isinstance(fe.algorithms, Registry) and fe.algorithms is algorithms
    assert {"schedules", "algorithms"} <= set(fe.__all__)
    assert fe.schedules["stratified"] is fe.Stratified and fe.algorithms["fedavg"] is fe.FedAvg


def test_subpackages_can_still_be_imported_from():
    from fedensemble.algorithms import FedBE
    from fedensemble.schedules import Stratified

    importlib.import_module("fedensemble.schedules")
    importlib.import_module("fedensemble.algorithms")
    assert fe.schedules is schedules and fe.algorithms is algorithms
    assert fe.algorithms["fedbe"] is FedBE and fe.schedules["stratified"] is Stratified


def test_classes_are_attributes_of_their_registry():
    assert fe.algorithms.FedBE is fe.algorithms["fedbe"]
    assert fe.schedules.Balanced is fe.schedules["balanced"]
    with pytest.raises(
        AttributeError, match=r"algorithms has no attribute 'FedBee'.*algorithms\['name'\].*fedavg"
    ):
        _ = fe.algorithms.FedBee


def test_register_files_each_part_in_the_registry_of_its_kind():
    @fe.register("test-schedule")
    @dataclass(frozen=True, kw_only=True)
    class Mine(fe.Stratified):
        """A schedule."""

    @fe.register("test-algorithm")
    @dataclass(frozen=True, kw_only=True)
    class MyMethod(fe.FedAvg):
        """An algorithm."""

    @fe.register("test-participation")
    class Reliable(fe.Everybody):
        """A participation."""

    assert fe.schedules["test-schedule"] is Mine and "test-schedule" not in fe.algorithms
    assert fe.algorithms["test-algorithm"] is MyMethod and "test-algorithm" not in fe.schedules
    assert (
        participations["test-participation"] is Reliable
        and "test-participation" not in fe.algorithms
    )


def test_a_part_of_another_kind_is_refused():
    with pytest.raises(InputError, match="subclass of Algorithm; got"):
        fe.algorithms.register("wrong")(fe.Stratified)
    with pytest.raises(InputError, match="subclass of Schedule; got"):
        fe.schedules.register("wrong")(fe.FedAvg)
    with pytest.raises(InputError, match="Algorithm, Schedule, Participation or Average"):
        fe.register("wrong")(dict)
    assert "wrong" not in fe.algorithms and "wrong" not in fe.schedules


def test_a_schedule_registered_through_the_documented_registry_runs():
    @fe.schedules.register("test-own")
    @dataclass(frozen=True, kw_only=True)
    class Own(fe.Balanced):
        """A schedule."""

    from torch import nn

    data = fe.FederatedData.from_clients([([[0.0], [0.1]], [0, 0]), ([[1.0], [0.9]], [1, 1])])
    federation = fe.Federation(lambda: nn.Linear(1, 2), data, schedule="test-own", modes=2)
    assert type(federation.schedule) is Own and next(federation.rounds(1)).round == 1


def test_a_registry_is_complete_however_its_module_is_imported():
    """The package does not import the plug-ins; a registry does, at the first lookup."""
    expected = {
        "core.algorithm": ("algorithms", "scaffold"),
        "core.schedule": ("schedules", "balanced"),
        "core.engine": ("engines", "vector"),
        "core.participation": ("participations", "devices"),
        "core.aggregator": ("aggregators", "krum"),
        "core.attack": ("attacks", "alie"),
        "core.average": ("averages", "swag"),
    }
    imports = "\n".join(
        f"from fedensemble.{module} import {registry}" for module, (registry, _) in expected.items()
    )
    lookups = "\n".join(
        f"assert {name!r} in {registry}, list({registry})" for registry, name in expected.values()
    )
    run_python(
        f"import sys\n{imports}\n"
        "plugins = {'fedensemble.algorithms', 'fedensemble.robust', 'fedensemble.engines'}\n"
        f"assert not plugins & set(sys.modules)\n{lookups}"
    )


def test_a_built_in_name_is_refused_where_it_is_registered():
    run_python(
        "from fedensemble.core.algorithm import Algorithm, algorithms\n"
        "from fedensemble.errors import InputError\n"
        "try:\n"
        "    @algorithms.register('fedavg')\n"
        "    class Mine(Algorithm): pass\n"
        "except InputError as error: assert 'already registered' in str(error)\n"
        "else: raise AssertionError('accepted')\n"
        "assert algorithms['fedavg'].__name__ == 'FedAvg'"
    )
