"""`FedEnsembleRegressor`: a federated ensemble as a regressor of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from ..data.federated import FederatedData
from ..data.pooled_moments import pooled_standardise
from ..prediction import Prediction
from .base import INPUTS, FedEnsembleEstimator, Floats, to_dense


class FedEnsembleRegressor(RegressorMixin, FedEnsembleEstimator):  # type: ignore[misc]
    """A regressor of scikit-learn that trains K modes on federated clients.

    Parameters and attributes are those of `FedEnsembleClassifier`, without `classes_`. `scale`
    standardises the targets, too: `ensemble_` predicts `(y - target_mean_) / target_scale_`.

    Attributes:
        target_mean_, target_scale_: mean and standard deviation of the targets over all clients; 0
            and 1 without `scale`.

    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = FedEnsembleRegressor(modes=3, rounds=20, random_state=0).fit(X, y)
    >>> mean, spread = model.predict(X, return_std=True)
    >>> model.score(X, y) > 0.4, mean.shape, spread.shape
    (True, (442,), (442,))
    """

    _loss = "mse"

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Trains the ensemble; returns the estimator.

        Args:
            X: inputs, [n, columns]: an array, a DataFrame or a sparse matrix, which becomes dense.
            y: targets, [n] or [n, targets].
            groups: the client of each row, [n]: numbers or text; None divides the rows at random.
        """
        return self._train(X, y, groups)

    def predict(self, X: Any, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """Returns the predicted targets, [n] or [n, targets], as y was given.

        Args:
            return_std: also return the standard deviation over the modes. It is no prediction
                interval, because it leaves out the noise of the targets.
        """
        prediction = self._predict(X)
        mean: Floats = prediction.mean.numpy() * self.target_scale_ + self.target_mean_
        if not return_std:
            return self._as_targets(mean)
        return self._as_targets(mean), self._spread(prediction)

    def predict_uncertainty(self, X: Any) -> dict[str, Floats]:
        """Returns {"std": the standard deviation over the modes}, in the units of y."""
        return {"std": self._spread(self._predict(X))}

    def _spread(self, prediction: Prediction) -> Floats:
        """Returns the standard deviation over the modes, in the units and the shape of y."""
        return self._as_targets(prediction.variance.sqrt().numpy() * self.target_scale_)

    def _as_targets(self, values: Floats) -> Floats:
        """Returns values [n, targets] in the shape of y."""
        return values[:, 0] if self._one_target else values

    def _validate(self, X: Any, y: Any) -> tuple[Floats, NDArray[Any]]:
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, **INPUTS)
        return to_dense(X), y

    def _encode(self, y: NDArray[Any]) -> NDArray[Any]:
        self._one_target = y.ndim == 1
        return y.astype(np.float64).reshape(len(y), -1)

    def _divide(self, X: Floats, y: NDArray[Any], groups: Any, seed: int) -> FederatedData:
        data = super()._divide(X, y, groups, seed)
        self.target_mean_, self.target_scale_ = np.zeros(y.shape[1]), np.ones(y.shape[1])
        if self.scale:
            moments = pooled_standardise(data.y, data.size)
            self.target_mean_, self.target_scale_ = np.array(moments.mean), np.array(moments.std)
            data = replace(data, y=moments(data.y, torch.float64))
        return data

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
