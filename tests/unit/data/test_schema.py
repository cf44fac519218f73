"""A schema describes examples that are elsewhere: it is checked without data, and converts data."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data.federated import FederatedData
from fedensemble.data.normalize import Standardise
from fedensemble.data.schema import Schema
from fedensemble.errors import DataError, InputError


def test_a_table_and_a_schema_say_the_same():
    table = {
        "columns": ["age", "pulse"],
        "class_names": ["home", "ward"],
        "mean": [1.0],
        "std": [2.0],
    }
    schema = Schema.from_options(table)
    assert (schema.shape, schema.classes) == ((2,), 2)
    assert schema.standardise == Standardise((1.0,), (2.0,))
    assert Schema.from_options(schema.to_options()) == schema


def test_schemas_of_data_are_those_of_their_examples():
    images = build_data(resolve({"data": {"source": "digits", "clients": 2}}))
    schema = Schema.from_data(images)
    assert (schema.shape, schema.dtype, schema.classes) == ((1, 8, 8), "uint8", 10)
    assert Schema.from_options(schema.to_options()) == schema
    x = schema.convert_inputs(images.x[:3].numpy(), "here")
    assert torch.equal(x, images.x[:3]) and x.dtype == torch.uint8


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "needs shape"),
        ({"columns": []}, "different names"),
        ({"columns": ["a", "a"]}, "different names"),
        ({"shape": [3], "columns": ["a"]}, r"1 columns make the shape \[1\]"),
        ({"shape": [3], "classes": 3, "class_names": ["a"]}, "1 class_names for 3 classes"),
        ({"shape": [3], "mean": [0.0]}, "belong together"),
        ({"shape": [3], "mean": [0.0, 0.0], "std": [1.0, 1.0]}, "need 1 or 3 values"),
        ({"shape": [3], "dtype": "int7"}, r"data\.dtype"),
        ({"shape": [0]}, "shape must be 1 or more"),
        ({"shape": [3], "classes": 0}, "classes must be 1 or more"),
        ({"shape": [3], "path": "x.npz"}, r"data\.path"),
    ],
)
def test_mistakes_are_found_with_the_config(table, words):
    with pytest.raises(InputError, match=words):
        resolve({"data": {"source": "schema", **table}})


def test_a_schema_cannot_be_trained_on_and_says_what_to_do():
    config = resolve({"data": {"source": "schema", "shape": [3], "classes": 2}})
    assert config.data["partition"] == "natural"
    with pytest.raises(DataError, match="fedensemble deploy"):
        build_data(config)


def test_numbers_are_converted_to_the_agreed_type_and_others_are_refused():
    floats = Schema((2,), classes=2)
    assert floats.convert_inputs([[1, 2]], "site").dtype == torch.float32
    with pytest.raises(InputError, match=r"site: the inputs have shape \(3,\)"):
        floats.convert_inputs([[1, 2, 3]], "site")
    tokens = Schema((2,), dtype="int64", classes=9)
    assert (
        tokens.tokens
        and tokens.convert_inputs(np.array([[1, 2]], np.uint8), "x").dtype == torch.int64
    )
    with pytest.raises(InputError, match="type float64, and the schema says int64"):
        tokens.convert_inputs([[1.0, 2.0]], "site")


def test_targets_may_be_names_of_classes():
    named = Schema((1,), classes=2, class_names=("home", "ward"))
    for values in (
        ["ward", "home"],
        np.array(["ward", "home"]),
        np.array([b"ward", b"home"]),
        [1, 0],
    ):
        assert named.convert_targets(values, "site").tolist() == [1, 0]
    with pytest.raises(DataError, match=r"'Ward' \(first in row 1\)"):
        named.convert_targets(["ward", "Ward"], "site")
    with pytest.raises(InputError, match=r"data\.class_names"):
        Schema((1,), classes=2).convert_targets(["ward"], "site")
    assert Schema((1,)).convert_targets([1, 2], "site").dtype == torch.float32  # regression
    assert Schema((1,), classes=2).convert_targets([True, False], "site").tolist() == [1, 0]


def test_class_names_and_columns_of_data_are_in_their_schema():
    data = FederatedData.from_clients([([[0.0], [1.0]], ["home", "ward"])])
    assert Schema.from_data(data).class_names == ("home", "ward")
    assert Schema.from_data(replace(data, feature_names=("age",))).columns == ("age",)
