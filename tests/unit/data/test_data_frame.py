"""Tables with named columns: the names are kept, and other columns are rejected."""

import numpy as np
import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.errors import DataError


class Frame:
    """A table with the part of the interface of pandas and polars that is used."""

    def __init__(self, **columns):
        self.data = {name: np.asarray(values) for name, values in columns.items()}
        self.columns = list(columns)
        self.shape = (len(next(iter(self.data.values()), ())), len(columns))

    def __getitem__(self, name):
        return self.data[name]

    def __len__(self):
        return self.shape[0]

    def to_numpy(self):
        return np.stack(list(self.data.values()), 1)


def table(rows=4, order=("age", "bmi", "smoker"), **changes):
    numbers = np.arange(rows, dtype=np.float64)
    columns = {"age": numbers, "bmi": numbers * 2, "smoker": numbers > 1, **changes}
    return Frame(**{name: columns[name] for name in (*order, *changes)})


Y = [0, 1, 0, 1]


def test_names_are_kept_and_bools_become_numbers():
    data = fe.FederatedData.from_clients(
        [(table(), Y), (table(), Y)], x_test=table(2), y_test=[0, 1], x_server=table(3)
    )
    assert data.feature_names == ("age", "bmi", "smoker")
    assert data.client(1)[0].tolist() == [[0, 0, 0], [1, 2, 0], [2, 4, 1], [3, 6, 1]]
    assert data.x_test.shape == (2, 3) and data.x_server.shape == (3, 3)
    # Arrays have no names to compare, so they may stand beside tables.
    mixed = fe.FederatedData.from_clients([(np.ones((4, 3)), Y), (table(), Y)])
    assert mixed.feature_names == data.feature_names
    whole = fe.FederatedData.from_arrays(table(), Y, [1, 3])
    assert whole.feature_names == data.feature_names


TURNED = table(order=("bmi", "age", "smoker"))
BAD = [
    (TURNED, r"in another order .* column 0 is 'bmi' where 'age' is expected\. Reorder them: x\["),
    (table(order=("age", "bmi")), "they lack 'smoker'"),
    (table(extra=np.ones(4)), "they also have 'extra'"),
    (
        Frame(years=np.ones(4), bmi=np.ones(4), smoker=np.ones(4)),
        "lack 'age' and also have 'years'",
    ),
    (table(age=np.array(["a"] * 4)), "'age' of .* holds text"),
    (table(age=np.array(["a", 1, 2, 3], object)), "'age' of .* holds text"),
    (table(age=np.zeros(4, "M8[s]")), "'age' of .* holds datetime64"),
]


@pytest.mark.parametrize(("other", "problem"), BAD)
def test_other_columns_are_rejected_everywhere(other, problem):
    clients = [(table(), Y), (table(), Y)]
    with pytest.raises(DataError, match=problem):
        fe.FederatedData.from_clients([*clients, (other, Y)])
    with pytest.raises(DataError, match=problem):
        fe.FederatedData.from_clients(clients, x_test=other, y_test=Y)
    data = fe.FederatedData.from_clients(clients)
    ensemble = fe.Federation(lambda: nn.Linear(3, 2), data, modes=1).ensemble
    assert ensemble.feature_names == data.feature_names
    with pytest.raises(DataError, match=problem):
        ensemble.predict(other)
    same = ensemble.predict(table()).mean
    torch.testing.assert_close(same, ensemble.predict(data.client(0)[0]).mean)


def test_missing_values_are_found_in_their_row():
    holes = table(age=np.array([1.0, None, 2.0, 3.0], object))
    with pytest.raises(DataError, match=r"Inputs of client 0 contain nan .* row 1"):
        fe.FederatedData.from_clients([(holes, Y)])


def test_feature_names_must_fit():
    with pytest.raises(DataError, match=r"1 feature_names for inputs of shape \(3,\)"):
        fe.FederatedData.from_arrays(np.ones((4, 3)), Y, [4], feature_names=["age"])


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [True, False], "c": [3, 4]}, index=[7, 9])
    data = fe.FederatedData.from_clients([(frame, frame["b"])])
    assert data.x.tolist() == [[1, 1, 3], [2, 0, 4]] and data.y.tolist() == [1, 0]
    assert data.feature_names == ("a", "b", "c") and data.class_names == ("False", "True")
    with pytest.raises(DataError, match="in another order"):
        fe.FederatedData.from_clients([(frame, [0, 1]), (frame[["b", "a", "c"]], [0, 1])])
    ordered = frame[["b", "a", "c"]][list(data.feature_names)]
    assert len(fe.FederatedData.from_clients([(frame, [0, 1]), (ordered, [0, 1])])) == 2
