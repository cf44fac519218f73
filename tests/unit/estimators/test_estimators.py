"""The estimators train what `Federation` trains, on the clients that they were given."""

import subprocess
import sys

import joblib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from torch import nn

import fedensemble as fe
from fedensemble.data.pooled_moments import pooled_standardise

FAST = {"modes": 2, "rounds": 10, "random_state": 0}


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True, as_frame=True)


def site_of(n, sites=5):
    return np.array([f"site {row * 7 % sites}" for row in range(n)])


def test_fit_is_the_federation_of_the_groups(iris):
    x, y = iris[0].to_numpy(), iris[1].to_numpy()
    sites = site_of(len(x))
    fitted = fe.FedEnsembleClassifier(**FAST, scale=False, lr=0.05).fit(x, y, groups=sites)
    clients = [(x[sites == name], y[sites == name]) for name in np.unique(sites)]
    federation = fe.Federation(
        "mlp",
        fe.FederatedData.from_clients(clients),
        fe.FedAvg(lr=0.05),
        modes=2,
        epochs=5,
        dtype=torch.float64,
        seed=0,
    )
    reports = federation.train(10)
    assert torch.equal(fitted.ensemble_.theta, federation.ensemble.theta)
    assert np.array_equal(fitted.predict_proba(x), federation.predict(x).mean.numpy())
    assert fitted.losses_.tolist() == [report.loss for report in reports]
    assert fitted.client_names_ == tuple(np.unique(sites))


def test_groups_of_any_type_are_the_same_clients(iris):
    sites = site_of(len(iris[0]), 3)
    numbers = np.unique(sites, return_inverse=True)[1]
    as_text, as_numbers, as_list = (
        fe.FedEnsembleClassifier(**FAST).fit(*iris, groups=groups).predict_proba(iris[0])
        for groups in (sites, numbers, sites.tolist())
    )
    assert np.array_equal(as_text, as_numbers) and np.array_equal(as_text, as_list)


def test_without_groups_clients_get_equal_random_parts(iris):
    federation = fe.FedEnsembleClassifier(**FAST, clients=7).make_federation(*iris)
    assert sorted(federation.data.size.tolist()) == [21] * 4 + [22] * 3
    # at random: each client has examples of all classes, although the table is sorted by class
    assert (federation.data.label_counts() > 0).all()
    few = fe.FedEnsembleClassifier(**FAST, clients=7).make_federation([[0.0], [1.0]], [0, 1])
    assert few.data.size.tolist() == [1, 1]


def test_random_state(iris):
    def theta(state):
        fitted = fe.FedEnsembleClassifier(modes=2, rounds=2, random_state=state).fit(*iris)
        return fitted.ensemble_.theta

    assert torch.equal(theta(3), theta(3)) and not torch.equal(theta(3), theta(4))
    assert not torch.equal(theta(None), theta(None))
    assert torch.equal(theta(np.random.RandomState(1)), theta(np.random.RandomState(1)))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    shift=st.sampled_from([0.0, 1.0, -1e6]),
    seed=st.integers(0, 9),
)
def test_pooled_moments_are_those_of_all_rows(sizes, shift, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(sizes), 3)) * [1.0, 100.0, 0.0] + shift
    found = pooled_standardise(torch.tensor(x), torch.tensor(sizes))
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-9, atol=1e-9)
    expected = x.std(0)
    expected[2] = 1.0  # constant
    if sum(sizes) > 1:
        np.testing.assert_allclose(found.std, expected, rtol=1e-6)


def test_scaling_makes_units_irrelevant():
    x, y = load_breast_cancer(return_X_y=True)
    in_other_units = x * np.geomspace(1e-4, 1e4, x.shape[1]) + 7
    estimator = fe.FedEnsembleClassifier(**FAST)
    proba = estimator.fit(x, y).predict_proba(x)
    other = clone(estimator).fit(in_other_units, y).predict_proba(in_other_units)
    np.testing.assert_allclose(proba, other, atol=1e-6)
    assert estimator.score(x, y) > 0.95
    assert estimator.ensemble_.predict(x).label.numpy().tolist() == estimator.predict(x).tolist()


def test_text_labels_and_class_names(iris):
    names = np.array(["setosa", "versicolor", "virginica"])[iris[1]]
    fitted = fe.FedEnsembleClassifier(**FAST).fit(iris[0], names)
    assert fitted.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert set(fitted.predict(iris[0])) <= set(names)
    assert fitted.ensemble_.class_names == ("setosa", "versicolor", "virginica")
    assert fitted.ensemble_.feature_names == tuple(iris[0].columns)
    numbered = fe.FedEnsembleClassifier(**FAST).fit(*iris)
    assert np.array_equal(numbered.predict_proba(iris[0]), fitted.predict_proba(iris[0]))


def test_booleans_and_uneven_numbers_are_labels(iris):
    yes = fe.FedEnsembleClassifier(**FAST).fit(iris[0], iris[1] == 0)
    assert yes.predict(iris[0]).dtype == bool and yes.score(iris[0], iris[1] == 0) > 0.9
    far = fe.FedEnsembleClassifier(**FAST).fit(iris[0], iris[1] * 50 - 1)
    assert set(far.predict(iris[0])) <= {-1, 49, 99}
    assert far.ensemble_.class_names == ("-1", "49", "99")


def test_uncertainty_is_that_of_the_members(iris):
    fitted = fe.FedEnsembleClassifier(**FAST).fit(*iris)
    scores = fitted.predict_uncertainty(iris[0])
    proba = fitted.predict_proba(iris[0])
    members = fitted.ensemble_.predict(iris[0]).members.numpy()
    np.testing.assert_allclose(scores["entropy"], -(proba * np.log(proba)).sum(1))
    inside = -(members * np.log(members)).sum(-1).mean(0)
    np.testing.assert_allclose(
        scores["mutual_information"], scores["entropy"] - inside, rtol=1e-4, atol=1e-12
    )
    np.testing.assert_allclose(scores["max_probability"], 1 - proba.max(1))


def test_regression_is_in_the_units_of_the_targets():
    x, y = load_diabetes(return_X_y=True)
    fitted = fe.FedEnsembleRegressor(**FAST).fit(x, y, groups=np.arange(len(x)) % 4)
    mean, std = fitted.predict(x, return_std=True)
    assert fitted.score(x, y) > 0.4 and mean.shape == std.shape == (442,)
    members = fitted.ensemble_.predict(x).members.numpy()[..., 0] * y.std() + y.mean()
    np.testing.assert_allclose(mean, members.mean(0))
    np.testing.assert_allclose(std, members.std(0, ddof=1))
    assert np.array_equal(fitted.predict_uncertainty(x)["std"], std)
    both = fe.FedEnsembleRegressor(**FAST).fit(x, np.stack([y, -3 * y], 1))
    predicted, spread = both.predict(x, return_std=True)
    assert predicted.shape == spread.shape == (442, 2)
    assert both.score(x, np.stack([y, -3 * y], 1)) > 0.4


class Net(nn.Module):
    """A model of one's own; the estimator gives it shape and outputs."""

    def __init__(self, shape, outputs, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(shape[0], width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, outputs)
        )

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize(
    "model",
    [
        Net,
        {"name": "mlp", "hidden": [4]},
        lambda: nn.Linear(4, 3),
        lambda outputs: Net([4], outputs),
    ],
)
def test_models(iris, model):
    fitted = clone(fe.FedEnsembleClassifier(model, fe.FedProx(mu=0.1), **FAST)).fit(*iris)
    assert fitted.score(*iris) > 0.8 and len(fitted.ensemble_) == 2


def test_saved_by_joblib_and_loaded_in_another_process(iris, tmp_path):
    path, data = tmp_path / "model.joblib", tmp_path / "x.npy"
    fitted = fe.FedEnsembleClassifier(**FAST).fit(*iris)
    joblib.dump(fitted, path)
    np.save(data, iris[0].to_numpy())
    program = (
        "import joblib, numpy, sys, warnings; warnings.simplefilter('ignore')\n"
        f"model = joblib.load({str(path)!r})\n"
        f"numpy.save({str(data)!r}, model.predict_proba(numpy.load({str(data)!r})))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    np.testing.assert_allclose(np.load(data), fitted.predict_proba(iris[0]), rtol=1e-12)


def test_options_reach_the_federation(iris):
    federation = fe.FedEnsembleClassifier(
        algorithm={"name": "fedprox", "mu": 0.2},
        lr=0.03,
        modes=3,
        clients_per_round=99,  # more than there are
        batch_size=7,
        federation_options={"average": "ema", "strata": 2},
        dtype="float32",
    ).make_federation(*iris, groups=site_of(150))
    assert federation.algorithm == fe.FedProx(mu=0.2, lr=0.03)
    assert federation.schedule.clients_per_round == 5 and federation.schedule.strata == 2
    assert isinstance(federation.average, fe.EMA) and federation.work.batch_size == 7
    assert federation.ensemble.theta.dtype == torch.float32


def test_sparse_inputs_are_the_dense_ones(iris):
    from scipy.sparse import csr_matrix

    x = np.where(iris[0] > 3, iris[0], 0)
    dense = fe.FedEnsembleClassifier(**FAST).fit(x, iris[1])
    sparse = fe.FedEnsembleClassifier(**FAST).fit(csr_matrix(x), iris[1])
    assert np.array_equal(dense.predict_proba(x), sparse.predict_proba(csr_matrix(x)))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [1, 2],
            r"groups must give the client of each of the 150 rows; got values of shape \(2,\)",
        ),
        ([None] + ["a"] * 149, "groups has no client in row 0. Drop such rows"),
        ([1.0] * 149 + [np.nan], "groups has no client in row 149"),
        (["a"] * 149 + [" "], "groups has no client in row 149"),
        (np.array([1] * 149 + ["a"], dtype=object), "groups mixes int and str. Give all clients"),
        ([(1, 2), [3]], "groups must give the client of each of the 150 rows"),
    ],
)
def test_groups_that_are_none(iris, groups, message):
    with pytest.raises(ValueError, match=message):
        fe.FedEnsembleClassifier(**FAST).fit(*iris, groups=groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rounds": 0}, "needs rounds to be an integer >= 1; got rounds=0"),
        ({"clients": 0}, "needs clients to be an integer >= 1; got clients=0"),
        ({"dtype": "half"}, "dtype"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"model": 3}, "model must be a callable"),
        (
            {"federation_options": {"modes": 3}},
            "federation_options has 'modes', which the estimator",
        ),
        (
            {"federation_options": {"stratta": 3}},
            "option of Federation 'stratta': did you mean 'strata'",
        ),
        ({"federation_options": [3]}, "federation_options must be a dict"),
        ({"federation_options": {"seed": 3}}, "federation_options has 'seed', which the estimator"),
    ],
)
def test_wrong_arguments(iris, arguments, message):
    with pytest.raises(ValueError, match=message):
        fe.FedEnsembleClassifier(**{**FAST, **arguments}).fit(*iris)


def test_one_class_is_no_task():
    with pytest.raises(fe.InputError, match="2 classes or more; y has 1 class, spam"):
        fe.FedEnsembleClassifier().fit([[1.0], [2.0]], ["spam", "spam"])


def test_the_estimators_are_imported_when_they_are_used():
    program = (
        "import sys, fedensemble as fe\n"
        "fe.Federation\n"
        "assert 'sklearn' not in sys.modules\n"
        "fe.FedEnsembleClassifier\n"
        "assert 'sklearn' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_representations(iris):
    estimator = fe.FedEnsembleClassifier(modes=3)
    assert repr(estimator) == "FedEnsembleClassifier(modes=3)"
    assert "FedEnsembleClassifier" in estimator.fit(*iris)._repr_html_()
