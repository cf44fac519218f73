"""Labels that are names: text, categories and booleans become numbers, with one set for all."""

import numpy as np
import pytest
import torch

import fedensemble as fe
from fedensemble.data import Dataset, FederatedData, load, partition
from fedensemble.errors import DataError

X = np.ones((3, 2), np.float32)


class CategoricalType:
    """The type of a categorical column, as pandas has it."""

    categories = ()


class Categorical:
    """A categorical column with the interface of pandas."""

    dtype = CategoricalType()

    def __init__(self, codes, categories):
        self.codes, self.categories = np.array(codes), categories

    def __len__(self):
        return len(self.codes)


@pytest.mark.parametrize(
    "labels",
    [
        ["dog", "cat", "dog"],
        np.array(["dog", "cat", "dog"]),
        np.array(["dog", "cat", "dog"], object),
        np.array([b"dog", b"cat", b"dog"]),
        np.array(["dog", "-", "cat", "-", "dog", "-"])[::2],
    ],
)
def test_text_is_numbered_in_sorted_order_over_all_clients(labels):
    data = FederatedData.from_clients(
        [(X, labels), (X, ["ant", "cat", "ant"])], x_test=X, y_test=["dog", "ant", "cat"]
    )
    assert data.class_names == ("ant", "cat", "dog") and data.classes == 3
    assert data.y.tolist() == [2, 1, 2, 0, 1, 0] and data.y.dtype == torch.int64
    assert data.y_test.tolist() == [2, 0, 1]
    # Another order of the clients gives the same numbers.
    turned = FederatedData.from_clients([(X, ["ant", "cat", "ant"]), (X, labels)])
    assert turned.y.tolist() == [0, 1, 0, 2, 1, 2]


@pytest.mark.parametrize(
    "labels", [[True, False, True], np.array([True, False, True]), torch.tensor([1, 0, 1]).bool()]
)
def test_booleans_are_two_classes(labels):
    data = FederatedData.from_clients([(X, labels)])
    assert data.y.tolist() == [1, 0, 1] and data.class_names == ("False", "True")
    data = FederatedData.from_clients([(X, labels)], class_names=["benign", "malignant"])
    assert data.y.tolist() == [1, 0, 1] and data.class_names == ("benign", "malignant")
    (all_true,) = FederatedData.from_clients([(X, [True] * 3)]).label_counts().tolist()
    assert all_true == [0, 3]


def test_categories_keep_their_order_and_include_those_that_do_not_occur():
    labels = Categorical([1, 0, 1], ["low", "high", "never"])
    data = FederatedData.from_clients([(X, labels), (X, Categorical([0, 0, 0], labels.categories))])
    assert data.class_names == ("low", "high", "never") and data.classes == 3
    assert data.y.tolist() == [1, 0, 1, 0, 0, 0]
    # Clients that declare different categories: the union in sorted order.
    data = FederatedData.from_clients([(X, labels), (X, Categorical([0, 0, 0], ["late"]))])
    assert data.class_names == ("high", "late", "low", "never")
    assert data.y.tolist() == [0, 2, 0, 1, 1, 1]
    with pytest.raises(DataError, match="client 0 have a missing value in row 2"):
        FederatedData.from_clients([(X, Categorical([0, 1, -1], ["a", "b"]))])


def test_names_given_by_the_user():
    data = FederatedData.from_clients([(X, [2, 0, 2])], class_names=["a", "b", "c"])
    assert data.classes == 3 and data.class_names == ("a", "b", "c") and data.notes == ()
    data = FederatedData.from_clients([(X, ["c", "a", "c"])], class_names=["c", "b", "a"])
    assert data.y.tolist() == [0, 2, 0] and data.classes == 3
    (note,) = FederatedData.from_clients(
        [(X, ["c", "a", "c"])], x_test=X, y_test=["a", "b", "b"], class_names=["a", "b", "c"]
    ).notes
    assert "2 of 3 test examples" in note and "(b)" in note


@pytest.mark.parametrize(
    ("clients", "options", "problem"),
    [
        (
            [["a", "b", "a"]],
            {"x_test": X, "y_test": ["a", "zebra", "a"]},
            r"test data are not among the classes \('a', 'b'\): 'zebra' \(first in row 1\)\. "
            "These labels never occur in training",
        ),
        ([["a", "b", "a"]], {"class_names": ["a"]}, r"'b' \(first in row 1\)\. Add them"),
        ([["a", "b", "a"], [0, 1, 0]], {}, "client 0 are names .* those of client 1 are numbers"),
        ([["a", "b", "a"]], {"x_test": X, "y_test": [0, 1, 0]}, "of the test data are numbers"),
        ([["a", 1, "a"]], {}, "client 0 mix int and str"),
        ([np.array(["a", 1, "a"], object)], {}, "client 0 mix int and str"),
        ([["a", "b", "a"], [True, False, True]], {}, "mix bool and str"),
        ([["a", None, "a"]], {}, "client 0 have a missing value in row 1"),
        ([np.array(["a", "b", np.nan], object)], {}, "missing value in row 2"),
        ([np.array([["a"], ["b"], ["a"]])], {}, r"shape \(3, 1\). Flatten"),
        ([np.zeros((3, 2), bool)], {}, r"one per example, \[n\]; got shape \(3, 2\)"),
        ([[0, 1, 2]], {"class_names": ["a", "b"]}, "below the number of classes, 2; got 2"),
        ([[0, 1, 1]], {"class_names": ["a", "b"], "classes": 3}, "3 classes, but 2 class_names"),
        ([[0.5, 1, 1]], {"class_names": ["a", "b"]}, "targets are floats"),
        ([[0, 1, 1]], {"class_names": ["a", "a"]}, "'a' twice"),
        ([[0, 1, 1]], {"class_names": "ab"}, "must be a list of texts"),
        ([[0, 1, 1]], {"class_names": ["a", 1]}, "name of class 1 must be a text"),
        ([[-1, 1, 1]], {}, r"got -1\. Give other labels as text"),
    ],
)
def test_labels_that_cannot_be_numbered(clients, options, problem):
    with pytest.raises(DataError, match=problem):
        FederatedData.from_clients([(X, y) for y in clients], **options)


def test_numbers_stay_numbers():
    data = FederatedData.from_clients([(X, np.array([0, 2, 1], object))])
    assert data.y.tolist() == [0, 2, 1] and data.class_names is None


def test_datasets_and_partitions_keep_names(tmp_path):
    x = np.ones((6, 2), np.float32)
    y = np.array(["b", "a", "b", "a", "b", "a"])
    np.savez(tmp_path / "mine.npz", x=x, y=y, x_test=x, y_test=y)
    data = partition(load("npz", path=tmp_path / "mine.npz"), "iid", clients=2)
    assert data.class_names == ("a", "b") and sorted(data.y.tolist()) == [0, 0, 0, 1, 1, 1]
    assert data.y_test.tolist() == [1, 0, 1, 0, 1, 0]
    data = partition(
        load("npz", path=tmp_path / "mine.npz", class_names=["b", "a"]), "iid", clients=2
    )
    assert data.class_names == ("b", "a") and data.y_test.tolist() == [0, 1, 0, 1, 0, 1]
    source = Dataset(x, np.arange(6) % 2, class_names=("no", "yes"))
    assert source.classes == 2 and partition(source, "iid", 2).class_names == ("no", "yes")
    assert partition(load("digits"), "iid", 5).class_names == tuple("0123456789")
    np.savez(tmp_path / "other.npz", x=x, y=y, x_test=x, y_test=np.array(["c"] * 6))
    with pytest.raises(DataError, match=r"test data of .*other\.npz are not among the classes"):
        load("npz", path=tmp_path / "other.npz")


def test_predictions_and_metrics_speak_names():
    mean = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    named = fe.Prediction(mean, mean.unsqueeze(0), class_names=("cat", "dog"))
    assert named.label_names.tolist() == ["cat", "cat", "dog"]
    assert fe.evaluate(named, ["cat", "dog", "dog"]) == fe.evaluate(named, [0, 1, 1])
    with pytest.raises(DataError, match=r"'cow' \(first in row 0\). The modes cannot predict"):
        fe.evaluate(named, ["cow", "dog", "dog"])
    plain = fe.Prediction(mean, mean.unsqueeze(0))
    assert plain.label_names.tolist() == ["0", "0", "1"]
    assert fe.evaluate(plain, [False, True, True]) == fe.evaluate(plain, [0, 1, 1])
    with pytest.raises(DataError, match="trained on numbers without names"):
        fe.evaluate(plain, ["cat", "dog", "dog"])


def test_metrics_per_class_agree_with_scikit_learn():
    from sklearn.metrics import precision_recall_fscore_support

    rng = np.random.default_rng(0)
    mean = torch.tensor(rng.dirichlet(np.ones(4), 200))
    mean[:, 3] = 0  # never predicted
    target = rng.integers(0, 3, 200)
    names = ("a", "b", "c", "d")
    prediction = fe.Prediction(mean, mean.unsqueeze(0), class_names=names)
    found = fe.evaluate_classes(prediction, target)
    expected = precision_recall_fscore_support(
        target, prediction.label.numpy(), labels=range(4), zero_division=0
    )
    assert tuple(found) == names
    for number, row in enumerate(found.values()):
        np.testing.assert_allclose(list(row.values()), [part[number] for part in expected], 1e-5)


def test_pandas():
    pandas = pytest.importorskip("pandas")
    labels = pandas.Series(["b", "a", "b"], dtype="category")
    assert FederatedData.from_clients([(X, labels)]).y.tolist() == [1, 0, 1]
    for kind in ("object", "string"):
        data = FederatedData.from_clients([(X, pandas.Series(["b", "a", "b"], dtype=kind))])
        assert data.class_names == ("a", "b")
    data = FederatedData.from_clients([(X, pandas.array([True, False, True], dtype="boolean"))])
    assert data.y.tolist() == [1, 0, 1]
    with pytest.raises(DataError, match="missing value in row 1"):
        FederatedData.from_clients([(X, pandas.Series(["b", None, "b"], dtype="string"))])
