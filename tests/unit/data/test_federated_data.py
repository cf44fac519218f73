"""FederatedData: flat arrays with offsets, and the errors for data that cannot be trained on."""

import numpy as np
import pytest
import torch

from fedensemble.data import FederatedData, Standardise, normalize
from fedensemble.errors import DataError


def pair(n, features=2, label=0):
    return np.ones((n, features), np.float32), np.full(n, label)


def test_clients_are_stored_in_order():
    data = FederatedData.from_clients([pair(2), pair(3, label=1), pair(1, label=4)])
    assert len(data) == 3
    assert data.start.tolist() == [0, 2, 5]
    assert data.client(1)[1].tolist() == [1, 1, 1]
    assert data.classes == 5
    assert data.label_counts().tolist() == [[2, 0, 0, 0, 0], [0, 3, 0, 0, 0], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("clients", "problem"),
    [
        ([], "no clients"),
        (
            [pair(2), pair(2, features=3)],
            r"inputs of client 1 are \(3,\) float32 .* client 0 are \(2,\) float32",
        ),
        ([pair(2), (np.ones((2, 2), np.float32), np.zeros(2))], "targets of client 1 .* float64"),
        ([pair(2), pair(0)], "Client 1 has no examples"),
        ([pair(2), ([], [])], "Client 1 has no examples"),
        ([pair(2), pair(2, label=-1)], "client 1 must be 0, 1, 2, ...; got -1"),
        ([(np.ones((2, 1)), np.zeros(3, int))], r"shapes \(2, 1\) and \(3,\)"),
        (
            [(np.array([[1.0], [np.nan]]), np.zeros(2, int))],
            "Inputs of client 0 contain nan .* row 1",
        ),
        (
            [(np.ones((2, 1)), np.array([0.0, np.inf]))],
            "Targets of client 0 contain nan or infinity .* row 1",
        ),
        ([(np.array([["a"], ["b"]]), np.zeros(2, int))], "must be numbers"),
        ([([[1.0], [1.0, 2.0]], [0, 1])], "must be numbers"),
        ([(np.ones((2, 1), bool), np.zeros(2, int))], "torch.bool"),
    ],
)
def test_unusable_clients(clients, problem):
    with pytest.raises(DataError, match=problem):
        FederatedData.from_clients(clients)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"x_test": np.ones((2, 3), np.float32), "y_test": np.zeros(2, int)},
            r"Test inputs have shape \(3,\)",
        ),
        ({"x_test": np.ones((2, 2), np.float32)}, "only one of x_test and y_test"),
        (
            {"x_test": np.full((2, 2), np.nan), "y_test": np.zeros(2, int)},
            "Inputs of the test data contain nan",
        ),
        (
            {"x_test": np.ones((2, 2)), "y_test": np.array([0, 7]), "classes": 3},
            "test data must be below .*, 3; got 7",
        ),
        ({"classes": 1}, "below the number of classes, 1; got 1"),
        ({"names": ("ann",)}, "2 clients, but 1 names"),
    ],
)
def test_unusable_options(options, problem):
    with pytest.raises(DataError, match=problem):
        FederatedData.from_clients([pair(2), pair(2, label=1)], **options)


def test_sizes_must_fit():
    x, y = pair(4)
    with pytest.raises(DataError, match="add up to 3, but there are 4"):
        FederatedData.from_arrays(x, y, [1, 2])
    with pytest.raises(DataError, match=r"1 of 3 clients have no examples \(first: client 1\)"):
        FederatedData.from_arrays(x, y, [2, 0, 2])
    with pytest.raises(DataError, match="no examples"):
        FederatedData.from_arrays(x, y, [5, -1])


def test_test_labels_count_as_classes():
    data = FederatedData.from_clients(
        [pair(2)], x_test=np.ones((2, 2), np.float32), y_test=np.array([0, 6], np.uint8)
    )
    assert data.classes == 7
    assert data.y_test.dtype == torch.int64


def test_images_stay_bytes():
    images = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
    data = FederatedData.from_clients([(images, [0, 1])])
    assert data.x.dtype == torch.uint8
    assert data.inputs(data.x, torch.float32).flatten().tolist() == [0.0, 1.0]
    rule = Standardise(mean=(255.0,), std=(255.0,))
    data = FederatedData.from_clients([(images, [0, 1])], standardise=rule)
    assert data.inputs(data.x, torch.float64).flatten().tolist() == [-1.0, 0.0]


def test_standardise_works_by_channel():
    x = torch.tensor([10, 20, 30], dtype=torch.uint8).reshape(1, 3, 1, 1).expand(2, 3, 2, 2)
    seen = Standardise(mean=(10.0, 20.0, 30.0), std=(1.0, 2.0, 5.0))(x, torch.float32)
    assert seen.shape == (2, 3, 2, 2)
    assert float(seen.abs().max()) == 0.0
    seen = Standardise(mean=(0.0, 1.0), std=(1.0, 2.0))(torch.tensor([[1.0, 3.0]]), torch.float32)
    assert seen.tolist() == [[1.0, 1.0]]


def test_constants_keep_their_addresses():
    def mean_of(number):
        return normalize._cached_constant((float(number),), torch.float32, torch.device("cpu"), 0)

    before = mean_of(0)
    for number in range(1, 200):
        mean_of(number)
    assert mean_of(0) is before


def test_tokens_stay_integers():
    tokens = np.array([[1, 2], [3, 0]], np.uint8)
    data = FederatedData.from_clients([(tokens, tokens)], x_test=tokens, y_test=tokens)
    assert data.x.dtype == data.y.dtype == data.x_test.dtype == data.y_test.dtype == torch.int64
    assert data.inputs(data.x, torch.float32) is data.x
    assert data.label_counts().tolist() == [[1, 1, 1, 1]]


def test_regression_has_no_label_counts():
    data = FederatedData.from_clients([(np.ones((2, 1)), np.ones((2, 1)))])
    assert data.classes is None
    with pytest.raises(DataError, match="not class labels"):
        data.label_counts()


def test_arrays_torch_cannot_share():
    fixed = np.arange(4.0).reshape(4, 1)
    fixed.flags.writeable = False
    for x in (
        fixed,
        np.arange(4.0).reshape(4, 1)[::-1],
        np.arange(4.0).reshape(4, 1).astype(">f8"),
    ):
        data = FederatedData.from_clients([(x, np.zeros(4, int))])
        assert data.x.flatten().tolist() == x.ravel().tolist()


def test_to_keeps_everything_else():
    data = FederatedData.from_clients([pair(2)], names=("ann",), info={"source": "mine"})
    moved = data.to("cpu")
    assert moved.x is data.x
    assert moved.names == ("ann",)
    assert moved.info == {"source": "mine"}


def test_notes_on_labels():
    x = np.ones((4, 2), np.float32)
    assert (
        FederatedData.from_clients([(x, [0, 1, 2, 1])], x_test=x, y_test=[0, 1, 1, 0]).notes == ()
    )
    assert (
        FederatedData.from_clients([(x, [0, 1, 5, 1])], classes=9).notes == ()
    )  # the number of classes is explicit
    (stray,) = FederatedData.from_clients([(x, [0, 1, 5, 1])]).notes
    assert "go up to 5, but only 3" in stray and "missing is 2" in stray
    (unseen,) = FederatedData.from_clients(
        [(x, [0, 1, 0, 1])], x_test=x, y_test=[0, 1, 2, 2], classes=3
    ).notes
    assert "2 of 4 test examples" in unseen
    assert FederatedData.from_clients([(x, np.array([[0, 7]] * 4))]).notes == ()  # tokens
    with pytest.raises(DataError, match=r"test data \(5, 6, 7\) occurs in training \(0, 1, 2\)"):
        FederatedData.from_clients([(x, [0, 1, 2, 1])], x_test=x, y_test=[5, 6, 7, 5])
    data = FederatedData.from_clients([(x, [0, 1, 2, 1])], x_test=x, y_test=[5, 6, 7, 5], classes=8)
    assert "4 of 4 test examples" in data.notes[0] and data.to("cpu").notes == data.notes


def test_images_with_channels_last_are_noted_and_explained():
    from PIL import Image
    from torch import nn

    from fedensemble import Federation, InputError

    images = [Image.new("RGB", (16, 12)) for _ in range(3)]
    data = FederatedData.from_clients([(images, [0, 1, 1])])
    assert data.x.shape == (3, 12, 16, 3)
    (note,) = data.notes
    assert "channels first: give x.transpose(0, 3, 1, 2)" in note

    def convolution():
        return nn.Sequential(
            nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
        )

    with pytest.raises(InputError, match=r"channels first: give x\.transpose"):
        Federation(convolution, data, modes=1)
    turned = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
    first = FederatedData.from_clients([(turned, [0, 1, 1])])
    assert first.notes == () and Federation(convolution, first, modes=1)
    with pytest.raises(DataError, match="different sizes or modes"):
        FederatedData.from_clients([([images[0], Image.new("RGB", (5, 5))], [0, 1])])


def test_arguments_are_explicit():
    import inspect

    for method in (FederatedData.from_clients, FederatedData.from_arrays):
        parameters = inspect.signature(method).parameters
        assert {"x_test", "y_test", "names", "classes", "class_names"} <= set(parameters)
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())


def test_a_class_of_one_client_is_noted_with_names():
    clients = [([[0.0], [1.0]], ["well", "ill"]), ([[2.0]], ["well"]), ([[3.0]], ["well"])]
    data = FederatedData.from_clients(clients, names=["north", "south", "west"])
    assert len(data.notes) == 1 and "'ill' ('north')" in data.notes[0]
    assert FederatedData.from_clients(clients + clients[:1]).notes == ()
