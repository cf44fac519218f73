"""Federated ensembles as estimators of scikit-learn: `fit(X, y, groups=clients)`."""

from .classifier import FedEnsembleClassifier
from .regressor import FedEnsembleRegressor

__all__ = ["FedEnsembleClassifier", "FedEnsembleRegressor"]
