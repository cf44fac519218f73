"""The estimators inside tools of scikit-learn and MAPIE, which must pass the clients on."""

import numpy as np
import pytest
import sklearn
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes, load_digits, load_iris
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    cross_val_score,
    cross_validate,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedensemble as fe

FAST = {"modes": 2, "rounds": 10, "random_state": 0}


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True, as_frame=True)


@pytest.fixture
def routing():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


SITES = np.array([f"site {row % 6}" for row in range(150)])


def test_group_k_fold_trains_on_the_other_clients(iris, routing):
    found = cross_validate(
        fe.FedEnsembleClassifier(**FAST),
        *iris,
        cv=GroupKFold(3),
        params={"groups": SITES},
        return_estimator=True,
        return_indices=True,
    )
    assert found["test_score"].min() > 0.8
    for fitted, train in zip(found["estimator"], found["indices"]["train"], strict=True):
        assert fitted.client_names_ == tuple(np.unique(SITES[train])) and len(train) == 100


def test_group_k_fold_without_routing(iris):
    scores = cross_val_score(
        fe.FedEnsembleClassifier(**FAST),
        *iris,
        groups=SITES,
        params={"groups": SITES},
        cv=GroupKFold(3),
    )
    assert len(scores) == 3 and scores.min() > 0.8


def test_pipelines_pass_groups_on(iris, routing):
    pipe = make_pipeline(StandardScaler(), fe.FedEnsembleClassifier(**FAST))
    pipe.fit(*iris, groups=SITES)
    assert pipe[-1].client_names_ == tuple(np.unique(SITES))
    scores = cross_val_score(pipe, *iris, cv=GroupKFold(3), params={"groups": SITES})
    assert scores.min() > 0.8


def test_pipelines_without_routing_name_the_step(iris):
    pipe = make_pipeline(StandardScaler(), fe.FedEnsembleClassifier(**FAST))
    pipe.fit(*iris, fedensembleclassifier__groups=SITES)
    assert len(pipe[-1].client_names_) == 6


def test_columns_of_text(iris):
    x = iris[0].iloc[:, :2].assign(color=np.where(iris[1] == 1, "green", "blue"))
    columns = make_column_transformer(
        (OneHotEncoder(), ["color"]), (StandardScaler(), list(x.columns[:2]))
    )
    pipe = make_pipeline(columns, fe.FedEnsembleClassifier(**FAST)).fit(x, iris[1])
    assert pipe[-1].n_features_in_ == 4 and pipe.score(x, iris[1]) > 0.9


def test_grid_search(iris):
    search = GridSearchCV(
        fe.FedEnsembleClassifier(**FAST),
        {"lr": [1e-4, 0.1], "algorithm": [fe.FedAvg(), fe.FedProx(mu=0.01)]},
        cv=2,
    ).fit(*iris)
    assert search.best_params_["lr"] == 0.1 and search.best_score_ > 0.8
    assert search.best_estimator_.classes_.tolist() == [0, 1, 2]


def test_calibrated():
    x, y = load_digits(return_X_y=True)
    x, y = x[:600], y[:600]
    # far too few steps: the probabilities are too small, and calibration repairs it
    model = fe.FedEnsembleClassifier(modes=2, rounds=3, lr=0.02, random_state=0)
    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)
    before = log_loss(y_test, model.fit(x_train, y_train).predict_proba(x_test))
    calibrated = CalibratedClassifierCV(model, method="temperature", cv=2).fit(x_train, y_train)
    assert log_loss(y_test, calibrated.predict_proba(x_test)) < before


def test_mapie_covers_what_it_promises():
    mapie = pytest.importorskip("mapie.classification")
    x, y = load_digits(return_X_y=True)
    x_train, x_rest, y_train, y_rest = train_test_split(x, y, train_size=400, random_state=0)
    model = fe.FedEnsembleClassifier(**FAST).fit(x_train, y_train)
    conformal = mapie.SplitConformalClassifier(model, confidence_level=0.9, prefit=True)
    conformal.conformalize(x_rest[:600], y_rest[:600])
    _, sets = conformal.predict_set(x_rest[600:])
    covered = sets[np.arange(len(y_rest) - 600), y_rest[600:], 0].mean()
    assert 0.85 < covered < 0.95 and sets.sum(1).mean() < 2


def test_mapie_intervals():
    mapie = pytest.importorskip("mapie.regression")
    x, y = load_diabetes(return_X_y=True)
    model = fe.FedEnsembleRegressor(**FAST).fit(x[:200], y[:200])
    conformal = mapie.SplitConformalRegressor(model, confidence_level=0.8, prefit=True)
    conformal.conformalize(x[200:320], y[200:320])
    _, intervals = conformal.predict_interval(x[320:])
    inside = (intervals[:, 0, 0] <= y[320:]) & (y[320:] <= intervals[:, 1, 0])
    assert 0.65 < inside.mean() < 0.95
