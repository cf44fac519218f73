"""`FedEnsembleClassifier`: a federated ensemble as a classifier of scikit-learn."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from ..errors import InputError
from ..uncertainty.scores import SCORES
from .base import INPUTS, FedEnsembleEstimator, Floats, to_dense


class FedEnsembleClassifier(ClassifierMixin, FedEnsembleEstimator):  # type: ignore[misc]
    """A classifier of scikit-learn that trains K modes on federated clients.

    `groups` of `fit` says which client has which row. Without groups, the rows are divided at
    random among `clients` clients of equal size, within one row.

    Args:
        model: registered name, such as "mlp", a dict with the name and options,
            {"name": "mlp", "hidden": [32, 32]}, or a callable that returns a new nn.Module. A
            callable with parameters `shape` or `outputs` gets the shape of one input and the number
            of outputs.
        algorithm: registered name, an Algorithm such as `FedProx(mu=0.1)`, or a dict with the name
            and options.
        modes: K, the number of models in the ensemble.
        rounds: number of communication rounds.
        clients: number of clients if `fit` gets no groups; at most one per row.
        clients_per_round: M, the number of clients per round; None, or more than there are, takes
            all.
        schedule: registered name of the rule for which clients train which modes.
        epochs: passes over a client's rows per round.
        batch_size: rows per local step.
        lr: learning rate of local training; None takes that of `algorithm`.
        scale: standardise each column by mean and standard deviation over all clients, computed
            from one message per client. The ensemble then takes raw inputs.
        federation_options: further arguments of `Federation`, such as {"average": "ema"}.
        device: "cpu", "cuda" or "auto".
        dtype: "float64" or "float32", of parameters and arithmetic.
        verbose: show a progress bar on a terminal and in a notebook.
        random_state: an integer for repeatable results; it is then the seed of the federation.

    Attributes:
        classes_: the labels, sorted.
        n_features_in_, feature_names_in_: number of columns, and their names if X was a DataFrame.
        ensemble_: the trained `Ensemble`, for raw inputs.
        losses_: training loss of each round, [rounds].
        client_names_: names of the clients, from groups; None without groups.
        notes_: sentences on the data, such as a class that only one client has.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True, as_frame=True)
    >>> hospital = [row % 3 for row in range(len(X))]
    >>> model = FedEnsembleClassifier(modes=3, rounds=20, random_state=0)
    >>> model = model.fit(X, y, groups=hospital)
    >>> model.score(X, y) > 0.9, model.predict_proba(X).shape
    (True, (150, 3))
    """

    _loss = "cross_entropy"

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Trains the ensemble; returns the estimator.

        Args:
            X: inputs, [n, columns]: an array, a DataFrame or a sparse matrix, which becomes dense.
            y: labels, [n]: numbers, text or booleans.
            groups: the client of each row, [n]: numbers or text; None divides the rows at random.
        """
        return self._train(X, y, groups)

    def predict(self, X: Any) -> NDArray[Any]:
        """Returns the most probable label of each row, [n]."""
        numbers = self._predict(X).label.numpy()
        labels: NDArray[Any] = self.classes_[numbers]
        return labels

    def predict_proba(self, X: Any) -> Floats:
        """Returns the probability of each class, [n, C], in the order of `classes_`."""
        probabilities: Floats = self._predict(X).mean.numpy()
        return probabilities

    def predict_uncertainty(self, X: Any) -> dict[str, Floats]:
        """Returns scores of uncertainty of each row by name, [n] each; higher is less certain.

        They are those of `Prediction.uncertainty`. "mutual_information" and "variation_ratio"
        measure how much the modes disagree; the others contain the noise of the labels, too.
        """
        prediction = self._predict(X)
        return {score: prediction.uncertainty(score).numpy() for score in SCORES}

    def _validate(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X, y = validate_data(self, X, y, **INPUTS)
        check_classification_targets(y)
        return to_dense(X), y

    def _encode(self, y: NDArray[Any]) -> NDArray[Any]:
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"A classifier needs rows of 2 classes or more; y has 1 class, {self.classes_[0]}."
            )
        return numbers

    def _class_names(self) -> tuple[str, ...] | None:
        names = tuple(map(str, self.classes_.tolist()))
        # Labels that look the same as text, such as 1 and "1", have no useful names.
        distinct = len(set(names)) == len(names) and all(names)
        return names if distinct else tuple(map(str, range(len(names))))
