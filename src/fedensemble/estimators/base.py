"""What classifier and regressor have in common: parameters, clients, training and saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from ..arguments import check_names, require_integer, require_one_of
from ..core.algorithm import Algorithm
from ..data.client_numbers import number_clients
from ..data.convert import as_tensor
from ..data.dataset import Dataset
from ..data.federated import FederatedData
from ..data.partitioning.partition import partition
from ..data.pooled_moments import pooled_standardise
from ..errors import InputError
from ..federation.federation import Federation
from ..federation.named_models import ask_for_facts
from ..federation.resolve import Spec, resolve_algorithm
from ..predict import Ensemble
from ..prediction import Prediction

Floats = NDArray[np.floating[Any]]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_OWN = ("model", "data", "algorithm", "seed", "loss")  # set by the estimator itself


class FedEnsembleEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base class of the estimators; use `FedEnsembleClassifier` or `FedEnsembleRegressor`."""

    # With metadata routing, `groups` of a cross-validation or a pipeline come to `fit` without
    # being asked for, as they come to `GroupKFold`.
    __metadata_request__fit = {"groups": True}  # noqa: RUF012 (scikit-learn reads it)
    _loss: str

    def __init__(
        self,
        model: str | Mapping[str, Any] | Callable[..., nn.Module] = "mlp",
        algorithm: Spec | Algorithm = "fedavg",
        *,
        modes: int = 5,
        rounds: int = 50,
        clients: int = 10,
        clients_per_round: int | None = None,
        schedule: str = "balanced",
        epochs: int = 5,
        batch_size: int = 32,
        lr: float | None = None,
        scale: bool = True,
        federation_options: Mapping[str, Any] | None = None,
        device: str = "cpu",
        dtype: str = "float64",
        verbose: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.model = model
        self.algorithm = algorithm
        self.modes = modes
        self.rounds = rounds
        self.clients = clients
        self.clients_per_round = clients_per_round
        self.schedule = schedule
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.scale = scale
        self.federation_options = federation_options
        self.device = device
        self.dtype = dtype
        self.verbose = verbose
        self.random_state = random_state

    def make_federation(self, X: Any, y: Any, groups: Any = None) -> Federation:
        """Returns the federation that `fit` trains, before round 1.

        Use it to train with a callback, to test between rounds, or to save a run folder.

        Args:
            X, y, groups: as in `fit`.
        """
        return self._prepare(X, y, groups)

    def _prepare(self, X: Any, y: Any, groups: Any) -> Federation:
        """Checks X and y, learns what is derived from them, and returns the federation."""
        X, y = self._validate(X, y)
        seed = self._draw_seed()
        return self._build(self._divide(X, self._encode(y), groups, seed), seed)

    def _train(self, X: Any, y: Any, groups: Any) -> Self:
        rounds = require_integer(type(self).__name__, "rounds", self.rounds, minimum=1)
        federation = self._prepare(X, y, groups)
        if self.verbose:
            federation.train(rounds)
        else:
            for _ in federation.rounds(rounds):
                pass
        self.ensemble_: Ensemble = federation.ensemble
        self.losses_ = np.array([record["loss"] for record in federation.history.records])
        self.client_names_ = federation.data.names
        self.notes_ = federation.data.notes
        return self

    def _validate(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        """Returns checked X and y, and sets `n_features_in_` and `feature_names_in_`."""
        raise NotImplementedError

    def _encode(self, y: NDArray[Any]) -> NDArray[Any]:
        """Returns the targets that the modes are trained on, and remembers how to undo it."""
        raise NotImplementedError

    def _class_names(self) -> tuple[str, ...] | None:
        """Returns the name of each class, for tables and reports."""
        return None

    def _divide(self, X: Floats, y: NDArray[Any], groups: Any, seed: int) -> FederatedData:
        """Returns the rows divided among clients: by `groups`, or at random without them."""
        names = self._class_names()
        source: dict[str, Any] = {
            "x": X,
            "y": y,
            "classes": None if names is None else len(names),
            "class_names": names,
            "feature_names": self._column_names(),
            "info": {"source": "arrays"},
        }
        if groups is None:
            count = require_integer(type(self).__name__, "clients", self.clients, minimum=1)
            data = partition(Dataset(**source), "iid", min(count, len(X)), seed)
        else:
            group, group_names = number_clients(groups, len(X), "groups")
            data = partition(
                Dataset(**source, group=group, group_names=group_names), "natural", seed=seed
            )
        if self.scale:
            data = replace(data, standardise=pooled_standardise(data.x, data.size))
        return data

    def _column_names(self) -> tuple[str, ...] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else tuple(map(str, names))

    def _build(self, data: FederatedData, seed: int) -> Federation:
        """Returns the federation of the parameters."""
        owner = type(self).__name__
        require_one_of(owner, "dtype", self.dtype, tuple(DTYPES))
        options = self._further_options()
        algorithm = resolve_algorithm(self.algorithm)
        if self.lr is not None:
            algorithm = replace(algorithm, lr=self.lr)
        per_round = self.clients_per_round
        if per_round is not None:
            # Folds of a cross-validation have fewer clients than all data.
            per_round = min(
                require_integer(owner, "clients_per_round", per_round, minimum=1), len(data)
            )
        return Federation(
            ask_for_facts(self.model, data, self._loss),
            data,
            algorithm,
            modes=self.modes,
            clients_per_round=per_round,
            schedule=self.schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            loss=self._loss,
            device=self.device,
            dtype=DTYPES[self.dtype],
            seed=seed,
            **options,
        )

    def _further_options(self) -> dict[str, Any]:
        """Returns a copy of `federation_options`; raises for what the estimator sets itself."""
        options = {} if self.federation_options is None else self.federation_options
        if not isinstance(options, Mapping):
            raise InputError(
                "federation_options must be a dict of arguments of Federation, such as "
                f"{{'average': 'ema'}}; got {options!r}."
            )
        taken = [name for name in options if name in (*_OWN, *self.get_params())]
        if taken:
            raise InputError(
                f"federation_options has {taken[0]!r}, which the estimator sets itself. Leave it "
                f"out, or use the parameter of {type(self).__name__}."
            )
        check_names("Federation", Federation, options, given=("model", "data"))
        return dict(options)

    def _draw_seed(self) -> int:
        """Returns the seed of the federation: `random_state` itself if it is an integer."""
        if isinstance(self.random_state, (int, np.integer)):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _predict(self, X: Any) -> Prediction:
        """Returns the prediction of the ensemble for checked inputs."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, **INPUTS)
        return self.ensemble_.predict(as_tensor(to_dense(X)))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


# How scikit-learn checks inputs: numbers, dense or sparse, without nan and infinity.
INPUTS: dict[str, Any] = {"dtype": (np.float64, np.float32), "accept_sparse": "csr"}


def to_dense(X: Any) -> Floats:
    """Returns an array; sparse matrices, as of a OneHotEncoder, become dense."""
    dense: Floats = X.toarray() if hasattr(X, "toarray") else X
    return dense
