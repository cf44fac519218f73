"""Federated ensembles: K models trained at the price of one, on data that stays where it is."""

from pathlib import Path as _Path

from . import _start as _start
from . import engines as _engines  # noqa: F401 (registers the engines)
from .algorithms import (  # fmt: skip
    QSGD,
    Diana,
    Dore,
    FedAc,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedPD,
    FedProx,
    FedSplit,
    FedYogi,
    Scaffold,
)
from .core.aggregator import Aggregator, aggregators
from .core.algorithm import Algorithm, algorithms
from .core.attack import Attack, attacks
from .core.engine import Engine
from .core.optimizer import SGD, Adam, Optimizer
from .core.participation import Participation
from .core.problem import LocalProblem
from .core.schedule import Schedule, schedules
from .core.types import Cohort, EnsembleState, Plan, RoundReport
from .data import FederatedData
from .errors import (  # fmt: skip
    AggregatorWarning,
    DataError,
    DivergedError,
    EngineWarning,
    FedEnsembleError,
    InputError,
    StoreError,
)
from .federation import Federation
from .metrics import evaluate
from .participation import Devices, Everybody
from .predict import Ensemble, Prediction
from .robust import CenteredClipping, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from .schedules import Balanced, Independent, IndependentKFold, Stratified
from .version import VERSION

__version__ = VERSION

register = algorithms.register
"""Decorator that files an algorithm under a name: `@fe.register("mine")`."""


def load_ensemble(folder: str | _Path, device: str = "cpu") -> Ensemble:
    """The ensemble of a finished run of the command line, ready to predict.

    Its model is built from the run's config: a model of your own must be registered before, under the same name.

    Args:
        folder: of the run, such as "runs/digits/0123456789ab".
        device: "cpu", "cuda" or "auto".
    """
    from .experiment.modes import load_ensemble as load  # here: training in Python needs no config

    return load(folder, device)


__all__ = [
    "QSGD", "SGD", "Adam", "Aggregator", "AggregatorWarning", "Algorithm", "Attack", "Balanced", "CenteredClipping",
    "Cohort", "DataError", "Devices", "Diana", "DivergedError", "Dore", "Engine", "EngineWarning", "Ensemble",
    "EnsembleState", "Everybody", "FedAc", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedDyn", "FedEnsembleError",
    "FedPD", "FedProx", "FedSplit", "FedYogi", "FederatedData", "Federation", "GeometricMedian", "Independent",
    "IndependentKFold", "InputError", "Krum", "LocalProblem", "Median", "MultiKrum", "Optimizer", "Participation",
    "Plan", "Prediction", "RoundReport", "Scaffold", "Schedule", "StoreError", "Stratified", "TrimmedMean",
    "aggregators", "attacks", "evaluate", "load_ensemble", "register", "schedules",
]  # fmt: skip
