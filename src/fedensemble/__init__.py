"""Federated ensembles: K models trained at the price of one, on data that stays where it is."""

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
from .core.algorithm import Algorithm, algorithms
from .core.engine import Engine
from .core.optimizer import SGD, Adam, Optimizer
from .core.participation import Participation
from .core.problem import LocalProblem
from .core.schedule import Schedule, schedules
from .core.types import Cohort, EnsembleState, Plan, RoundReport
from .data import FederatedData
from .errors import DataError, DivergedError, FedEnsembleError, InputError, StoreError
from .federation import Federation
from .metrics import evaluate
from .participation import Devices, Everybody
from .predict import Ensemble, Prediction
from .schedules import Balanced, Independent, IndependentKFold, Stratified
from .version import VERSION

__version__ = VERSION

register = algorithms.register
"""Decorator that files an algorithm under a name: `@fe.register("mine")`."""

__all__ = [
    "QSGD", "SGD", "Adam", "Algorithm", "Balanced", "Cohort", "DataError", "Devices", "Diana", "DivergedError",
    "Dore", "Engine", "Ensemble", "EnsembleState", "Everybody", "FedAc", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM",
    "FedDyn", "FedEnsembleError", "FedPD", "FedProx", "FedSplit", "FedYogi", "FederatedData", "Federation",
    "Independent", "IndependentKFold", "InputError", "LocalProblem", "Optimizer", "Participation", "Plan",
    "Prediction", "RoundReport", "Scaffold", "Schedule", "StoreError", "Stratified", "evaluate", "register",
    "schedules",
]  # fmt: skip
