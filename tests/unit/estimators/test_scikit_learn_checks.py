"""The estimators keep scikit-learn's own contract."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedensemble as fe

FAST = {"modes": 2, "rounds": 20, "clients": 2, "epochs": 2}


@parametrize_with_checks([fe.FedEnsembleClassifier(**FAST), fe.FedEnsembleRegressor(**FAST)])
@pytest.mark.filterwarnings("ignore:Skipping check_array_api_input")
@pytest.mark.filterwarnings("ignore:SCIPY_ARRAY_API is not set")
def test_checks(estimator, check):
    check(estimator)
