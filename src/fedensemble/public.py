"""The names that `import fedensemble as fe` offers; the package imports them at first use."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from .algorithms import (
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
from .averages import EMA, SWA, SWAG, Snapshots
from .client_metrics import ClientMetrics, evaluate_clients
from .core.aggregator import Aggregator, aggregators
from .core.algorithm import Algorithm, algorithms
from .core.attack import Attack, attacks
from .core.average import Average, averages
from .core.engine import Engine
from .core.optimizer import SGD, Adam, Optimizer
from .core.participation import Participation, participations
from .core.problem import LocalProblem
from .core.schedule import Schedule, schedules
from .core.types import Cohort, EnsembleState, Plan, RoundReport
from .data import FederatedData
from .errors import (
    AggregatorWarning,
    DataError,
    DivergedError,
    EngineWarning,
    FedEnsembleError,
    InputError,
    StoreError,
    UntrainedWarning,
)
from .federation.federation import Federation
from .metrics import evaluate, evaluate_classes, ood_metrics
from .modeling.activation_checkpoint import activation_checkpoint
from .participation import Devices, Everybody
from .personal.personalize import personalize
from .personal.result import Personalization, read_personalization
from .personal.result import file_name as _personal_file
from .predict import Ensemble
from .prediction import Prediction
from .registry import Registry
from .robust import CenteredClipping, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from .schedules import Balanced, Independent, IndependentKFold, Stratified
from .uncertainty.abstention import Abstention
from .uncertainty.calibration import Calibration

if TYPE_CHECKING:
    from .estimators import FedEnsembleClassifier, FedEnsembleRegressor

_T = TypeVar("_T", bound=type)


def __getattr__(name: str) -> Any:
    """Imports the estimators when they are first used: scikit-learn takes a second."""
    if name not in ("FedEnsembleClassifier", "FedEnsembleRegressor"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from . import estimators

    return getattr(estimators, name)


def register(name: str) -> Callable[[_T], _T]:
    """Decorator that registers a part of the method: `@fe.register("mine")`.

    It takes subclasses of Algorithm, Schedule, Participation and Average.
    """

    def add(cls: _T) -> _T:
        kinds: list[tuple[type, Registry[Any]]] = [
            (Algorithm, algorithms),
            (Schedule, schedules),
            (Participation, participations),
            (Average, averages),
        ]
        for base, registry in kinds:
            if isinstance(cls, type) and issubclass(cls, base):
                registry.register(name)(cls)
                return cls
        raise InputError(
            f"register('{name}') takes a subclass of Algorithm, Schedule, Participation or "
            f"Average; got {cls!r}. Models, datasets and engines have their own registries."
        )

    return add


def load_ensemble(
    folder: str | Path, device: str = "cpu", *, model: Callable[[], nn.Module] | None = None
) -> Ensemble:
    """The ensemble of a finished run or of a saved federation, ready to predict without its data.

    Args:
        folder: of the run, such as "runs/digits/0123456789ab", or that `Federation.save` wrote.
        device: "cpu", "cuda" or "auto".
        model: a callable that returns the nn.Module; None builds the registered model that the
            run's config names.
    """
    # Imported here because training in Python does not need the config package.
    from .experiment.storage.ensemble_file import load_ensemble as load

    return load(folder, device, model)


def load_personalization(
    folder: str | Path,
    method: str,
    device: str = "cpu",
    *,
    model: Callable[[], nn.Module] | None = None,
) -> Personalization:
    """The personal models that `Personalization.save` or `fedensemble personalize` wrote.

    Args:
        folder: of the run.
        method: with which they were made, such as "select".
        device, model: as for `load_ensemble`.
    """
    ensemble = load_ensemble(folder, device, model=model)
    return read_personalization(Path(folder) / _personal_file(method), ensemble)


def report(run: str | Path | Federation, out: str | Path | None = None) -> Path:
    """Writes the HTML report of a run, a comparison or a federation; returns its path.

    Args:
        run: a folder that `Federation.save` or the command line wrote, or a federation with at
            least one trained round.
        out: the page; by default report.html in the folder, and in the current folder for a
            federation.
    """
    # Imported here because the report needs matplotlib and jinja2.
    from .report.from_python import write

    return write(run, out)


__all__ = [
    "EMA",
    "QSGD",
    "SGD",
    "SWA",
    "SWAG",
    "Abstention",
    "Adam",
    "Aggregator",
    "AggregatorWarning",
    "Algorithm",
    "Attack",
    "Average",
    "Balanced",
    "Calibration",
    "CenteredClipping",
    "ClientMetrics",
    "Cohort",
    "DataError",
    "Devices",
    "Diana",
    "DivergedError",
    "Dore",
    "Engine",
    "EngineWarning",
    "Ensemble",
    "EnsembleState",
    "Everybody",
    "FedAc",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedEnsembleClassifier",
    "FedEnsembleError",
    "FedEnsembleRegressor",
    "FedPD",
    "FedProx",
    "FedSplit",
    "FedYogi",
    "FederatedData",
    "Federation",
    "GeometricMedian",
    "Independent",
    "IndependentKFold",
    "InputError",
    "Krum",
    "LocalProblem",
    "Median",
    "MultiKrum",
    "Optimizer",
    "Participation",
    "Personalization",
    "Plan",
    "Prediction",
    "RoundReport",
    "Scaffold",
    "Schedule",
    "Snapshots",
    "StoreError",
    "Stratified",
    "TrimmedMean",
    "UntrainedWarning",
    "activation_checkpoint",
    "aggregators",
    "algorithms",
    "attacks",
    "averages",
    "evaluate",
    "evaluate_classes",
    "evaluate_clients",
    "load_ensemble",
    "load_personalization",
    "ood_metrics",
    "personalize",
    "register",
    "report",
    "schedules",
]
