"""Flattening of named tensors into one parameter vector, and back."""

import torch

from fedensemble.flat_params import Layout, payload_bytes, select_rows
from fedensemble.testing.toy_problems import numbers

TENSORS = {"w": numbers(2, 3), "scalar": numbers(1).reshape(()), "b": numbers(2, word=1)}


def test_flatten_and_unflatten_are_inverse():
    layout = Layout.of(TENSORS)
    vector = layout.flatten(TENSORS)
    assert layout.total == len(vector) == 9
    assert layout.sizes == [6, 1, 2]
    torch.testing.assert_close(layout.unflatten(vector), TENSORS, rtol=0, atol=0)


def test_leading_dimensions_are_kept():
    layout = Layout.of(TENSORS)
    for lead in ((4,), (2, 3)):
        batch = {name: value.expand(*lead, *value.shape) for name, value in TENSORS.items()}
        vector = layout.flatten(batch)
        assert vector.shape == (*lead, 9)
        torch.testing.assert_close(layout.unflatten(vector), batch, rtol=0, atol=0)


def test_order_is_that_of_the_layout():
    layout = Layout.of({"a": torch.ones(1), "b": torch.ones(1)})
    assert layout.flatten({"b": torch.tensor([2.0]), "a": torch.tensor([1.0])}).tolist() == [
        1.0,
        2.0,
    ]


def test_nothing_is_an_empty_vector():
    layout = Layout.of({})
    assert layout.total == 0
    assert layout.flatten({}).shape == (0,)


def test_rows_and_bytes():
    tree = {"a": torch.zeros(3, 4, dtype=torch.float64), "b": torch.ones(3, 1, dtype=torch.float32)}
    assert payload_bytes(tree) == payload_bytes(select_rows(tree, 0)) == 4 * 8 + 4
    assert select_rows(tree, torch.tensor([2, 0]))["a"].shape == (2, 4)
    assert select_rows(tree, 1)["b"].shape == (1,)
